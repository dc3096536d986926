"""Tokens that a config leaves out though its model cannot do without them: padding, and what stands for an image or audio.

Which id they get changes no size: a note says which was taken.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from functools import cache

from transformers import PreTrainedConfig, PreTrainedModel

from sizer.architecture.examples import multimodal_text
from sizer.architecture.examples.example_spec import ExampleSpec, read, special_tokens, takes, text_config
from sizer.architecture.examples.multimodal_inputs import placeholder_names
from sizer.architecture.examples.token_inputs import end_token, vocabulary_of

MARK = re.compile(r"self\.config\.((?:vision|image|video|audio)_(?:start|end|bos|eos)_token_id)")

Completed = tuple[PreTrainedConfig, tuple[str, ...]]


def with_special_tokens(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> Completed:
    """The config, or a copy with the tokens that the class needs and the config does not name, and a note for each."""
    config, notes = _with_padding(config, cls)
    config, more = _with_placeholder(config, cls)
    return config, notes + more


def _with_padding(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> Completed:
    """A head that classifies whole texts finds by the padding where they end; an encoder-decoder shifts its labels with it."""
    classifies = "ForSequenceClassification" in cls.__name__
    part_of = text_config if classifies else lambda config: config
    shifts = takes(cls, "labels") and takes(cls, "decoder_input_ids")
    if not (classifies or shifts) or getattr(part_of(config), "pad_token_id", 0) is not None:
        return config, ()
    config = copy.deepcopy(config)
    token = end_token(part_of(config)) or 0
    part_of(config).pad_token_id = token
    return config, (f"The config names no padding token; {cls.__name__} needs one, and {token} was taken.",)


def _with_placeholder(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> Completed:
    """A text that holds an image or audio needs a token in its place, and ids for the marks that the code looks for."""
    kind = multimodal_text.kind_of(
        ExampleSpec(config=config, cls=cls, batch=1, training=False, length=None, image_size=None)
    )
    if kind is None:
        return config, ()
    part = read(config, "vlm_config", default=config)
    marks = _marks_read_by(cls)  # type: ignore[arg-type]  # as in example_spec.takes
    missing = [name for name in marks if part is config and not hasattr(config, name)]
    if read(part, *placeholder_names(kind)) is None:
        missing += [name for name in placeholder_names(kind) if hasattr(part, name)][:1]
    if not missing:
        return config, ()
    config = copy.deepcopy(config)
    part = read(config, "vlm_config", default=config)
    text = text_config(part)
    taken = special_tokens(config, part, text)
    free = (token for token in reversed(range(vocabulary_of(text))) if token not in taken)
    chosen = dict(zip(missing, free, strict=False))
    for name, token in chosen.items():
        setattr(part, name, token)
    return config, tuple(
        f"The config names no {name}; {token}, the last word without another meaning, was taken."
        for name, token in chosen.items()
    )


@cache
def _marks_read_by(cls: type[PreTrainedModel]) -> tuple[str, ...]:
    """The ids around images and audio clips that the code of the class's file reads from its config."""
    return tuple(dict.fromkeys(MARK.findall(inspect.getsource(sys.modules[cls.__module__]))))

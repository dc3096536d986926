"""Tokens that a config omits although its model needs them: padding, and placeholders of images or audio.

Their ids do not change any size: a note names the chosen ids.
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
    """Return the config, or a copy with the missing tokens that the class needs, and a note for each."""
    config, notes = _with_padding(config, cls)
    config, more = _with_placeholder(config, cls)
    return config, notes + more


def _with_padding(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> Completed:
    """Return the config with a padding token, if the class needs one.

    A head that classifies whole texts finds their ends by the padding; an encoder-decoder shifts its labels with it.
    """
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
    """Return the config with a placeholder token for an image or audio in a text, and with ids for its marks.

    The marks are those that the model's code searches for.
    """
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
    """Return the ids around images and audio clips that the code of the class's file reads from its config."""
    return tuple(dict.fromkeys(MARK.findall(inspect.getsource(sys.modules[cls.__module__]))))

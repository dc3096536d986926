"""transformers configs as blueprints: the class, how to build it, its inputs, its training step."""

from __future__ import annotations

import copy
import inspect
import re
import sys
import warnings
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from sizer.architecture.blueprint import Blueprint, Example, stand_in_loss
from sizer.architecture.calls import REPAIRED, REPAIRS, call
from sizer.architecture.examples import has_own_loss, make_example, multimodal_input_of
from sizer.architecture.examples.example_spec import ExampleSpec, takes, text_config
from sizer.architecture.examples.multimodal_text import TEXT_BESIDE
from sizer.architecture.greedy_generation import generates
from sizer.architecture.guard import clean_config
from sizer.architecture.heads import choose_head, choose_part, no_batch, no_step, no_training
from sizer.architecture.quantization_settings import PLACES
from sizer.architecture.sizes import (
    RECURRENT_TYPES,
    config_image,
    has_position_table,
    position_limit,
    resized,
    takes_any_image,
    usual_image,
    usual_length,
)
from sizer.architecture.special_tokens import with_special_tokens
from sizer.base.config_json import read_config
from sizer.base.errors import BuildError, ConfigError, RequestError, SizerError, TraceError, quote
from sizer.base.versions import installed
from sizer.catalogue.modes import MODES, TEXT
from sizer.catalogue.presets import find_preset
from sizer.query.request import Request

ERROR_LIMIT = 400
GENERATION = "transformers' generate, greedy and not compiled; no token ends a sequence: all get the requested number of tokens."
_LONG_VALUE = re.compile(r"([\[{][^\]}]{40})[^\]}]{20,}|(\S{60})\S+")
_CLASSIFIES = re.compile(r"Classification|Detection|Segmentation")
OWN_ATTENTION = re.compile(r"^class \w*Attention\w*\(", re.MULTILINE)


def huggingface_blueprint(
    config: dict,
    *,
    name: str,
    head: str | None = None,
    sequence_length: int | None = None,
    image_size: tuple[int, int] | None = None,
    attention: str = "sdpa",
    mode: str = "training",
    classes: int | None = None,
    text_alone: bool = False,
) -> Blueprint:
    """Return the blueprint of the transformers class that this config describes.

    Nothing is downloaded, no remote code runs.

    Args:
        config: A clean config.json with its `model_type`.
        name: The name of the model.
        head: The class to build, by default the config's own or the usual class of its type (`choose_head`).
        sequence_length: Tokens, by default the model's usual length (`sizes`).
        image_size: Height and width, by default the model's usual size (`sizes`).
        attention: "sdpa" or "eager".
        mode: A key of MODES.
        classes: Number of classes of a classifier, by default the config's own.
        text_alone: True for text-only inputs of a model that reads images or sound.

    Raises:
        ConfigError: transformers refuses the config.
        RequestError: A choice does not fit the model.
    """
    parsed = choose_part(read_architecture(config), head)
    cls, notes = choose_head(parsed, head)
    if classes is not None:
        _check_classifies(cls, classes)
        parsed.num_labels = classes
    if MODES[mode].generates:
        _check_generates(cls)
        notes += (GENERATION,)
    parsed, token_notes = with_special_tokens(parsed, cls)
    length, length_notes = _length(parsed, cls, sequence_length)
    if MODES[mode].generates and sequence_length is None and has_position_table(parsed) and length:
        length = max(1, length // 2)  # the other half is for generated tokens
    parsed, size, image_notes = _image(parsed, cls, image_size)
    text_example, one_by_one = None, False
    try:
        exact = sequence_length is not None
        spec, more = plan(
            parsed, cls, length=length, image_size=size, exact=exact, mode=mode, text_alone=text_alone
        )
    except RequestError:
        raise
    except TraceError as error:
        example, more = partial(_no_example, str(error)), ()
    except Exception as error:
        example, more = partial(_no_example, f"{cls.__name__} has no example inputs: {_short(error)}"), ()
    else:
        length, example = spec.length, partial(_example, spec)
        if spec.features is not None:
            text_example = partial(_example, replace(spec, features=None, text_alone=True))
            one_by_one = spec.takes("image_grid_thw", "image_sizes")  # attention within each image (Qwen-VL, Pixtral)
    return Blueprint(
        name=name,
        class_name=cls.__name__,
        build=partial(_build, cls, parsed, attention),
        example=example,
        text_example=text_example,
        loss=_loss,
        predict=call,
        checkpoint=_checkpoint if cls.supports_gradient_checkpointing else None,
        sequence_length=length,
        image_size=size,
        one_by_one=one_by_one,
        positions=position_limit(parsed) if has_position_table(parsed) else None,
        notes=notes + token_notes + length_notes + image_notes + _attention_note(cls, attention) + _repair_note(cls) + more,
    )


def _check_classifies(cls: type[PreTrainedModel], classes: int) -> None:
    """Raise RequestError if a class is not a classifier."""
    if not _CLASSIFIES.search(cls.__name__):
        raise RequestError(
            f"classes: {cls.__name__} is not a classifier",
            given=str(classes),
            allowed="a class for classification, detection or segmentation",
            todo="leave classes out, or name such a class with head=",
        )


def _check_generates(cls: type[PreTrainedModel]) -> None:
    """Raise RequestError if a class does not generate text with transformers' own `generate`."""
    if not generates(cls):
        raise RequestError(
            f"mode=generate: {cls.__name__} does not generate text by transformers' own generate",
            given=cls.__name__,
            allowed="a class with a language model's head, such as LlamaForCausalLM",
            todo="choose another head, or mode=inference",
        )


def plan(
    config: PreTrainedConfig,
    cls: type[PreTrainedModel],
    *,
    length: int | None,
    image_size: tuple[int, int] | None,
    exact: bool,
    mode: str,
    text_alone: bool = False,
) -> tuple[ExampleSpec, tuple[str, ...]]:
    """Return the spec of the examples (for a batch of one, without labels) and the notes about them.

    A text with an image or audio inside is made longer than `length` if its placeholders need it, unless `exact`. With
    `text_alone` it has none.

    Raises:
        RequestError: An exact length is too short for them, or the model only reads text.
        TraceError: The class has no step that could be traced.
        BuildError: The config lacks a key that they need.
        Exception: Any error of a recipe on a config for which it was not made.
    """
    reason = no_step(config, cls)
    if reason is not None:
        raise TraceError(reason)
    spec = ExampleSpec(config=config, cls=cls, batch=1, training=False, length=length, image_size=image_size)
    if image_size is not None and takes(cls, "interpolate_pos_encoding") and not takes_any_image(config, cls):
        spec = replace(spec, interpolate=config_image(config) not in (None, image_size))
    notes: tuple[str, ...] = ()
    multimodal_input = multimodal_input_of(spec)
    if text_alone:
        if multimodal_input is None:
            raise _reads_no_more(cls)
        spec = replace(spec, text_alone=True)
        notes += (f"The texts contain no {multimodal_input.kind}.",)
    elif multimodal_input is not None:
        longer = spec.tokens if exact else max(spec.tokens, multimodal_input.count + TEXT_BESIDE)
        spec = replace(spec, length=longer, features=multimodal_input.count)
        notes += (
            f"Every text of {longer} tokens holds one {multimodal_input.kind} ({multimodal_input.count} of them).",
        )
    if MODES[mode].trains and not has_own_loss(replace(spec, training=True)):
        notes += (f"{cls.__name__} has no loss; the sum of the means of its outputs is used instead.",)
    return spec, notes


def _reads_no_more(cls: type[PreTrainedModel]) -> RequestError:
    """Return the error for a class that reads no images or sound within its text."""
    return RequestError(
        f"inputs: {cls.__name__} reads no images or sound within its text",
        given=quote(TEXT),
        allowed="a model such as Qwen3VLForConditionalGeneration",
        todo="leave inputs out",
    )


def _example(spec: ExampleSpec, batch: int, training: bool) -> Example:
    reason = (no_training(spec.cls) if training else None) or no_batch(spec.cls, batch)
    if reason is not None:
        raise TraceError(reason)
    return make_example(replace(spec, batch=batch, training=training))


def _no_example(reason: str, batch: int, training: bool) -> Example:
    raise TraceError(reason)


def read_architecture(config: dict) -> PreTrainedConfig:
    """Return the config object for a clean config dict. Raises ConfigError if transformers does not know or refuses it."""
    fields = copy.deepcopy(config)  # config classes modify their argument
    model_type = fields.pop("model_type", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoConfig.for_model(model_type, **fields)
    except Exception as error:
        raise ConfigError(
            f"transformers refused this config: {_short(error)}", given=f"model_type {quote(model_type)}"
        ) from None


def _build(cls: type[PreTrainedModel], config: PreTrainedConfig, attention: str) -> nn.Module:
    config = copy.deepcopy(config)
    config._attn_implementation = "eager" if attention == "eager" else None  # None: sdpa in each part that supports it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = cls._from_config(config, dtype=torch.float32)
    except SizerError:
        raise
    except Exception as error:
        raise BuildError(f"{cls.__name__} could not be built from this config: {_short(error)}") from error
    if repair := REPAIRS.get(cls.__name__):
        repair(module)
    return module


def _length(
    config: PreTrainedConfig, cls: type[PreTrainedModel], asked: int | None
) -> tuple[int | None, tuple[str, ...]]:
    """Return the requested length, else the usual one, and a note if the model was made for less."""
    usual = usual_length(config, cls)
    if asked is None and text_config(config).model_type in RECURRENT_TYPES:
        return usual, (
            f"{usual} tokens: transformers runs this recurrence token by token without its extra CUDA kernels.",
        )
    if asked is None:
        return usual, ()
    if usual is None:
        raise RequestError(f"seq: {cls.__name__} reads no text and no audio", given=str(asked), todo="leave seq out")
    limit = position_limit(config) if takes(cls, "input_ids", "decoder_input_ids", "inputs") else None
    if limit is None or asked <= limit:
        return asked, ()
    if has_position_table(config):
        raise RequestError(
            f"seq: {cls.__name__} has a table of positions", given=f"{asked} tokens", allowed=f"1 to {limit}"
        )
    return asked, (f"{asked} tokens exceed the {limit} positions of this model.",)


def _image(
    config: PreTrainedConfig, cls: type[PreTrainedModel], asked: tuple[int, int] | None
) -> tuple[PreTrainedConfig, tuple[int, int] | None, tuple[str, ...]]:
    """Return the config to build, the size of the images, and a note if the config was made for another size."""
    usual = usual_image(config, cls)
    if asked is None:
        return config, usual, ()
    given = "x".join(map(str, asked))
    if usual is None:
        raise RequestError(f"image: {cls.__name__} takes no images", given=given, todo="leave image out")
    made_for = config_image(config)
    if made_for in (None, asked) or takes_any_image(config, cls):
        return config, asked, ()
    if takes(cls, "interpolate_pos_encoding"):
        return config, asked, (f"Position embeddings are interpolated to {given} pixels.",)
    return resized(config, asked), asked, (f"Built for {given} pixels instead of {made_for[0]}x{made_for[1]}.",)


def _attention_note(cls: type[PreTrainedModel], attention: str) -> tuple[str, ...]:
    if attention != "sdpa" or cls._supports_sdpa:
        return ()
    if not OWN_ATTENTION.search(inspect.getsource(sys.modules[cls.__module__])):
        return ()
    return (f"{cls.__name__} does not support sdpa attention; its own (eager) attention was used.",)


def _repair_note(cls: type[PreTrainedModel]) -> tuple[str, ...]:
    repaired = cls.__name__ in REPAIRS and "outputs.image_outputs" in inspect.getsource(cls.forward)
    return (REPAIRED.format(version=installed("transformers"), name=cls.__name__),) if repaired else ()


def _loss(module: nn.Module, example: Example) -> Tensor:
    outputs = call(module, example)
    loss = getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return stand_in_loss(outputs, module)
    return loss if loss.dim() == 0 else loss.mean()


def _checkpoint(module: nn.Module) -> None:
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    try:
        enable()
    except ValueError as error:  # the class promises checkpointing, and none of its layers supports it
        raise BuildError(
            f"{type(module).__name__} has no layer that can be checkpointed", todo="leave checkpointing off"
        ) from error


def _short(error: Exception) -> str:
    """Return an error's text in one line without paths of this machine.

    Long values are clipped, so that the reason after them remains, and the line itself is clipped in its middle.
    """
    line = " ".join(str(error).split()) or type(error).__name__
    line = re.sub(r"(/[\w.\-]+){2,}/?", "...", line)
    line = _LONG_VALUE.sub(r"\1\2...", line)
    half = ERROR_LIMIT // 2
    return line if len(line) <= ERROR_LIMIT else f"{line[:half]} ... {line[-half:]}"


# --------------------------------------------------------------------------------------------------------- from config


NOTE_LIMIT = 10_000  # characters; an answer takes no text of more than sizer.base.codec.LIMIT_TEXT


def from_preset(request: Request, config: dict | None) -> Blueprint:
    """Return the blueprint of a preset, with the head of its checkpoint unless another is requested."""
    preset = find_preset(request.name)
    return from_config(replace(request, head=request.head or preset.head), preset.config)


def from_config(request: Request, config: dict | None) -> Blueprint:
    """Return the blueprint of a config, by default the request's. Raises ConfigError if there is none."""
    if config is None and request.config is not None:
        config = read_config(request.config)
    if config is None:
        raise ConfigError("the config of this model is missing", todo="fetch it from the hub or paste it")
    clean = clean_config(config)
    blueprint = huggingface_blueprint(
        clean.config,
        name=request.name or str(clean.config.get("model_type", "config")),
        head=request.head,
        sequence_length=request.sequence_length,
        image_size=request.image_size,
        attention=request.attention,
        mode=request.mode,
        text_alone=request.inputs == TEXT,
        classes=request.classes,
    )
    unread = tuple(key for key in clean.dropped if key.rpartition(".")[2] not in PLACES)
    dropped = (f"not read from the config: {_listed(unread)}",) if unread else ()
    return replace(blueprint, notes=(*clean.notes, *dropped, *blueprint.notes))


def _listed(keys: tuple[str, ...]) -> str:
    """Return the keys, separated by commas, as many as fit in a note, and the number of remaining keys."""
    room = NOTE_LIMIT
    for count, key in enumerate(keys):
        room -= len(key) + 2
        if room < 0:
            return f"{', '.join(keys[:count])} and {len(keys) - count:,} more"
    return ", ".join(keys)

"""Requests for transformers models: the config they name, cleaned, as a blueprint."""

from __future__ import annotations

from dataclasses import replace

from sizer.architecture.blueprint import Blueprint
from sizer.architecture.guard import clean_config
from sizer.architecture.huggingface import huggingface_blueprint
from sizer.architecture.quantization_settings import PLACES
from sizer.base.config_json import read_config
from sizer.base.errors import ConfigError
from sizer.catalogue.modes import TEXT
from sizer.catalogue.presets import find_preset
from sizer.query.request import Request

NOTE_LIMIT = 10_000  # characters; an answer takes no text of more than sizer.base.codec.LIMIT_TEXT


def from_preset(request: Request, config: dict | None) -> Blueprint:
    """The blueprint of a preset, with the head of its checkpoint unless another is asked for."""
    preset = find_preset(request.name)
    return from_config(replace(request, head=request.head or preset.head), preset.config)


def from_config(request: Request, config: dict | None) -> Blueprint:
    """The blueprint of a config, by default of the one that the request holds. Raises ConfigError where there is none."""
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
    """The keys with commas between, as many of them as a note has room for, and how many more there are."""
    room = NOTE_LIMIT
    for count, key in enumerate(keys):
        room -= len(key) + 2
        if room < 0:
            return f"{', '.join(keys[:count])} and {len(keys) - count:,} more"
    return ", ".join(keys)

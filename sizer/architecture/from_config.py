"""Requests for transformers models: the config they name, cleaned, as a blueprint."""

from __future__ import annotations

from dataclasses import replace

from sizer.architecture.blueprint import Blueprint
from sizer.architecture.guard import clean_config
from sizer.architecture.huggingface import huggingface_blueprint
from sizer.catalogue.presets import find_preset
from sizer.config_json import read_config
from sizer.errors import ConfigError
from sizer.request import Request


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
    )
    dropped = (f"not read from the config: {', '.join(clean.dropped)}",) if clean.dropped else ()
    return replace(blueprint, notes=(*clean.notes, *dropped, *blueprint.notes))

"""Architectures: from a Request to a Blueprint. Importing this package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sizer.architecture.blueprint import Blueprint
    from sizer.request import Request


def make_blueprint(request: Request, config: dict | None = None) -> Blueprint:
    """The blueprint of what a request names.

    `config` is the parsed JSON for the sources "hub" and "config" (None: the config that the request itself holds).
    Raises RequestError, ConfigError or BuildError, each with what to do.
    """
    if request.source == "torchvision":
        from sizer.architecture.vision import vision_blueprint

        return vision_blueprint(request.name, image_size=request.image_size, checkpointing=request.checkpointing)
    return _from_config(request, config)


def _from_config(request: Request, config: dict | None) -> Blueprint:
    from dataclasses import replace

    from sizer.architecture.guard import clean_config
    from sizer.architecture.huggingface import huggingface_blueprint
    from sizer.catalogue.presets import find_preset
    from sizer.config_json import read_config
    from sizer.errors import ConfigError

    head, name = request.head, request.name
    if request.source == "hf":
        preset = find_preset(request.name)
        config, head = preset.config, head or preset.head
    elif config is None and request.config is not None:
        config = read_config(request.config)
    if config is None:
        raise ConfigError("the config of this model is missing", todo="fetch it from the hub or paste it")
    clean = clean_config(config)
    blueprint = huggingface_blueprint(
        clean.config,
        name=name or str(clean.config.get("model_type", "config")),
        head=head,
        sequence_length=request.sequence_length,
        image_size=request.image_size,
        attention=request.attention,
        mode=request.mode,
    )
    dropped = (f"not read from the config: {', '.join(clean.dropped)}",) if clean.dropped else ()
    return replace(blueprint, notes=(*clean.notes, *dropped, *blueprint.notes))

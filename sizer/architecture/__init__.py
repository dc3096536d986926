"""Architectures: from a Request to a Blueprint. Importing this package imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sizer.catalogue.modes import MODES
from sizer.catalogue.sources import SOURCES, import_function
from sizer.catalogue.weights import WEIGHTS
from sizer.errors import BuildError

if TYPE_CHECKING:
    from sizer.architecture.blueprint import Blueprint
    from sizer.request import Request


def make_blueprint(request: Request, config: dict | None = None) -> Blueprint:
    """The blueprint of what a request names.

    `config` is the parsed JSON for the sources "hub" and "config" (None: the config that the request itself holds).
    Raises RequestError, ConfigError or BuildError, each with what to do.
    """
    source = SOURCES[request.source]
    try:
        blueprint_of = import_function(source.blueprint)
    except ModuleNotFoundError as error:
        if source.required or error.name != source.package:
            raise
        todo = f"install {source.package} as requirements.txt names it"
        raise BuildError(f"{source.package} is not installed", given=f"arch={source.key}:", todo=todo) from error
    blueprint = blueprint_of(request, config)
    if WEIGHTS[request.weights].quantizes:
        blueprint = _quantized(blueprint, request)
    if not MODES[request.mode].trains:
        return blueprint
    from sizer.architecture.training import describe_pages, describe_training, limit_training

    limit = (lambda module: limit_training(module, request)) if request.train != "all" else None
    trained = describe_training if limit is not None else (lambda module, request: ())
    return replace(
        blueprint,
        limit=limit,
        describe=lambda module: (
            *blueprint.describe(module),
            *trained(module, request),
            *describe_pages(module, request),
        ),
    )


def _quantized(blueprint: Blueprint, request: Request) -> Blueprint:
    """The blueprint, whose module is quantised as it is loaded."""
    from sizer.architecture.quantization import describe_weights, load_quantized, replace_layers

    return replace(
        blueprint,
        replace_layers=lambda module, dtype: replace_layers(module, request.weights, dtype),
        load_quantized=load_quantized,
        describe=lambda module: describe_weights(module, request.weights),
    )

"""Architectures: from a Request to a Blueprint. Importing this package imports no torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sizer.architecture.loading import resolve_weights
from sizer.base.errors import BuildError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import MODES
from sizer.catalogue.sources import SOURCES, import_function
from sizer.catalogue.weights import METHODS, WEIGHTS

if TYPE_CHECKING:
    from sizer.architecture.blueprint import Blueprint
    from sizer.architecture.loading import ResolvedWeights
    from sizer.architecture.quantization_settings import Quantization
    from sizer.query.request import Request


def make_blueprint(request: Request, config: dict | None = None, loaded: ResolvedWeights | None = None) -> Blueprint:
    """Return the blueprint of a request's architecture, with its weights as `loaded`, by default on the request's GPU.

    `config` is the parsed JSON for the sources "hub" and "config" (None: the config in the request itself).
    Raises RequestError, ConfigError or BuildError, each with what to do.
    """
    loaded = loaded or resolve_weights(request, find_gpu(request.gpu), config)
    request, quantization = loaded.request, loaded.quantization
    source = SOURCES[request.source]
    try:
        blueprint_of = import_function(source.blueprint)
    except ModuleNotFoundError as error:
        if source.required or error.name != source.package:
            raise
        todo = f"pip install {source.package}"
        raise BuildError(f"{source.package} is not installed", given=f"arch={source.key}:", todo=todo) from error
    blueprint = blueprint_of(request, config)
    if WEIGHTS[request.weights].quantizes and blueprint.replace_layers is None:
        blueprint = _quantized(blueprint, request)
    elif quantization is not None and request.weights == "checkpoint":
        blueprint = _as_checkpoint(blueprint, quantization)
    elif quantization is not None and request.train != "adapter":
        blueprint = _beside_checkpoint(blueprint, quantization)
    if not MODES[request.mode].trains:
        return blueprint
    from sizer.architecture.trained_part import describe_pages, describe_training, limit_training, uncounted_of

    limit = (lambda module: limit_training(module, request)) if request.train != "all" else None
    trained = describe_training if limit is not None else (lambda module, request: ())
    return replace(
        blueprint,
        limit=limit,
        uncounted=(*blueprint.uncounted, *uncounted_of(request)),
        describe=lambda module: (
            *blueprint.describe(module),
            *trained(module, request),
            *describe_pages(module, request),
        ),
    )


def _quantized(blueprint: Blueprint, request: Request) -> Blueprint:
    """Return the blueprint with a module that is quantized on load."""
    from sizer.architecture.quantization import describe_weights
    from sizer.architecture.quantizers import load_quantized, replace_layers

    row, given = WEIGHTS[request.weights], f"weights={request.weights}"
    return replace(
        blueprint,
        replace_layers=lambda module, dtype: replace_layers(
            module, row.config, dtype, given=given, compute=request.compute
        ),
        load_quantized=load_quantized,
        describe=lambda module: describe_weights(module, row.title, outliers=row.key == "int8"),
    )


def _as_checkpoint(blueprint: Blueprint, quantization: Quantization) -> Blueprint:
    """Return the blueprint with a module that holds its weights in the checkpoint's format."""
    from sizer.architecture.packed_layers import load_packed, pack
    from sizer.architecture.quantization import describe_weights
    from sizer.architecture.quantized_layers import check_names
    from sizer.architecture.quantizers import load_quantized, replace_layers

    method, settings = METHODS[quantization.method], quantization.settings
    config = {key: settings[key] for key in method.settings if key in settings} | {"quant_method": method.key}
    given = f"a checkpoint in {method.title}"
    if method.traced:
        check_names(quantization)
        replaced = partial(replace_layers, config=config, given=given, quantized=True)
    else:
        replaced = partial(pack, quantization=quantization)
    return replace(
        blueprint,
        replace_layers=lambda module, dtype: replaced(module, dtype=dtype),
        load_quantized=load_quantized if method.traced else load_packed,
        describe=lambda module: describe_weights(module, method.title, outliers=bool(settings.get("load_in_8bit"))),
    )


def _beside_checkpoint(blueprint: Blueprint, quantization: Quantization) -> Blueprint:
    """Return the blueprint of an unquantized model, with a note on the contents of its checkpoint."""
    from sizer.architecture.packed_layers import describe_checkpoint

    return replace(
        blueprint, describe=lambda module: (*blueprint.describe(module), *describe_checkpoint(module, quantization))
    )

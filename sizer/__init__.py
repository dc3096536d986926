"""Estimates of the device memory that a model needs for given work, and whether it fits.

    import sizer
    report = sizer.estimate("arch=torchvision:resnet50&batch=32")
    report.estimates[0].peak_allocated_bytes

Importing this package does not import torch. Each function does when it is called, and works in the calling process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sizer.base.versions import SIZER

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sizer.placement.report import PlacementReport
    from sizer.report.report import Report

__version__ = SIZER
__all__ = ["check_placement", "estimate", "size_module", "size_step"]


def estimate(query: str = "", /, **keys: Any) -> Report:
    """Return the report on a query, all sizes in bytes.

        sizer.estimate("arch=torchvision:resnet50&batch=32&gpu=rtx-4090")
        sizer.estimate("llama-3.1-8b", gpu="rtx-4090", train="adapter", weights="nf4", seq=2048)
        sizer.estimate(arch="hf:llama-3.1-8b", dtype=torch.bfloat16, batch=[1, 2])

    Args:
        query: A query string, a link of the page, or the name of an architecture, unless `arch` names one.
        keys: Keys of the query. True and False are 1 and 0, and a list or tuple is a comma list.

    Returns:
        The report. If a step could not be traced, `failures` has the reason and `model` the counts.

    Raises:
        RequestError: A key is unknown, or its value is not allowed.
        ConfigError: A config cannot be read.
        HubError: The hub has no such repository, or cannot be reached.
        BuildError: The architecture cannot be built.

    *Known limitations*: the work runs in this process, without limits and sandbox. Page and command line use a child process.
    """
    from sizer.base.arguments import check_text
    from sizer.base.config_json import read_config
    from sizer.base.errors import PipelineError
    from sizer.catalogue.sources import fetch
    from sizer.query.text import as_pipeline, parse_query, with_keys

    check_text("query", query, "pass a name or a query, and keys by name: estimate('resnet50', batch=32)")
    text = with_keys(query, keys)
    request, config = parse_query(text), None
    if request.is_fetched:
        try:
            config = read_config(fetch(request.source, request.name, request.revision))
        except PipelineError:
            request = parse_query(as_pipeline(text))
            config = read_config(fetch(request.source, request.name, request.revision))
    from sizer.estimating.estimator import estimate as estimate_request

    return estimate_request(request, config=config)


def size_module(
    factory: Callable[[], nn.Module],
    inputs: tuple | Mapping[str, Any],
    *,
    mode: str = "training",
    optimizer: str = "adamw",
    gpu: str = "a100-80gb",
    loss: Callable[[Any], Tensor] | None = None,
    steps: int = 2,
    torch: str | None = None,
) -> Report:
    """Return the report (bytes) on your own module; see sizer.estimating.custom.size_module."""
    from sizer.estimating import custom

    return custom.size_module(
        factory, inputs, mode=mode, optimizer=optimizer, gpu=gpu, loss=loss, steps=steps, torch=torch
    )


def size_step(
    setup: Callable[[], Callable[[], Any]],
    *,
    gpu: str = "a100-80gb",
    steps: int = 2,
    torch: str | None = None,
    world: int | None = None,
    rank: int = 0,
    expandable_segments: bool = False,
) -> Report:
    """Return the report (bytes) on a step of yours, or on one rank of many; see sizer.estimating.custom.size_step."""
    from sizer.estimating import custom

    return custom.size_step(
        setup, gpu=gpu, steps=steps, torch=torch, world=world, rank=rank, expandable_segments=expandable_segments
    )


def check_placement(module: nn.Module, inputs: tuple | Mapping[str, Any]) -> PlacementReport:
    """Return a module's and its inputs' tensors by device and dtype, with placement mistakes; see sizer.placement.check."""
    from sizer.placement import check

    return check.check_placement(module, inputs)

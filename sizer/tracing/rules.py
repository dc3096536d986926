"""The rules of a device: the tables of the rooms below, joined. An operator that two tables of a kind name is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from sizer.tracing import mps
from sizer.tracing.allocations import Held
from sizer.tracing.cpu import attention as cpu_attention
from sizer.tracing.cpu import convolution as cpu_convolution
from sizer.tracing.cpu import copies, products
from sizer.tracing.cpu import normalization as cpu_normalization
from sizer.tracing.cpu import reductions as cpu_reductions
from sizer.tracing.cuda import (
    attention,
    attention_workspaces,
    convolution,
    dropout,
    embedding,
    encoder,
    indexing,
    norm_kernels,
    normalization,
    recurrent,
    reductions,
    softmax,
)
from sizer.tracing.cuda.cublas import Blas, blas_of
from sizer.tracing.device import Device
from sizer.tracing.meta import composite, ctc, dtypes, grouped, in_place, shortcuts, strides
from sizer.tracing.tables import Results, join
from sizer.tracing.values import boxes, routing, stand_ins
from sizer.tracing.values.handler import Handler
from sizer.versions import Version

_KERNELS = {
    "cuda": join(
        composite.KERNELS,
        attention.KERNELS,
        dropout.KERNELS,
        encoder.KERNELS,
        norm_kernels.KERNELS,
        recurrent.KERNELS,
        softmax.KERNELS,
    ),
    "mps": join(composite.KERNELS, mps.KERNELS),
    "cpu": join(composite.KERNELS, cpu_attention.KERNELS),
}
_EVERYWHERE = (
    stand_ins.HANDLERS, routing.HANDLERS, boxes.HANDLERS, ctc.HANDLERS, grouped.HANDLERS, in_place.HANDLERS,
)  # fmt: skip
_HANDLERS = {"cuda": join(*_EVERYWHERE, recurrent.HANDLERS), "mps": join(*_EVERYWHERE), "cpu": join(*_EVERYWHERE)}
_HELD = {
    "cuda": join(
        attention_workspaces.HELD,
        convolution.HELD,
        dropout.HELD,
        embedding.HELD,
        indexing.HELD,
        normalization.HELD,
        recurrent.HELD,
        reductions.HELD,
        softmax.HELD,
    ),
    "mps": {},
    "cpu": join(
        cpu_attention.HELD,
        cpu_convolution.HELD,
        copies.HELD,
        cpu_normalization.HELD,
        products.HELD,
        cpu_reductions.HELD,
    ),
}


def _results(kind: str, version: Version) -> Results:
    if kind == "cuda":
        return join(strides.RESULTS, softmax.RESULTS, attention.results(version))
    return join(strides.RESULTS, copies.RESULTS, cpu_normalization.RESULTS) if kind == "cpu" else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a device does with operators: one table for each way in which meta tensors are not enough.

    Handlers of other libraries' operators are found by name ("torchvision.nms.default"): these exist only once they are imported.
    """

    kernels: Mapping[Any, Callable[..., Any]]  # call, in a composite operator's place, what the device would call
    handlers: Mapping[Any, Handler]  # give results that depend on values, or that have no meta kernel; may decline
    results: Mapping[Any, Callable[[tuple, Any], Any]]  # correct a meta kernel's result
    held: Mapping[Any, Held]  # what a kernel holds beside its results
    checks: Mapping[Any, dtypes.Check]  # raise where every device would
    shortcuts: Mapping[Any, Callable[[tuple], Any]]  # give a result without its meta kernel; may decline
    blas: Blas | None  # cuBLAS's workspaces


def rules_for(device: Device) -> Rules:
    """The rules of a device's kind, capability and version."""
    return _rules(device.kind, device.capability, device.version)


@cache
def _rules(kind: str, capability: tuple[int, int] | None, version: Version) -> Rules:
    return Rules(
        kernels=_KERNELS[kind],
        handlers=_HANDLERS[kind],
        results=_results(kind, version),
        held=_HELD[kind],
        checks=dtypes.CHECKS,
        shortcuts=shortcuts.SHORTCUTS,
        blas=blas_of(capability, version) if capability is not None else None,
    )


@contextmanager
def kernels_installed(device: Device) -> Iterator[None]:
    """Within the context, meta tensors take the device's kernels where autograd meets a composite operator.

    They stand on the dispatch key AutogradMeta, so that calls from Python and from inside PyTorch's own C++ are treated alike.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for operator, kernel in rules_for(device).kernels.items():
            library.impl(operator, partial(kernel, device), "AutogradMeta")
        yield
    finally:
        library._destroy()

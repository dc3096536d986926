"""Rules of a device: the joined tables of the rooms below. An operator in two tables of a kind is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch

from sizer.base.versions import Version
from sizer.tracing import mps_kernels
from sizer.tracing.allocations import AllocationRule, Library
from sizer.tracing.cpu import attention as cpu_attention
from sizer.tracing.cpu import bitsandbytes as cpu_bitsandbytes
from sizer.tracing.cpu import convolution as cpu_convolution
from sizer.tracing.cpu import copies, products
from sizer.tracing.cpu import normalization as cpu_normalization
from sizer.tracing.cpu import reductions as cpu_reductions
from sizer.tracing.cuda import (
    attention,
    attention_workspaces,
    bitsandbytes,
    convolution,
    cublas,
    encoder,
    fourier,
    linear_algebra,
    many_tensors,
    normalization,
    random_draws,
    recurrent,
    reductions,
    scans,
    softmax,
)
from sizer.tracing.cuda import copies as cuda_copies
from sizer.tracing.cuda import indexing as cuda_indexing
from sizer.tracing.cuda import loss_kernels as cuda_losses
from sizer.tracing.cuda.by_capability import Blas, blas_of, shared_blas
from sizer.tracing.device import Device
from sizer.tracing.meta import (
    collectives,
    composite,
    dtypes,
    in_place,
    loss_operators,
    matrix_products,
    missing_kernels,
    quantized_operators,
    shortcuts,
    strides,
)
from sizer.tracing.operator_tables import join
from sizer.tracing.values import boxes, masks, stand_ins
from sizer.tracing.values.handler import Handler

_EVERYWHERE = (
    stand_ins, masks, boxes, collectives, loss_operators, matrix_products, in_place, composite, dtypes, missing_kernels, shortcuts,
    quantized_operators,
)  # fmt: skip
# Modules with the tables of a device's rules.
FAMILIES: dict[str, tuple[ModuleType, ...]] = {
    "cuda": (
        *_EVERYWHERE, strides, attention, attention_workspaces, bitsandbytes, convolution, cublas, random_draws, encoder,
        cuda_copies, fourier, linear_algebra, many_tensors, cuda_indexing, cuda_losses, normalization, recurrent, reductions, scans,
        softmax,
    ),
    "mps": (*_EVERYWHERE, mps_kernels),
    "cpu": (
        *_EVERYWHERE, strides, cpu_attention, cpu_bitsandbytes, cpu_convolution, copies, cpu_normalization, products,
        cpu_reductions,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules of a device for operators: one table for each case in which meta tensors are not enough.

    Handlers of other libraries' operators, and the memory inside their kernels, are found by name ("torchvision.nms.default"):
    these operators exist only once they are imported.
    """

    kernels: Mapping[Any, Callable[..., Any]]  # run the device's calls instead of a composite operator
    formulas: Mapping[Any, Callable[..., Any]]  # run a computation with the device's gradient instead of an operator
    handlers: Mapping[Any, Handler]  # give results that depend on values, or that have no meta kernel; may decline
    results: Mapping[Any, Callable[[tuple, Any], Any]]  # correct a meta kernel's result
    allocations: Mapping[Any, AllocationRule]  # add the memory inside a kernel
    checks: Mapping[Any, dtypes.Check]  # raise where every device would
    libraries: Mapping[Any, Library]  # name the library that an operator calls, if only it knows its workspace
    shortcuts: Mapping[Any, Callable[[tuple], Any]]  # give a result without its meta kernel; may decline
    blas: Blas | None  # cuBLAS's workspaces, which depend on the capability
    known: frozenset[Any]  # operators with a rule as a whole, so that none of their parts are run


def rules_for(device: Device) -> Rules:
    """Return the rules of a device's kind, capability and version."""
    rules = _rules(device.kind, device.version)
    if device.kind != "cuda":
        return rules
    if device.shared:
        return replace(rules, blas=shared_blas(device.capability.plain, device.version))
    return replace(rules, blas=blas_of(device.capability, device.version))


@cache
def _rules(kind: str, version: Version) -> Rules:
    def joined(table: str) -> dict[Any, Any]:
        return join(*(vars(family).get(table, {}) for family in FAMILIES[kind]))

    by_version = attention.results(version) if kind == "cuda" else {}
    results, allocations, shortcuts = join(joined("RESULTS"), by_version), joined("ALLOCATIONS"), joined("SHORTCUTS")
    return Rules(
        kernels=joined("KERNELS"),
        formulas=joined("FORMULAS"),
        handlers=joined("HANDLERS"),
        results=results,
        allocations=allocations,
        checks=joined("CHECKS"),
        libraries=joined("LIBRARIES"),
        shortcuts=shortcuts,
        blas=None,
        known=frozenset((*results, *allocations, *shortcuts)),
    )


@contextmanager
def kernels_installed(device: Device) -> Iterator[None]:
    """Make meta tensors use the device's kernels and formulas within the context.

    They are registered on the dispatch key AutogradMeta, so that they serve calls from Python and from PyTorch's own C++.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        rules = rules_for(device)
        for operator, kernel in (*rules.kernels.items(), *rules.formulas.items()):
            library.impl(operator, partial(kernel, device), "AutogradMeta")
        yield
    finally:
        library._destroy()

"""Devices as rules: which kernels a composite operator becomes, what kernels hold inside, which libraries keep memory.

A Device is made for one trace; `choices` collects which kernels were taken and why, for the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from sizer.tracing import scratch
from sizer.tracing.kernels import attention, dropout, elementwise, normalization

_KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    "cuda": {
        **elementwise.EVERYWHERE,
        "scaled_dot_product_attention": attention.on_cuda,
        "dropout": dropout.on_cuda,
        "batch_norm": normalization.batch_norm_on_cuda,
    },
    "mps": {**elementwise.EVERYWHERE, "scaled_dot_product_attention": attention.on_mps},
    "cpu": {**elementwise.EVERYWHERE, "scaled_dot_product_attention": attention.on_cpu},
}


class Device:
    """One kind of device by its rules: kind "cuda", "mps" or "cpu"; capability (major, minor) for CUDA.

    `kernels` replace composite operators, `results` mend what a meta kernel returns where the device's differs, `scratch`
    tells what kernels hold inside.
    """

    def __init__(self, kind: str, capability: tuple[int, int] | None = None) -> None:
        if kind not in _KERNELS:
            raise ValueError(f"no rules for device {kind!r}: give one of {', '.join(_KERNELS)}")
        if (kind == "cuda") != (capability is not None):
            raise ValueError("a compute capability goes with kind 'cuda' and with no other")
        self.kind = kind
        self.capability = capability
        self.choices: dict[str, None] = {}
        self.kernels = {name: partial(function, self) for name, function in _KERNELS[kind].items()}
        self.kernels_by_operator = {getattr(torch.ops.aten, name).default: f for name, f in self.kernels.items()}
        self.scratch = scratch.SCRATCH[kind]
        self.results = normalization.RESULTS_ON_CPU if kind == "cpu" else {}

    def note_choice(self, text: str) -> None:
        """Notes which kernel was assumed and why."""
        self.choices.setdefault(text)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the context, meta tensors take this device's kernels where autograd meets a composite operator."""
        library = torch.library.Library("aten", "IMPL")
        try:
            for name, function in self.kernels.items():
                library.impl(name, function, "AutogradMeta")
            yield
        finally:
            library._destroy()

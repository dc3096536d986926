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
from sizer.tracing.kernels import attention, dropout, elementwise, normalization, softmax

_KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    "cuda": {
        **elementwise.EVERYWHERE,
        **softmax.ON_CUDA,
        "scaled_dot_product_attention": attention.on_cuda,
        "dropout": dropout.on_cuda,
        "batch_norm": normalization.batch_norm_on_cuda,
    },
    "mps": {**elementwise.EVERYWHERE, "scaled_dot_product_attention": attention.on_mps},
    "cpu": {**elementwise.EVERYWHERE, "scaled_dot_product_attention": attention.on_cpu},
}


_RESULTS = {"cuda": softmax.RESULTS_ON_CUDA, "cpu": normalization.RESULTS_ON_CPU}


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


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
        self.halves_differ = False  # whether a traced operator treats float16 and bfloat16 differently
        self.kernels = {name: partial(function, self) for name, function in _KERNELS[kind].items()}
        self.kernels_by_operator = {_operator(name): function for name, function in self.kernels.items()}
        self.scratch = scratch.SCRATCH[kind]
        self.results = _RESULTS.get(kind, {})

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

"""Devices as rules: which kernels a composite operator becomes, what kernels hold inside, which libraries keep memory.

A Device is made for one trace or several of the same model; `choices` collects which kernels were taken and why, for the
report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sizer.tracing import scratch
from sizer.tracing.cpu import scratch as scratch_cpu
from sizer.tracing.cuda import convolution, cublas, embedding, reductions
from sizer.tracing.cuda import normalization as normalization_cuda
from sizer.tracing.cuda import scratch as scratch_cuda
from sizer.tracing.kernels import attention, dropout, elementwise, encoder, normalization, recurrent, softmax
from sizer.tracing.meta import strides
from sizer.tracing.tables import join
from sizer.versions import Version, installed_version

# One line each: the composite operator and the function that calls what the device would call. Sources are theirs.
_KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    "cuda": join(
        elementwise.EVERYWHERE,
        softmax.ON_CUDA,
        recurrent.ON_CUDA,
        encoder.ON_CUDA,
        {
            "scaled_dot_product_attention": attention.on_cuda,
            "dropout": dropout.on_cuda,
            "batch_norm": normalization.batch_norm_on_cuda,
            "rms_norm": normalization.rms_norm_on_cuda,
        },
    ),
    "mps": join(elementwise.EVERYWHERE, {"scaled_dot_product_attention": attention.on_mps}),
    "cpu": join(elementwise.EVERYWHERE, {"scaled_dot_product_attention": attention.on_cpu}),
}
_RESULTS = {
    "cuda": join(strides.EVERYWHERE, softmax.RESULTS_ON_CUDA),
    "cpu": strides.both(strides.ON_CPU, normalization.RESULTS_ON_CPU),
}
_ANSWERS = {"cuda": recurrent.HANDLERS}
_SCRATCH = {**scratch.SCRATCH, "cuda": join(scratch_cuda.SCRATCH, reductions.SCRATCH)}
_ON_CUDA = join(convolution.INNER, embedding.INNER, normalization_cuda.INNER, scratch_cuda.INNER)
_INNER = {"cpu": scratch_cpu.INNER, "cuda": _ON_CUDA}


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@dataclass(slots=True)
class Choice:
    """A kernel that was taken for an operator, why, and per dtype of the contract the modules that took it."""

    operator: str
    kernel: str
    why: str
    modules: dict[str, set[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.operator}: {self.kernel} ({self.why})"


class Device:
    """One kind of device by its rules: kind "cuda", "mps" or "cpu"; capability (major, minor) for CUDA; the version
    (major, minor) of the PyTorch whose rules they are, the installed one where none is given.

    `kernels` replace composite operators, `results` mend what a meta kernel returns where the device's differs, `answers` stand
    for operators without a meta kernel, `scratch` and `inner` tell what kernels hold inside, `blas` what matrix products do. `work`
    is the dtype being traced and `where` tells the module at work; both are for `choices`.
    """

    def __init__(self, kind: str, capability: tuple[int, int] | None = None, *, version: Version | None = None) -> None:
        if kind not in _KERNELS:
            raise ValueError(f"no rules for device {kind!r}: give one of {', '.join(_KERNELS)}")
        if (kind == "cuda") != (capability is not None):
            raise ValueError("a compute capability goes with kind 'cuda' and with no other")
        self.kind = kind
        self.capability = capability
        self.version = version or installed_version()
        self.choices: dict[str, Choice] = {}
        self.work = ""
        self.where: Callable[[], str] = str
        self.halves_differ = False  # whether a traced operator treats float16 and bfloat16 differently
        self.differs_at_one = False  # whether a traced operator takes another kernel for a batch of one
        self.changes_at: int | None = None  # the batch size from which a traced operator takes another kernel
        self.kernels = {name: partial(function, self) for name, function in _KERNELS[kind].items()}
        self.kernels_by_operator = {_operator(name): function for name, function in self.kernels.items()}
        self.scratch = _SCRATCH[kind]
        self.inner = _INNER.get(kind, {})
        self.results = _RESULTS.get(kind, {})
        if kind == "cuda":
            self.results = {**self.results, **attention.results_on_cuda(self.version)}
        self.answers = _ANSWERS.get(kind, {})
        self.blas = cublas.blas_of(capability, self.version) if capability is not None else None

    def note_choice(self, operator: str, kernel: str, why: str) -> None:
        """Notes which kernel was taken for an operator and why."""
        choice = Choice(operator, kernel, why)
        choice = self.choices.setdefault(str(choice), choice)
        choice.modules.setdefault(self.work, set()).add(self.where())

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

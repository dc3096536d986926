"""What a device's rules came to in one report: its kernels, and where the bytes inside them come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sizer.catalogue.gpus import Gpu
from sizer.memory.explanation import ALLOCATOR, EXACT, MODELLED, Explanation, Formula, KernelUse
from sizer.tracing.cuda import convolution, cublas, recurrent
from sizer.tracing.cuda.cudnn_convolution import without_cublaslt
from sizer.tracing.cuda.size_oracle import oracle_name
from sizer.tracing.device import Choice, Device
from sizer.tracing.rules import rules_for
from sizer.versions import format_version

# What cuDNN decides by itself; for convolutions it can be asked.
DECIDED_BY_CUDNN = convolution.HELD.keys() | recurrent.HELD.keys()
_WITHOUT_FOREACH = ("muon", "adafactor")  # torch/optim/_muon.py, _adafactor.py


def explain(
    device: Device, *, dtypes: Iterable[str], optimizer: str | None = None, implementation: str | None = None,
    same: Mapping[str, str] | None = None, gpu: Gpu | None = None,
) -> Explanation:  # fmt: skip
    """The explanation of a report, without its workspaces and stand-ins: those are on the tapes.

    `gpu` is the device where it is one of the catalogue. `optimizer` is None where none steps. `same` maps a dtype to the one
    whose trace stood for it, too.
    """
    dtypes = tuple(dtypes)
    kernels = [_kernel(choice, dtypes, same or {}) for choice in device.choices.values()]
    if optimizer not in (None, "none"):
        kernels.append(_optimizer(device, optimizer, implementation, dtypes))
    return Explanation(
        rules=rules_of(device),
        kernels=tuple(kernels),
        exact=EXACT,
        modelled=(*([convolutions(gpu)] if device.kind == "cuda" else ()), *MODELLED[device.kind]),
        allocator=ALLOCATOR[device.kind],
    )


def rules_of(device: Device) -> str:
    """The device and the version of PyTorch whose rules were followed."""
    version = format_version(device.version)
    if device.capability is None:
        return f"{device.kind.upper()} in PyTorch {version}"
    return f"CUDA capability {device.capability[0]}.{device.capability[1]} in PyTorch {version}"


def convolutions(gpu: Gpu | None) -> str:
    """Where the workspaces of convolutions on CUDA come from, in words."""
    if who := gpu and oracle_name(gpu):
        products = (
            "matrix products that it leaves to cuBLASLt are taken to need no workspace there"
            if (missing := without_cublaslt()) is None
            else f"engines that use cuBLASLt are left out, as they would not be on the device: {missing}"
        )
        return f"workspaces of convolutions: those of the engines that {who}; {products}; what a GPU takes may still differ"
    return (
        "workspaces of convolutions: modelled, since no cuDNN from 9.8 on that knows this device is installed here; "
        "the range of the process allows for it"
    )


def formulas(device: Device, gpu: Gpu | None = None) -> dict[str, Formula]:
    """Per operator how the bytes inside its kernel are found and in which source: what each function says of itself."""
    rules = rules_for(device)
    who = oracle_name(gpu) if gpu is not None else None
    asked = convolution.BY_CUDNN.format(who) if who else ""
    found = {
        str(operator): Formula(
            text=_first_paragraph(function.__doc__),
            modelled=device.kind == "cuda" and operator in DECIDED_BY_CUDNN,
            asked=asked if operator in convolution.HELD else "",
        )
        for operator, function in rules.held.items()
    }
    if rules.blas is not None:
        found |= dict.fromkeys(map(str, cublas.WORKSPACE_USERS), Formula(text=_blas(rules.blas)))
    return found


def _blas(blas: cublas.Blas) -> str:
    how = "one per thread, kept from its first use" if blas.kept else "for the time of each call"
    light = ""
    if blas.lt_size is not None:
        brief = "for the time of the call " if blas.kept and not blas.lt_kept else ""
        light = f", {blas.lt_size:,} B {brief}where cuBLASLt adds a bias"
    return f"cuBLAS's workspace of {blas.size:,} B, {how}{light}, and copies of strided operands (cuda/CublasHandlePool.cpp)"


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


def _kernel(choice: Choice, dtypes: tuple[str, ...], same: Mapping[str, str]) -> KernelUse:
    takers = tuple(dtype for dtype in dtypes if same.get(dtype, dtype) in choice.modules)
    modules = max((len(paths) for paths in choice.modules.values()), default=0)
    return KernelUse(
        operator=choice.operator, kernel=choice.kernel, why=choice.why, dtypes=takers or dtypes, modules=modules
    )


def _optimizer(device: Device, name: str, implementation: str | None, dtypes: tuple[str, ...]) -> KernelUse:
    by_default = "foreach" if device.kind == "cuda" and name not in _WITHOUT_FOREACH else "loop"
    why = name if implementation else f"{name}, PyTorch's default there"
    return KernelUse(operator="optimizer", kernel=implementation or by_default, why=why, dtypes=dtypes, modules=0)

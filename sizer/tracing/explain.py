"""What a device's rules came to in one report: its kernels, and where the bytes inside them come from."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import ModuleType

from sizer.allocator.allocator import describe
from sizer.base.units import format_bytes
from sizer.base.versions import format_version
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.optimizers import OPTIMIZERS
from sizer.report.explanation import Explanation, Formula, KernelUse
from sizer.tape.archive import Kernel, Traced
from sizer.tracing.cuda import convolution, cublas, recurrent
from sizer.tracing.cuda.cudnn_convolution import without_cublaslt
from sizer.tracing.cuda.size_oracle import oracle_name
from sizer.tracing.device import Device
from sizer.tracing.device_rules import FAMILIES, rules_for

# What cuDNN decides by itself; for convolutions it can be asked.
DECIDED_BY_CUDNN = convolution.HELD.keys() | recurrent.HELD.keys()
_LIMITATIONS = re.compile(r"\*Known limitations\*: (.*)", re.DOTALL)
_WITHOUT_FOREACH = ("muon", "adafactor")  # torch/optim/_muon.py, _adafactor.py


def explain(
    device: Device,
    *,
    traced: Mapping[str, Traced],
    optimizer: str | None = None,
    implementation: str | None = None,
    gpu: Gpu | None = None,
    expandable_segments: bool = False,
    answered: bool = True,
) -> Explanation:
    """The explanation of a report, but for its workspaces, stand-ins and margins.

    `traced` is what was traced of each dtype. `gpu` is the device where it is one of the catalogue. `optimizer` is None where none
    steps. `answered` is False where cuDNN was asked about this work and had no answer. What is said to be exact, modelled or not
    counted is read off the tapes, the rules of the device, and the limitations that the modules of these rules name in their
    docstrings.
    """
    dtypes = tuple(traced)
    kernels = list(_kernels(traced))
    if optimizer not in (None, "none"):
        kernels.append(_optimizer(device, optimizer, implementation, dtypes))
    return Explanation(
        rules=rules_of(device),
        kernels=tuple(kernels),
        exact=tuple(_exact(traced.values())),
        modelled=tuple(_modelled(device, gpu, answered, _operators(traced.values()))),
        allocator=describe(device.kind, expandable_segments=expandable_segments),
    )


def _exact(traced: Collection[Traced]) -> Iterator[str]:
    """What is no estimate, and how one trace speaks for other batch sizes."""
    yield "weights, buffers, gradients and optimizer state: the tensors themselves, each storage once"
    yield "what autograd saves and when each tensor is released: PyTorch's own Python and autograd engine ran, on meta tensors"
    fitted = {line.fitted_at for one in traced for _, line in one.family.lines}
    single = sorted({tape.batch for one in traced for tape in one.family.exact})
    if fitted:
        pairs = ", ".join(f"{first} and {second}" for first, second in sorted(fitted))
        yield f"sizes at every batch size: traces at batch {pairs} give each block's bytes as a + b * batch, a third one checks"
    if single:
        yield f"traced by itself: batch {', '.join(map(str, single))}"


def _modelled(device: Device, gpu: Gpu | None, answered: bool, operators: frozenset[str]) -> Iterator[str]:
    """What is a model, and what is left out, of operators that were traced."""
    held = rules_for(device).held
    if device.kind == "cuda" and _any_of(convolution.HELD, operators):
        yield convolutions(gpu, answered=answered)
    alone = [op for op in held if op in DECIDED_BY_CUDNN and op not in convolution.HELD and _any_of([op], operators)]
    if modelled := sorted({str(op).rpartition(".")[0] for op in alone}):
        yield f"workspaces that cuDNN alone knows ({', '.join(modelled)}): modelled; the range of the process allows for them"
    if held:
        yield f"what kernels hold beside their results: formulas for {len(held)} operators; of others it is not counted"
    else:
        yield "what kernels hold beside their results is not counted"
    if gpu is not None and gpu.context_high_bytes > gpu.context_low_bytes:
        ends = f"{format_bytes(gpu.context_low_bytes)} to {format_bytes(gpu.context_high_bytes)}"
        yield f"what the process holds outside the allocator: {ends}"
    yield from _limitations(device, operators)


def _operators(traced: Collection[Traced]) -> frozenset[str]:
    """The operators of what was traced, by name; none where nothing was."""
    return frozenset(name for one in traced for tape in one.family.tapes() for name in tape.op_names)


def _any_of(asked: Iterable[object], operators: frozenset[str]) -> bool:
    """Whether some of these operators are among those that were traced; yes where nothing was."""
    return not operators or any(str(operator) in operators for operator in asked)


def _limitations(device: Device, operators: frozenset[str]) -> Iterator[str]:
    """What the modules and functions of the device's rules say of themselves, by family of operators that was traced."""
    own = f"sizer.tracing.{device.kind}"
    families = [family for family in FAMILIES[device.kind] if family.__name__.startswith(own)]
    used = [one for family in families for one in vars(family).values() if isinstance(one, ModuleType)]
    modules = dict.fromkeys([*families, *(one for one in used if one.__name__.startswith(own))])
    for module in modules:
        held = vars(module).get("HELD", {})
        if held and not _any_of(held, operators):
            continue
        functions = held.values()
        for text in dict.fromkeys(one.__doc__ or "" for one in (module, *functions)):
            if found := _LIMITATIONS.search(text):
                yield f"{module.__name__.rpartition('.')[2].replace('_', ' ')}: {_first_paragraph(found[1])}"


def rules_of(device: Device) -> str:
    """The device and the version of PyTorch whose rules were followed."""
    version = format_version(device.version)
    if device.kind != "cuda":
        return f"{device.kind.upper()} in PyTorch {version}"
    major, minor = device.capability.plain
    return f"CUDA capability {major}.{minor} in PyTorch {version}"


def convolutions(gpu: Gpu | None, *, answered: bool = True) -> str:
    """Where the workspaces of convolutions on CUDA come from, in words; `answered` as in `explain`."""
    who = gpu and oracle_name(gpu)
    if who and not answered:
        return "workspaces of convolutions: modelled, since cuDNN has no plan for them; the range of the process allows for it"
    if who:
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


def _kernels(traced: Mapping[str, Traced]) -> Iterator[KernelUse]:
    """Each kernel once, with the dtypes that took it and the most modules that did so in one of them."""
    takers: dict[str, list[tuple[str, Kernel]]] = {}
    for dtype, one in traced.items():
        for kernel in one.kernels:
            takers.setdefault(str(kernel), []).append((dtype, kernel))
    for taken in takers.values():
        kernel = taken[0][1]
        yield KernelUse(
            operator=kernel.operator,
            kernel=kernel.kernel,
            why=kernel.why,
            dtypes=tuple(dtype for dtype, _ in taken),
            modules=max(kernel.modules for _, kernel in taken),
        )


def _optimizer(device: Device, name: str, implementation: str | None, dtypes: tuple[str, ...]) -> KernelUse:
    by_default = "foreach" if device.kind == "cuda" and name not in _WITHOUT_FOREACH else "loop"
    if (package := OPTIMIZERS[name].package) != "torch":
        return KernelUse(operator="optimizer", kernel=f"{package}'s", why=name, dtypes=dtypes, modules=0)
    why = name if implementation else f"{name}, PyTorch's default there"
    return KernelUse(operator="optimizer", kernel=implementation or by_default, why=why, dtypes=dtypes, modules=0)

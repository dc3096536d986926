"""Rules of a device as used in one report: its kernels, and the origin of the bytes inside them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from sizer.allocator.allocator import describe
from sizer.base.units import format_range
from sizer.base.versions import format_version
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.optimizers import OPTIMIZERS
from sizer.report.explanation import Explanation, Formula, KernelUse, RuleTexts
from sizer.tape.affine import AffineTape
from sizer.tape.archive import Kernel, Traced
from sizer.tape.per_sample import PerSampleTape
from sizer.tracing.cuda.by_capability import Blas, blas_of
from sizer.tracing.cuda.cudnn_convolution import without_cublaslt
from sizer.tracing.cuda.size_oracle import oracle_name
from sizer.tracing.device import Device

BY_CUDNN = (
    "Copies of operands in another layout and the workspace of the engine that {} (cudnn/ConvShared.cpp, "
    "Conv_v8.cpp); without cuDNN columns and cuBLAS's workspace (ConvolutionMM2d.cu)."
)
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
    texts: RuleTexts | None = None,
) -> Explanation:
    """Return the explanation of a report, without workspaces, stand-ins and margins.

    Exact, modelled and uncounted parts are read from the tapes, the device's rules, and the limitations in the docstrings of
    these rules.

    Args:
        device: The device.
        traced: Traces, by dtype.
        optimizer: Name of the optimizer, None if none steps.
        implementation: Implementation of the optimizer, None for PyTorch's default.
        gpu: The device's entry in the catalogue, if it has one.
        expandable_segments: Whether the allocator uses expandable segments.
        answered: False if cuDNN was queried about this work and did not answer.
        texts: Texts of the rules, read here if they are None.
    """
    dtypes = tuple(traced)
    kernels = list(_kernels(traced))
    if optimizer not in (None, "none"):
        kernels.append(_optimizer(device, optimizer, implementation, dtypes))
    return Explanation(
        rules=rules_of(device),
        kernels=tuple(kernels),
        exact=tuple(_exact(traced.values())),
        modelled=tuple(_modelled(device, texts or _read(device), gpu, answered, _operators(traced.values()))),
        allocator=describe(device.kind, expandable_segments=expandable_segments),
    )


def _exact(traced: Collection[Traced]) -> Iterator[str]:
    """Yield the exact parts of the estimate, and how one trace serves other batch sizes."""
    yield "weights, buffers, gradients and optimizer state: the tensors themselves, each storage once"
    yield "what autograd saves and when each tensor is released: PyTorch's own Python and autograd engine ran, on meta tensors"
    lines = [line for one in traced for _, line in one.family.lines]
    fitted = {line.fitted_at for line in lines if isinstance(line, AffineTape)}
    per_sample = {line.fitted_at for line in lines if isinstance(line, PerSampleTape)}
    single = sorted({tape.batch for one in traced for tape in one.family.exact})
    if fitted:
        pairs = ", ".join(f"{first} and {second}" for first, second in sorted(fitted))
        yield f"sizes at every batch size: traces at batch {pairs} give each block's bytes as a + b * batch, a third one checks"
    if per_sample:
        pairs = ", ".join(f"{first} and {second}" for first, second in sorted(per_sample))
        yield f"other batch sizes: traces at batch {pairs} give what each further sample adds, a third one checks"
    if single:
        yield f"traced by itself: batch {', '.join(map(str, single))}"


def _modelled(
    device: Device, texts: RuleTexts, gpu: Gpu | None, answered: bool, operators: frozenset[str]
) -> Iterator[str]:
    """Yield the modelled and uncounted parts of the traced operators."""
    if device.kind == "cuda" and _any_of(texts.convolutions, operators):
        yield convolutions(gpu, answered=answered)
    alone = [one.name for one in texts.allocations if one.by_cudnn and not one.convolves and _any_of([one.name], operators)]
    if modelled := sorted({name.rpartition(".")[0] for name in alone}):
        yield f"workspaces that cuDNN alone knows ({', '.join(modelled)}): modelled; the range of the process allows for them"
    if texts.allocations:
        formulas = f"formulas for {len(texts.allocations)} operators"
        yield f"what kernels hold beside their results: {formulas}; of others it is not counted"
    else:
        yield "what kernels hold beside their results is not counted"
    if gpu is not None and gpu.context_high_bytes > gpu.context_low_bytes:
        ends = format_range(gpu.context_low_bytes, gpu.context_high_bytes)
        yield f"what the process holds outside the allocator: {ends}"
    yield from (one.text for one in texts.limitations if not one.operators or _any_of(one.operators, operators))


def _operators(traced: Collection[Traced]) -> frozenset[str]:
    """Return the names of the traced operators; empty without traces."""
    return frozenset(name for one in traced for tape in one.family.tapes() for name in tape.op_names)


def _any_of(asked: Iterable[str], operators: frozenset[str]) -> bool:
    """Return whether some of these operators were traced; True without traces."""
    return not operators or not operators.isdisjoint(asked)


def rules_of(device: Device) -> str:
    """Return the device and the version of PyTorch of the rules, in words."""
    version = format_version(device.version)
    if device.kind != "cuda":
        return f"{device.kind.upper()} in PyTorch {version}"
    major, minor = device.capability.plain
    return f"CUDA capability {major}.{minor} in PyTorch {version}"


def convolutions(gpu: Gpu | None, *, answered: bool = True) -> str:
    """Return the source of the workspaces of convolutions on CUDA, in words; `answered` as in `explain`."""
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


def formulas(device: Device, gpu: Gpu | None = None, *, texts: RuleTexts | None = None) -> dict[str, Formula]:
    """Return by operator the formula of the bytes inside its kernel and its source, from the rules' docstrings."""
    texts = texts or _read(device)
    who = oracle_name(gpu) if gpu is not None else None
    asked = BY_CUDNN.format(who) if who else ""
    found = {
        one.name: Formula(
            text=one.text,
            modelled=device.kind == "cuda" and one.by_cudnn,
            asked=asked if one.convolves else "",
        )
        for one in texts.allocations
    }
    if texts.products:
        found |= dict.fromkeys(texts.products, Formula(text=_blas(blas_of(device.capability.plain, device.version))))
    return found


def _read(device: Device) -> RuleTexts:
    from sizer.tracing.rule_texts import read_rule_texts  # imports torch, which stored texts do not need

    return read_rule_texts(device)


def _blas(blas: Blas) -> str:
    how = "one per thread, kept from its first use" if blas.kept else "for the time of each call"
    light = ""
    if blas.lt_size is not None:
        brief = "for the time of the call " if blas.kept and not blas.lt_kept else ""
        light = f", {blas.lt_size:,} B {brief}where cuBLASLt adds a bias"
    return f"cuBLAS's workspace of {blas.size:,} B, {how}{light}, and copies of strided operands (cuda/CublasHandlePool.cpp)"


def _kernels(traced: Mapping[str, Traced]) -> Iterator[KernelUse]:
    """Yield each kernel once, with the dtypes that use it and the largest number of modules that use it in one dtype."""
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

"""Check of placement by a forward pass: weights are on meta, tensors that `.to()` would leave behind on the CPU. Imports torch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sizer.architecture import make_blueprint
from sizer.architecture.blueprint import Example
from sizer.architecture.module_census import take_census, unregistered_tensors
from sizer.architecture.peft_adapters import cast
from sizer.base.arguments import arguments_of, describe
from sizer.base.errors import BuildError, RequestError, TraceError
from sizer.catalogue.modes import MODES
from sizer.placement import report
from sizer.placement.placement_mode import PlacementFunctionMode, PlacementMode, on_meta
from sizer.placement.report import Finding, Group, PlacementReport
from sizer.query.request import Request, check_traced
from sizer.tracing.steps import autocast, place, weight_dtype
from sizer.tracing.trace import build, explain_errors, recording, repeatable

BATCH = 2  # of built-in sources: batch norm refuses one sample, and only a size of 1 broadcasts

Progress = Callable[[str], None]
Unregistered = list[tuple[str, Tensor]]


def check_placement(module: nn.Module, inputs: tuple | Mapping[str, Any]) -> PlacementReport:
    """Return a module's and a batch's tensors by device and dtype (sizes in bytes), and their placement mistakes.

        found = sizer.check_placement(model, (images,))
        for finding in found.findings:
            print(finding.what, finding.where, finding.todo, sep="\\n")

    `inputs` are the forward pass's arguments, a tuple or a dict. These mistakes are found:

    - weights on several devices
    - inputs on another device than the weights
    - floating-point tensors of two dtypes in one matrix product or convolution
    - tensors that `forward` makes on the CPU (a factory call without `device=`) and uses with the model's own
    - attributes that are neither parameter nor buffer, which `.to()` leaves behind
    - devices named in the code
    - `x.to(device)` for a tensor `x` as a statement, which drops the result

    The forward pass runs on meta tensors, on a copy of the module with weights on the meta device. Meta represents the device
    of the weights. Your module, its gradients, buffers and random numbers are not changed, and no accelerator is needed: errors
    that only a GPU would raise are found on a CPU. A module that was built on meta can be checked with inputs anywhere.

    Raises BuildError if a lazy parameter has no shape yet, RequestError for other arguments.

    *Known limitations*:

    - Only code that this forward pass reaches is checked, not backward hooks and the training loop around it.
    - Kernels of other libraries (Triton, CUDA extensions) do not run on meta.
    - If control flow reads values that come from weights, stand-ins are used and noted.
    - Dropped results are read from CPython's byte code.
    - Several accelerators in one model (pipeline parallelism) are reported as weights on several devices.
    - The module's own hooks run too.
    """
    args, kwargs = arguments_of(inputs)
    if not isinstance(module, nn.Module):
        raise RequestError("module", given=describe(module), allowed="an nn.Module", todo="pass MyModel()")
    module = getattr(module, "_orig_mod", module)  # wrapped by torch.compile
    return _check(module, (args, kwargs, None), lambda copied, given: copied(*given[0], **given[1]))


def check_request(
    request: Request, *, config: dict | None = None, report_progress: Progress | None = None
) -> PlacementReport:
    """Return the placement of a built-in source's model and batch, over one step of its work up to the loss or output.

    The dtype is the first of the request; the batch is of `BATCH` samples, since placement does not depend on it. `config` is
    the parsed config.json for the sources "hub" and "config". Raises RequestError, ConfigError and BuildError.
    """
    check_traced(request)
    progress = report_progress or (lambda text: None)
    progress("building the model on meta")
    unquantized = replace(request, weights="full") if request.weights == "checkpoint" else request
    blueprint = make_blueprint(unquantized, config)
    if blueprint.replace_layers is not None:
        raise BuildError(
            "quantized weights are on their device as soon as they are quantized",
            given=f"weights={request.weights}",
            todo="leave weights out: the placement of other tensors does not depend on it",
        )
    training, dtype = MODES[request.mode].trains, request.dtypes[0]
    module = build(blueprint, checkpointing=request.checkpointing).train(training)
    cast(module.to("meta"), weight_dtype(dtype))
    example = place(blueprint.example(BATCH, training), weight_dtype(dtype), lambda tensor: tensor)
    work = blueprint.loss if training else blueprint.predict

    def run(copied: nn.Module, given: tuple) -> object:
        args, kwargs, targets = given
        with torch.set_grad_enabled(training), autocast("cuda", dtype)():
            return work(copied, Example(args=args, kwargs=kwargs, targets=targets))

    progress(f"running a step on meta tensors in {dtype}")
    return _check(module, (example.args, example.kwargs, example.targets), run, name=blueprint.name)


def _check(
    module: nn.Module, given: tuple, run: Callable[[nn.Module, tuple], object], *, name: str | None = None
) -> PlacementReport:
    """Return the placement of a module and of the tensors in `given`, (args, kwargs, targets).

    `run` is the pass, on a copy of both. Raises BuildError if a lazy parameter has no shape yet.
    """
    census = take_census(module, name=name or type(module).__name__)
    device, unregistered = _device_of_weights(module, given), unregistered_tensors(module)
    mode = PlacementMode(device, _dtype_of_weights(module))
    reason = _run(mode, module, unregistered, given, run)
    return PlacementReport(
        name=census.name,
        class_name=census.class_name,
        device=str(device),
        groups=tuple(_groups(module, unregistered, given)),
        stray=census.unregistered_tensors,
        findings=(*_without_a_pass(module, device, unregistered), *mode.findings),
        ran=reason is None,
        reason=reason,
        notes=tuple(mode.recorder.notes),
    )


def _run(mode: PlacementMode, module: nn.Module, unregistered: Unregistered, given: tuple, run: Callable) -> str | None:
    """Run the pass and return why it did not finish, None if it did."""
    try:
        copied = _copy_to_meta(mode, module, unregistered)
    except Exception as error:  # the parts of a module may raise anything when they are copied
        return f"the module cannot be copied ({type(error).__name__}: {str(error)[:200]})"
    given = pytree.tree_map_with_path(
        lambda path, leaf: mode.place_input(_input_name(path), leaf) if isinstance(leaf, Tensor) else leaf, given
    )
    try:
        with repeatable(), recording(mode.recorder), explain_errors(mode.recorder), mode, PlacementFunctionMode(mode):
            run(copied, given)
    except TraceError as error:
        return str(error)
    behind = {path for path, tensor in unregistered_tensors(copied) if tensor.device.type == "cpu"}
    mode.forget_copies_of(path for path, _ in unregistered if path not in behind)
    return None


def _copy_to_meta(mode: PlacementMode, module: nn.Module, unregistered: Unregistered) -> nn.Module:
    """Return a copy of the module: registered tensors on meta, with the values of small buffers; others as `.to()` leaves them."""
    memo: dict[int, Any] = {id(buffer): mode.to_meta(buffer) for buffer in module.buffers()}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(on_meta(parameter), requires_grad=parameter.requires_grad)
    memo |= {id(tensor): mode.attribute_on_cpu(path, tensor) for path, tensor in unregistered}
    copied = copy.deepcopy(module, memo)
    mode.recorder.load(copied)
    return copied


# --------------------------------------------------------------------------------------------------- before the pass


def _device_of_weights(module: nn.Module, given: tuple) -> torch.device:
    """Return the device with most of the weights' bytes; for a module without weights, the first input's."""
    sizes: Counter[torch.device] = Counter()
    for tensor in [*module.parameters(), *module.buffers()]:
        sizes[tensor.device] += tensor.numel() * tensor.element_size()
    if sizes:
        return sizes.most_common(1)[0][0]
    return next((leaf.device for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)), torch.device("cpu"))


def _dtype_of_weights(module: nn.Module) -> torch.dtype:
    """Return the floating-point dtype with most of the parameters' bytes; float32 for a module without any."""
    sizes: Counter[torch.dtype] = Counter({torch.float32: 0})
    for parameter in module.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel() * parameter.element_size()
    return sizes.most_common(1)[0][0]


def _groups(module: nn.Module, unregistered: Unregistered, given: tuple) -> Iterator[Group]:
    for kind, tensors in (
        ("parameters", module.parameters()),
        ("buffers", module.buffers()),
        ("other tensors", (tensor for _, tensor in unregistered)),
        ("inputs", (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))),
    ):
        groups: dict[tuple[str, str], list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault((str(tensor.device), str(tensor.dtype).removeprefix("torch.")), []).append(tensor)
        for (device, dtype), members in groups.items():
            yield Group(
                kind=kind,
                device=device,
                dtype=dtype,
                tensors=len(members),
                elements=sum(tensor.numel() for tensor in members),
                bytes=sum(tensor.numel() * tensor.element_size() for tensor in members),
            )


def _without_a_pass(module: nn.Module, device: torch.device, unregistered: Unregistered) -> Iterator[Finding]:
    """Yield the findings that need no forward pass."""
    named = [*module.named_parameters(), *module.named_buffers()]
    elsewhere = {path: str(tensor.device) for path, tensor in named if tensor.device != device}
    if elsewhere:
        others = ", ".join(sorted(set(elsewhere.values())))
        yield report.MIXED_DEVICES.finding(
            report.join(elsewhere), count=len(elsewhere), total=len(named), others=others, weights=device
        )
    if parameters := [path for path, tensor in unregistered if isinstance(tensor, nn.Parameter)]:
        yield report.UNREGISTERED.finding(report.join(parameters), count=len(parameters))


def _input_name(path: Any) -> str:
    """ "input 0", "input_ids" or "targets" for the path of a tensor in (args, kwargs, targets)."""
    keys = [getattr(key, "idx", getattr(key, "key", getattr(key, "name", key))) for key in path]
    first, rest = ("targets", keys[1:]) if keys[0] == 2 else (str(keys[1]), keys[2:])
    return "".join([f"input {first}" if keys[0] == 0 else first, *(f"[{key!r}]" for key in rest)])

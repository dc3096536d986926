"""Modes that watch a forward pass on meta tensors for tensors of other devices and dtypes.

In the pass, all tensors on the device of the weights are on meta, and all others on the CPU. An operator with tensors of both
would raise on an accelerator. Here it is a finding, the tensor is moved to meta, and the pass continues. A function mode finds
what only Python shows: devices named in the code, and dropped results. Lines of code are read from Python's own frames.
"""

from __future__ import annotations

import dis
import functools
import itertools
import os
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sizer.placement import report
from sizer.placement.report import Finding
from sizer.tracing.device import Device
from sizer.tracing.recorder import Recorder
from sizer.tracing.values.known import is_small, tensors_of

_TORCH = str(Path(torch.__file__).parent) + os.sep
_ROOM = str(Path(__file__).parent) + os.sep
_TRACING = str(Path(__file__).parents[1] / "tracing") + os.sep


def is_hidden(frame: FrameType) -> bool:
    """Return whether a frame is PyTorch's or Sizer's tracing, not the model's."""
    return frame.f_code.co_filename.startswith((_TORCH, _TRACING, _ROOM))


def line_of(frame: FrameType | None) -> str | None:
    """Return "file:line in function" of the innermost frame of the model's code, from `frame` outwards; None without one."""
    while frame is not None and is_hidden(frame):
        frame = frame.f_back
    return frame and f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def drops_result(frame: FrameType) -> bool:
    """Return whether the call of a frame is a separate statement: its next instruction drops the result.

    *Known limitations*: reads CPython's byte code; elsewhere nothing is found. Tried on 3.11.
    """
    return frame.f_lasti in _dropping_calls(frame.f_code)


@functools.lru_cache(maxsize=4096)
def _dropping_calls(code: CodeType) -> frozenset[int]:
    """Return the offsets of the calls in a code object with a result that the next instruction pops off the stack.

    A frame may be at the call or at one of the inline caches after it, which `dis` leaves out.
    """
    return frozenset(
        offset
        for call, then in itertools.pairwise(dis.get_instructions(code))
        if call.opname.startswith("CALL") and then.opname == "POP_TOP"
        for offset in range(call.offset, then.offset, 2)
    )


@functools.lru_cache(maxsize=4096)
def _short(filename: str) -> str:
    """Return a file's name from its package on, or from the current folder."""
    path = Path(filename)
    for folder in ("site-packages", "dist-packages"):
        if folder in path.parts:
            return Path(*path.parts[path.parts.index(folder) + 1 :]).as_posix()
    return path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else path.as_posix()


ACCELERATORS = ("cuda", "mps", "xpu")

_aten = torch.ops.aten

# Operators that accept tensors of the CPU together with those of a device: copies between them, indices
# (TensorAdvancedIndexing.cpp moves them), lengths and sizes that must be on the CPU (PackedSequence.cpp, LossCTC.cpp,
# TensorShape.cpp, RNN.cpp).
_TAKES_BOTH = frozenset((
    _aten.copy_, _aten._to_copy, _aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index,
    _aten._pack_padded_sequence, _aten._ctc_loss, _aten.tensor_split, _aten._cudnn_rnn, _aten.lstm, _aten.gru, _aten.rnn_tanh,
    _aten.rnn_relu, _aten.is_same_size, _aten._has_same_storage_numel, _aten.set_,
))  # fmt: skip
# Operators that need one dtype for all their floating-point tensors.
_ONE_DTYPE = frozenset((
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.addmv, _aten.mv, _aten.dot, _aten.linear, _aten.convolution,
    _aten._convolution, _aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_efficient_attention,
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Origin of a tensor other than the weights: an input or an attribute by its name, or the line that made it."""

    kind: str  # "input", "attribute" or "made"
    name: str = ""
    device: str = "cpu"
    line: str = ""


def on_meta(tensor: Tensor) -> Tensor:
    """Return a meta tensor of the same shape, strides and dtype."""
    return torch.empty_like(tensor.detach(), device="meta")


class PlacementMode(TorchDispatchMode):
    """Dispatch mode that sees every operator before `recorder` does.

    `sizer.placement.placement_mode` sees what only Python shows. `device` is that of the weights, represented by meta, and
    `dtype` their dtype.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.device, self.dtype = device, dtype
        self.recorder = Recorder(Device("cuda", (9, 0)))
        self._origins: dict[int, tuple[Origin, weakref.ref]] = {}
        self._found: dict[tuple[str, str, str], Finding] = {}
        self._input_dtypes: dict[torch.dtype, list[str]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as the recorder: nothing is compiled here

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the findings in the order of the pass; each mistake once."""
        return tuple(self._found.values())

    def add(self, finding: Finding, name: str = "") -> None:
        """Keep a finding, unless the same mistake was found at the same line before."""
        self._found.setdefault((finding.problem, finding.where, name), finding)

    def forget_copies_of(self, names: Iterable[str]) -> None:
        """Drop the findings about attributes that the pass has moved for good: the next one copies nothing."""
        for name in names:
            for key in [key for key in self._found if key[0] == report.COPIED.problem and key[2] == name]:
                del self._found[key]

    # ---------------------------------------------------------------------------------------------------- before the pass

    def place_input(self, name: str, tensor: Tensor) -> Tensor:
        """Return an input for the pass: on meta if it is on the weights' device, else on the CPU.

        If the weights are on meta, so is every input: both will be moved to a device later.
        """
        if tensor.dtype.is_floating_point:
            self._input_dtypes.setdefault(tensor.dtype, []).append(name)
        if tensor.device != self.device and self.device.type != "meta":
            return self._copy_on_cpu(tensor, Origin(kind="input", name=name, device=str(tensor.device)))
        return self.to_meta(tensor)

    def attribute_on_cpu(self, path: str, tensor: Tensor) -> Tensor:
        """Return an attribute as `.to()` leaves it: on meta only if it is already on an accelerator with the weights."""
        if tensor.device == self.device and self.device.type in ACCELERATORS:
            return on_meta(tensor)
        left = self._copy_on_cpu(tensor, Origin(kind="attribute", name=path, device=str(tensor.device)))
        return nn.Parameter(left, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else left

    def to_meta(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor in place of another one; control flow may read the values of a small one."""
        made = on_meta(tensor)
        if tensor.device.type != "meta" and tensor.layout == torch.strided and is_small(tensor):
            values = tensor.detach().to("cpu", copy=True)  # its own: operators in place change it as they go
            self.recorder.values.remember(made, values.contiguous())
        return made

    def _copy_on_cpu(self, tensor: Tensor, origin: Origin) -> Tensor:
        if tensor.device.type == "meta":  # it has no values: a single zero, expanded, replaces them
            left = torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
        else:
            left = tensor.detach().to("cpu", copy=True)
        self._set_origin(left, origin)
        return left

    # ---------------------------------------------------------------------------------------------------- during the pass

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        packet, tensors = func.overloadpacket, tensors_of(args) + tensors_of(kwargs.values())
        on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        if on_cpu and packet in _TAKES_BOTH:
            self._check_copy(packet, args, kwargs)
        elif misplaced := self.misplaced(tensors):
            self.add_misplaced(func, misplaced)
            if func._schema.is_mutable and any(args[0] is tensor for tensor in misplaced):
                return args[0]  # a device would refuse to write into a tensor of the CPU
            args, kwargs = self.move_to_meta(args, kwargs)
        if packet in _ONE_DTYPE:
            args = self._unify_dtypes(packet, args)
        out = func(*args, **kwargs)
        for tensor in tensors_of([out]):
            if tensor.device.type == "cpu" and tensor.untyped_storage()._cdata not in self._origins:
                self._set_origin(tensor, self._origin_of_result(on_cpu))
        return out

    def misplaced(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors that a device would refuse with the others: those of the CPU, except scalars."""
        if all(tensor.device.type != "meta" for tensor in tensors):
            return []
        return [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.dim()]

    def add_misplaced(self, func: Any, tensors: Iterable[Tensor]) -> None:
        """Add a finding for tensors that an operator would refuse, each with its origin."""
        here, operator = self._current_line() or "the model", func.overloadpacket.__name__
        for tensor in tensors:
            origin = self._origin(tensor) or Origin(kind="made", line=here)
            if origin.kind == "input":
                names = {"name": origin.name, "variable": "x" if origin.name.startswith("input ") else origin.name}
                devices = {"device": origin.device, "weights": self.device}
                self.add(report.INPUT_DEVICE.finding(here, operator=operator, **names, **devices), origin.name)
            elif origin.kind == "attribute":
                self.add(report.LEFT_BEHIND.finding(here, path=origin.name, operator=operator), origin.name)
            else:
                described = f"a {_name(tensor.dtype)} tensor of shape {tuple(tensor.shape)}"
                place = "there" if origin.line == here else f"at {here}"
                made = report.MADE_ELSEWHERE.finding(origin.line, tensor=described, operator=operator, place=place)
                self.add(made)

    def move_to_meta(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Arguments without tensors of the CPU, but scalars."""

        def move(tensor: Tensor) -> Tensor:
            return self.to_meta(tensor) if tensor.device.type == "cpu" and tensor.dim() else tensor

        return pytree.tree_map_only(Tensor, move, (args, kwargs))

    def _check_copy(self, packet: Any, args: tuple, kwargs: dict) -> None:
        """Allow a copy to the device, but add a finding for one of an attribute: it happens again in every pass."""
        if packet is _aten._to_copy:
            source, arrives = args[0], str(kwargs.get("device")) == "meta"
        else:
            source, arrives = args[1], packet is _aten.copy_ and args[0].device.type == "meta"
        origin = self._origin(source) if arrives and source.dim() else None
        if origin is not None and origin.kind == "attribute":
            self.add(report.COPIED.finding(self._current_line() or "the model", path=origin.name), origin.name)

    def _unify_dtypes(self, packet: Any, args: tuple) -> tuple:
        floats = [arg for arg in args if isinstance(arg, Tensor) and arg.dtype.is_floating_point]
        if len({tensor.dtype for tensor in floats}) < 2:
            return args
        weights = self.dtype if any(tensor.dtype == self.dtype for tensor in floats) else floats[-1].dtype
        odd = next(tensor.dtype for tensor in floats if tensor.dtype != weights)
        here = self._current_line() or "the model"
        names = {"given": _name(odd), "weights": _name(weights), "operator": packet.__name__}
        if odd in self._input_dtypes:
            self.add(report.INPUT_DTYPE.finding(here, inputs=report.join(self._input_dtypes[odd]), **names))
        else:
            self.add(report.MIXED_DTYPES.finding(here, **names))
        return tuple(arg.to(weights) if any(arg is one for one in floats) else arg for arg in args)

    # ------------------------------------------------------------------------------------------------------------ origins

    def _set_origin(self, tensor: Tensor, origin: Origin | None) -> None:
        if origin is not None:
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._origins[key] = (origin, weakref.ref(storage, lambda _: self._origins.pop(key, None)))

    def _origin(self, tensor: Tensor) -> Origin | None:
        entry = self._origins.get(tensor.untyped_storage()._cdata) if tensor.device.type == "cpu" else None
        return entry[0] if entry else None

    def _origin_of_result(self, on_cpu: list[Tensor]) -> Origin | None:
        """Return the origin of the first tensor it was made from, or else the line at work."""
        known = next((origin for tensor in on_cpu if (origin := self._origin(tensor)) is not None), None)
        line = None if known else line_of(sys._getframe(2))
        return Origin(kind="made", line=line) if line else known

    def _current_line(self) -> str | None:
        line, module = line_of(sys._getframe(2)), self.recorder.paths.current()
        return f"{line}, in module {module}" if line and module else line


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_MOVERS = {
    Tensor.to: "to", Tensor.cuda: "cuda", Tensor.cpu: "cpu", Tensor.xpu: "xpu", Tensor.float: "float", Tensor.half: "half",
    Tensor.bfloat16: "bfloat16", Tensor.double: "double", Tensor.type: "type", Tensor.type_as: "type_as",
}  # fmt: skip
_BY_NAME = {Tensor.cuda: "cuda", Tensor.xpu: "xpu"}
_IS_CUDA = Tensor.is_cuda.__get__


class PlacementFunctionMode(TorchFunctionMode):
    """Function mode that adds findings to `mode` that only it can see: devices named in the code, and dropped results."""

    def __init__(self, mode: PlacementMode):
        super().__init__()
        self._mode = mode
        self._asks = False  # code that checks whether a tensor is on CUDA may name CUDA

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, caller = kwargs or {}, sys._getframe(1)
        if func in _MOVERS and not is_hidden(caller) and drops_result(caller):
            self._mode.add(report.DROPPED.finding(line_of(caller) or "the model", method=_MOVERS[func]))
        if func == _IS_CUDA and args[0].device.type == "meta":
            self._asks = True
            return self._mode.device.type in ("cuda", "cpu", "meta")  # tensors that will be on CUDA count as on CUDA
        if func in _BY_NAME:
            self._name(_BY_NAME[func], caller)
            return args[0].to("meta")
        if func is torch.nn.functional.scaled_dot_product_attention:  # compares devices before any operator is called
            tensors = tensors_of(args) + tensors_of(kwargs.values())
            if misplaced := self._mode.misplaced(tensors):
                self._mode.add_misplaced(torch.ops.aten.scaled_dot_product_attention.default, misplaced)
                args, kwargs = self._mode.move_to_meta(args, kwargs)
        args = tuple(self._redirect(arg, caller) for arg in args)
        return func(*args, **{key: self._redirect(value, caller) for key, value in kwargs.items()})

    def _redirect(self, value: Any, caller: FrameType) -> Any:
        """Meta in the place of an accelerator."""
        named = isinstance(value, str) and value.partition(":")[0] in ACCELERATORS
        if not named and not (isinstance(value, torch.device) and value.type in ACCELERATORS):
            return value
        self._name(str(value), caller)
        return torch.device("meta")

    def _name(self, device: str, caller: FrameType) -> None:
        device_of_weights = self._mode.device
        if device.partition(":")[0] != device_of_weights.type and not self._asks:
            where = line_of(caller) or "the model"
            self._mode.add(report.HARD_CODED.finding(where, device=device, weights=device_of_weights))

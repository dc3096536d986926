"""A mode that watches a forward pass on meta tensors for tensors of other devices and dtypes.

In the pass, all tensors on the device of the weights are on meta, and all others on the CPU. An operator with tensors of both
would raise on an accelerator. Here it is a finding, the tensor is moved to meta, and the pass continues.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sizer.placement import findings
from sizer.placement.call_site import line_of
from sizer.placement.report import Finding
from sizer.tracing.device import Device
from sizer.tracing.recorder import Recorder
from sizer.tracing.values.known import is_small, tensors_of

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

    `sizer.placement.function_mode` sees what only Python shows. `device` is that of the weights, represented by meta, and
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
            for key in [key for key in self._found if key[0] == findings.COPIED.problem and key[2] == name]:
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
                self.add(findings.INPUT_DEVICE.at(here, operator=operator, **names, **devices), origin.name)
            elif origin.kind == "attribute":
                self.add(findings.LEFT_BEHIND.at(here, path=origin.name, operator=operator), origin.name)
            else:
                described = f"a {_name(tensor.dtype)} tensor of shape {tuple(tensor.shape)}"
                place = "there" if origin.line == here else f"at {here}"
                made = findings.MADE_ELSEWHERE.at(origin.line, tensor=described, operator=operator, place=place)
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
            self.add(findings.COPIED.at(self._current_line() or "the model", path=origin.name), origin.name)

    def _unify_dtypes(self, packet: Any, args: tuple) -> tuple:
        floats = [arg for arg in args if isinstance(arg, Tensor) and arg.dtype.is_floating_point]
        if len({tensor.dtype for tensor in floats}) < 2:
            return args
        weights = self.dtype if any(tensor.dtype == self.dtype for tensor in floats) else floats[-1].dtype
        odd = next(tensor.dtype for tensor in floats if tensor.dtype != weights)
        here = self._current_line() or "the model"
        names = {"given": _name(odd), "weights": _name(weights), "operator": packet.__name__}
        if odd in self._input_dtypes:
            self.add(findings.INPUT_DTYPE.at(here, inputs=findings.join(self._input_dtypes[odd]), **names))
        else:
            self.add(findings.MIXED_DTYPES.at(here, **names))
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

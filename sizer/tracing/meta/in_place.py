"""In-place operations of the backward pass that a dispatch mode disables, enabled again.

Under a dispatch mode, and on meta tensors, `at::isTensorSubclassLike` is true (ATen/TensorSubclassLikeUtils.h, 2.6, 2.11 to
2.15). Autograd then does not write into tensors that only it owns:

- torch/csrc/autograd/input_buffer.cpp, accumulate(): two gradients are added by `old + new` instead of `old.add_(new)`;
- torch/csrc/autograd/FunctionsManual.cpp, gather_backward, index_select_backward, index_backward, …: `zeros.scatter_add(…)`
  instead of `zeros.scatter_add_(…)`.

On a device neither happens. So the in-place operator runs if its conditions hold: autograd's engine calls it, grad mode is off,
and the first operand is dense and unshared. For a gradient, both the tensor and its storage must be unshared
(can_accumulate_inplace()): a gradient that the caller passed to backward() is not changed. A sum within the formula of a node
is out of place: its first operand was made by the node that runs, whose gradients go to different inputs. Gradients that are
DTensors are subclasses on a device too: operators on their local tensors are not in place.
"""

from __future__ import annotations

import sys
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sizer.tracing.values import masks, stand_ins
from sizer.tracing.values.handler import Handler, HandlerContext
from sizer.tracing.values.known import StorageSet

_aten = torch.ops.aten


_CREATE_GRAPH = 2  # of _engine_run_backward's arguments after the roots (torch/autograd/graph.py)


def sole_owner_use_count() -> int:
    """Return the storage use count, seen from Python, of a tensor held by a single C++ or Python variable."""
    tensor = torch.empty(1, device="meta")
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class _Counting(TorchDispatchMode):
    """Records the use count of the gradient to which the engine adds."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is _aten.add.Tensor:
            self.count = args[0]._use_count()
        return func(*args, **(kwargs or {}))


@cache
def engine_use_count() -> int:
    """Return the use count, seen under a dispatch mode, of a gradient held by autograd's engine only."""
    leaf = torch.zeros(1, device="cpu", requires_grad=True)  # on meta these operators would import sympy
    with torch.enable_grad():
        loss = leaf.sin() + leaf.cos()
    with _Counting() as counting:
        loss.backward()
    return counting.count


def in_backward() -> bool:
    """Return whether autograd's engine has called the dispatched operator, without building a graph."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled() and _called_by_engine(builds_graph=False)


def in_formula() -> bool:
    """Return whether a formula of autograd's engine has called the dispatched operator; the engine may build a graph."""
    return torch._C._current_graph_task_id() != -1 and _called_by_engine(builds_graph=True)


def _called_by_engine(*, builds_graph: bool) -> bool:
    """Return whether no Python function is between the engine and the dispatch mode.

    A backward pass written in Python runs unchanged. An engine that builds a graph adds no gradients in place. For torch.func its
    formulas write nothing in place either, as their tensors are wrapped. `builds_graph` includes the other engines with a graph.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    if caller is None:
        return True
    if caller.f_code.co_name != "_engine_run_backward":
        return False
    given = caller.f_locals.get("args", ())
    if len(given) <= _CREATE_GRAPH or not given[_CREATE_GRAPH]:
        return True
    differentiating = caller.f_back.f_back if caller.f_back else None  # behind torch.autograd.grad
    return builds_graph and not (differentiating and differentiating.f_globals["__name__"].startswith("torch._functorch"))


def _is_of_subclass(recorder: HandlerContext, func: Any) -> bool:
    """Return True if a tensor subclass runs the operator on its inner tensors."""
    found = recorder.taken_apart is func
    recorder.taken_apart = None
    return found


def accumulate(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return `old + new` of two gradients, added in place if the engine would do so."""
    old, new = args[0], args[1]
    if _is_of_subclass(recorder, func) or kwargs or len(args) != 2 or not in_backward() or not isinstance(new, Tensor):
        return NotImplemented
    if recorder.is_of_node(old) and _is_single():
        return NotImplemented  # a sum within the node's formula
    if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
        return NotImplemented
    owned = old._use_count() <= recorder.engine_use_count and recorder.is_unshared(old)
    if not owned or not (old.is_contiguous() or _aten.is_non_overlapping_and_dense.default(old)):
        return NotImplemented
    recorder.values.forget(old)
    return old  # the result of add_, which leaves a meta tensor unchanged


def _is_single() -> bool:
    """Return True if autograd's current node has no two gradients for one input of another node, which the engine would add."""
    node = torch._C._current_autograd_node()
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) == len(edges)


def _decline(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    return NotImplemented


_COUNTING = ("IndexReduceBackward", "ScatterReduceBackward")  # their formulas count with index_add and scatter_add


def _node() -> str:
    """Return the name of autograd's current node, without the number of its overload."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name().rstrip("0123456789")


def _write_into_zeros(in_place: Any) -> Any:
    def handler(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
        if _is_of_subclass(recorder, func) or not in_formula():
            return NotImplemented
        if not recorder.is_unshared(args[0]) or _node() in _COUNTING:
            return NotImplemented
        recorder.values.forget(args[0])
        return in_place(*args, **kwargs)

    return handler


def _index_put(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run index_backward's `zeros.index_put(…)` in place; other calls as the masks allow.

    The gradient of index_put itself is a copy of the incoming gradient (derivatives.yaml).
    """
    writes = in_formula() and recorder.is_unshared(args[0]) and not _node().startswith("IndexPut")
    if not _is_of_subclass(recorder, func) and writes:
        return masks.masked_index(recorder, _aten.index_put_.default, args, kwargs)
    return masks.masked_index(recorder, func, args, kwargs)


def _on_a_device(in_place: Any, *nodes: str, otherwise: Handler = _decline) -> Any:
    """Return a handler for nodes with formulas that write with `in_place` without tensor subclasses (FunctionsManual.cpp)."""

    def handler(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
        if _is_of_subclass(recorder, func) or not in_formula():
            return otherwise(recorder, func, args, kwargs)
        if not recorder.is_unshared(args[0]) or _node() not in nodes or _is_saved(args[0]):
            return otherwise(recorder, func, args, kwargs)
        recorder.values.forget(args[0])
        return in_place(*args, **kwargs)

    return handler


_NEGATED = StorageSet()  # of nodes with a formula that multiplies a negated tensor into a new one


def _negated(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `-input` in the gradient of a target, `-input * gradient`, which makes a new tensor (FunctionsManual.cpp)."""
    if not in_formula() or _node() != _WITH_LOGITS:
        return NotImplemented
    out = func(*args, **kwargs)
    _NEGATED.add(out)
    return out


def _product(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    return NotImplemented if args[0] in _NEGATED else _product_in_place(recorder, func, args, kwargs)


def _selected(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Select the gradient of masked_fill's value, whose elements are summed (FunctionsManual.cpp, masked_fill_backward).

    With tensor subclasses the formula puts zeros elsewhere, from a number that no device has.
    """
    if _is_of_subclass(recorder, func) or not in_formula() or _node() != "MaskedFillBackward":
        return stand_ins.chosen(recorder, func, args, kwargs)
    recorder.leave(args[2])
    with recorder:
        return torch.masked_select(args[1], args[0])


def _is_saved(tensor: Tensor) -> bool:
    """Return True if autograd's current node has saved a tensor, such as the weight of positive examples: it is not changed.

    No saved tensor is unpacked: hooks of saved tensors, such as those of checkpointing, allow that once.
    """
    node = torch._C._current_autograd_node()
    saved = (getattr(getattr(node, name), "data", None) for name in dir(node) if name.startswith("_raw_saved_"))
    address = torch._C._storage_address(tensor)
    return any(isinstance(one, Tensor) and torch._C._storage_address(one) == address for one in saved)


def isclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    """Run torch.isclose with the masks of NaN combined in place (native/TensorCompare.cpp, isclose).

    With a tolerance the peak comes later, and PyTorch's own chain of operators is the same.
    """
    is_apart = equal_nan and not rtol and not atol and input.is_meta and type(other) is Tensor and input.dtype == other.dtype
    if not is_apart or not (input.is_floating_point() or input.is_complex()):
        return torch.isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan)
    close = torch.eq(input, other)
    return close.bitwise_or_(torch.isnan(input).bitwise_and_(torch.isnan(other)))


# Gradients of operators that select a value: value_selecting_reduction_backward, and a mask for the larger or smaller of two
# tensors.
_SELECTING = ("MaxBackward", "MinBackward", "KthvalueBackward", "MedianBackward", "NanmedianBackward", "ModeBackward",
              "SortBackward", "TopkBackward", "CummaxBackward", "CumminBackward", "AminmaxBackward")  # fmt: skip
_LARGER = ("MaximumBackward", "MinimumBackward", "FmaxBackward", "FminBackward", "ClampBackward", "ClampMinBackward",
           "ClampMaxBackward")  # fmt: skip

_WITH_LOGITS = "BinaryCrossEntropyWithLogitsBackward"
_product_in_place = _on_a_device(_aten.mul_.Tensor, "BinaryCrossEntropyBackward", _WITH_LOGITS)

HANDLERS = {
    _aten.where.self: _selected,
    _aten.scatter.src: _on_a_device(_aten.scatter_.src, *_SELECTING),
    _aten.masked_fill.Scalar: _on_a_device(_aten.masked_fill_.Scalar, *_LARGER),
    _aten.index_fill.int_Tensor: _on_a_device(_aten.index_fill_.int_Tensor, "TraceBackward"),
    _aten.index_fill.int_Scalar: _on_a_device(_aten.index_fill_.int_Scalar, "TraceBackward"),
    _aten.neg.default: _negated,
    _aten.mul.Tensor: _product,
    _aten.sub.Tensor: _on_a_device(_aten.sub_.Tensor, _WITH_LOGITS),
    _aten.logical_and.default: _on_a_device(
        _aten.logical_and_.default,
        "MaxBackward",
        "MinBackward",
        "MedianBackward",
        "NanmedianBackward",
        otherwise=stand_ins.absorbed,
    ),
    _aten.masked_scatter.default: _on_a_device(_aten.masked_scatter_.default, "MaskedSelectBackward"),
    _aten.put.default: _on_a_device(_aten.put_.default, "TakeBackward"),
    _aten.add.Tensor: accumulate,
    _aten.scatter_add.default: _write_into_zeros(_aten.scatter_add_.default),
    _aten.index_add.default: _write_into_zeros(_aten.index_add_.default),
    _aten.index_put.default: _index_put,
}

"""A traced graph, moved from meta to the device before Inductor reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

CUDA, META = torch.device("cuda", 0), torch.device("meta")
_NO_GUARD = "not linked with support for cuda"  # part of the error of a CPU build of PyTorch, in code that requires a device guard


class Frontend:
    """Dynamo and AOTAutograd, which trace the device's tensors as meta tensors. `active` is False while Inductor works."""

    def __init__(self) -> None:
        self.active = False

    @contextmanager
    def turned(self, active: bool) -> Iterator[None]:
        """Set whether Dynamo and AOTAutograd trace, or Inductor works, within the context."""
        before, self.active = self.active, active
        try:
            yield
        finally:
            self.active = before

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Show traced code its tensors on the device within the context; tensors that it creates there are meta tensors."""
        from torch._dynamo.variables.base import VariableTracker
        from torch._dynamo.variables.tensor import TensorVariable
        from torch._subclasses.fake_tensor import FakeTensorMode

        dispatch, device_of, is_cuda = (
            FakeTensorMode.dispatch,
            TensorVariable.method_attr_device,
            TensorVariable.method_attr_is_cuda,
        )

        def dispatch_on_meta(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self.active and kwargs and (device := kwargs.get("device")) is not None and device.type == "cuda":
                kwargs = dict(kwargs) | {"device": META}
            return dispatch(mode, func, types, args, kwargs)

        def is_on_device(variable: Any) -> bool:
            return self.active and variable.device is not None and variable.device.type == "meta"

        def device_told(variable: Any, tx: Any) -> Any:
            return VariableTracker.build(tx, CUDA) if is_on_device(variable) else device_of(variable, tx)

        def is_cuda_told(variable: Any, tx: Any) -> Any:
            return VariableTracker.build(tx, True) if is_on_device(variable) else is_cuda(variable, tx)

        def made_on_meta(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def made(data: Any, *args: Any, **given: Any) -> torch.Tensor:
                if self.active and (device := given.get("device")) is not None and torch.device(device).type == "cuda":
                    given = given | {"device": META}
                return make(data, *args, **given)

            return made

        with (
            mock.patch.object(torch, "tensor", made_on_meta(torch.tensor)),
            mock.patch.object(torch, "as_tensor", made_on_meta(torch.as_tensor)),
            mock.patch.object(FakeTensorMode, "dispatch", dispatch_on_meta),
            mock.patch.object(TensorVariable, "method_attr_device", device_told),
            mock.patch.object(TensorVariable, "method_attr_is_cuda", is_cuda_told),
        ):
            yield


def move(graph: fx.GraphModule, inputs: Any) -> Any:
    """Change the devices in a graph from meta to the device, compute its fake tensors again, and return its inputs, moved.

    Tracing fake tensors of "cuda:0" from the start fails in a CUDA build without a driver: autograd's engine requires a
    context.
    """
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(pytree.tree_leaves(inputs))
    moved: dict[int, tuple[Any, Any]] = {}  # by identity, with the tensor, which stays alive

    def move_value(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "meta":
            return value
        if id(value) not in moved:
            with mode:
                new = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=CUDA)
            moved[id(value)] = value, new.requires_grad_(value.requires_grad and value.is_leaf)
        return moved[id(value)][1]

    _drop_moves(graph)
    for node in graph.graph.nodes:
        node.args, node.kwargs = (fx.node.map_aggregate(given, _device) for given in (node.args, node.kwargs))
    _move_functions(graph, move_value)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    with mode, torch.no_grad():
        _Propagation(graph, mode, move_value).run(*(None for _ in placeholders), enable_io_processing=False)
    graph.recompile()
    return pytree.tree_map(move_value, inputs)


def move_back(value: Any) -> Any:
    """Return a fake tensor of the device as one on meta, any other value as it is."""
    if not isinstance(value, FakeTensor) or value.device != CUDA:
        return value
    with value.fake_mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)


def _move_functions(graph: fx.GraphModule, move_value: Callable[[Any], Any]) -> None:
    """Move the functions called by operators of a graph, such as flex_attention's scores and masks; they are graphs."""
    for function in graph.children():
        if not isinstance(function, fx.GraphModule):
            continue
        _move_functions(function, move_value)
        for node in function.graph.nodes:
            node.args, node.kwargs = (fx.node.map_aggregate(given, _device) for given in (node.args, node.kwargs))
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(move_value, node.meta["val"])
            node.meta.pop("tensor_meta", None)
        function.recompile()


def _drop_moves(graph: fx.GraphModule) -> None:
    """Remove copies of the device's tensors to the device: `x.to("cuda")` returns x itself there."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        given = node.args[0].meta.get("val")
        if isinstance(given, torch.Tensor) and given.device == META and set(node.kwargs) <= {"device", "non_blocking"}:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def _device(value: Any) -> Any:
    return CUDA if isinstance(value, torch.device) and value.type in ("meta", "cuda") else value


class _Propagation(fx.Interpreter):
    """Run a graph on fake tensors of the device and note them as the nodes' values."""

    def __init__(self, graph: fx.GraphModule, mode: Any, move_value: Callable[[Any], Any]) -> None:
        super().__init__(graph)
        self._mode, self._move = mode, move_value
        self._given = iter([node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"])

    def run_node(self, node: fx.Node) -> Any:
        try:
            out = super().run_node(node)
        except RuntimeError as error:
            if _NO_GUARD not in str(error):
                raise
            out = pytree.tree_map(self._move, node.meta["val"])
        if "val" in node.meta and node.op != "output":
            node.meta["val"] = out
            node.meta.pop("tensor_meta", None)
        return out

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._move(next(self._given))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._move(self._mode.from_tensor(value)) if isinstance(value, torch.Tensor) else value

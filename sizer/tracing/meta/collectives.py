"""Collectives of torch.distributed without other ranks: only their allocations are recorded.

The operators of c10d have no meta kernels; each returns its arguments' tensors and a completed work. The functional operators
(torch/distributed/_functional_collectives.py) have kernels that allocate memory on meta that a device does not allocate. Read
in PyTorch 2.11 and 2.15: torch/csrc/distributed/c10d/Ops.cpp, Functional.cpp.

NCCL keeps the inputs of a functional reduce-scatter or all-to-all until the wait (`stashed_for_allocator_safety_` in
ProcessGroupNCCL.cpp, `register_work` in Functional.cpp).

*Known limitation*: the inputs of other asynchronous collectives are not kept. If all-gathers kept them, a rank of tensor and
context parallel would reserve 2 MiB more than over the null driver, for an unknown reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future

from sizer.tracing.values.handler import HandlerContext
from sizer.tracing.values.known import LARGEST_ASSUMED, tensors_of

_META = torch.device("meta")  # made outside of a trace, which distinguishes devices that code names meta
ALIKE = "every rank was taken to send what this one would send in its place"
CROWDED = "every other rank was taken to send all that it has to this one"
ROUTES = "other ranks were taken to send as much as this one would in their place; the range ends where they send all they have"


def _done(tensors: list[torch.Tensor]) -> Any:
    """Return a completed work with the tensors as its result.

    DDP requests its future; the fake process group's own work has none.
    """
    from torch._C._distributed_c10d import _create_work_from_future

    future: Future = Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


def collective(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return c10d operators' outputs and a completed work.

    Outputs are the first argument. A broadcast keeps known values, as each rank sends the same.
    """
    outputs = tensors_of(args[:1])
    for tensor in () if func is torch.ops.c10d.broadcast_.default else outputs:
        recorder.values.forget(tensor)
    returned = len(func._schema.returns)
    return (args[0], _done(outputs)) if returned == 2 else _done(outputs) if returned else None


def exchange(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return a completed work for c10d's send and recv_. It holds none of the tensors, as on a device."""
    for tensor in () if func is torch.ops.c10d.send.default else tensors_of(args[:1]):
        recorder.values.forget(tensor)
    return _done([])


def barrier(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return a completed work for c10d.barrier.

    From 2.15 on the first barrier of a group over NCCL allocates a buffer of one float, which the group keeps
    (ProcessGroupNCCL2, seen in PyTorch's memory history over the null NCCL).
    """
    from torch.distributed import ProcessGroup

    name = ProcessGroup.unbox(args[1]).group_name
    if recorder.device.kind == "cuda" and recorder.device.version >= (2, 15) and name not in recorder.barriers:
        with recorder:
            recorder.barriers[name] = torch.zeros(1, dtype=torch.float32, device=_META)
    return collective(recorder, func, args, kwargs)


def all_gather(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the outputs of c10d's all-gathers; known values of this rank are those of every rank, as sizes of batches are.

    Arguments: outputs or a list of them, inputs or one of them, ...
    """
    outputs, inputs = tensors_of(args[:1]), tensors_of(args[1:2])
    known = [recorder.values.get(one) for one in inputs]
    out = collective(recorder, func, args, kwargs)
    for number, output in enumerate(outputs):
        real = known[number * len(known) // len(outputs)]
        if real is not None and real.numel() and output.numel() <= LARGEST_ASSUMED:
            every = real.reshape(1, -1).expand(output.numel() // real.numel(), -1)
            recorder.values.assume(output, every.reshape(output.shape), ALIKE)
    return out


def all_to_all(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return alltoall_base_'s work, with the output's values if the input's are known and all parts have the same size.

    Every other rank is assumed to send what this rank would send in its place. Ranks exchange their token counts this way.
    Arguments: output, input, group, output_splits, input_splits, ...
    """
    output, values, boxed, *splits = args[:5]
    known = None if any(splits) else recorder.values.get(values)
    out = collective(recorder, func, args, kwargs)
    if known is None:
        return out
    from torch.distributed import ProcessGroup

    group = ProcessGroup.unbox(boxed)
    own = known.chunk(group.size())[group.rank()]
    received = own.repeat(group.size(), *[1] * (own.dim() - 1))
    text = ALIKE if known.dtype.is_floating_point else ROUTES
    if recorder.crowded and text == ROUTES:
        received, text = _crowded(received, int(known.sum()), group), CROWDED
    recorder.values.assume(output, received.view(output.shape), text)
    return out


def _crowded(received: torch.Tensor, total: int, group: Any) -> torch.Tensor:
    """Return the counts if each other rank sends all of its `total`, spread evenly over the counts of its part."""
    parts = received.clone().view(group.size(), -1)
    width = parts.shape[1]
    every = torch.tensor([total // width + (place < total % width) for place in range(width)], device="cpu")
    parts[torch.arange(group.size(), device="cpu") != group.rank()] = every.to(parts.dtype)
    return parts


def all_reduce(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Return a contiguous copy, reduced in place, for _c10d_functional.all_reduce."""
    with recorder:
        return args[0].clone(memory_format=torch.contiguous_format)


def in_place(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the input, for _c10d_functional.all_reduce_ and similar operators."""
    return args[0]


def to_be_awaited(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the result of an asynchronous collective, and hold inputs and outputs until the wait.

    Operators: _c10d_functional.reduce_scatter_tensor and similar ones.
    """
    out = func(*args, **kwargs)
    recorder.values.follow(func, args, kwargs, out)
    outputs = tensors_of([out])
    for tensor in outputs:
        recorder.unawaited[torch._C._storage_address(tensor)] = (*tensors_of(args[:1]), *outputs)
    return out


def wait(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the argument of wait_tensor or wait_tensors, and release the tensors that NCCL held."""
    for tensor in tensors_of(args[:1]):
        recorder.unawaited.pop(torch._C._storage_address(tensor), None)
    return args[0]


def wrapped(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Return the wrapped tensor itself for _wrap_tensor_autograd, as on a device; its meta kernel makes a new tensor."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(args[0])


def told(func: Any, args: tuple, out: Any) -> tuple[str, int]:
    """Return a collective's group of ranks, and the bytes of its whole tensor.

    The group has the name of its dimension of a mesh ("world" for all ranks). The whole tensor is the larger of input and
    output.
    """
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import _resolve_process_group

    names = [argument.name for argument in func._schema.arguments]
    if "group_name" in names:
        group = _resolve_process_group(args[names.index("group_name")])
    else:
        group = ProcessGroup.unbox(args[names.index("process_group")])
    sizes = (
        sum(tensor.nbytes for tensor in tensors_of(value if isinstance(value, list) else [value]))
        for value in (*args, out)
    )
    name = group.group_desc.removeprefix("mesh_")
    return "world" if name == "default_pg" else name, max(sizes)


_C10D = (
    "broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
    "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_",
    "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier", "monitored_barrier_",
    "gather_into_tensor_", "check_for_nan",
)  # fmt: skip
_EXCHANGES = ("send", "recv_", "recv_any_source_")
_IN_PLACE = ("all_reduce_", "all_reduce_coalesced_", "broadcast_")
_AWAITED = ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all_single")

_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL = "all-reduce", "all-gather", "reduce-scatter", "all-to-all"

# By name: PyTorch may be built without torch.distributed.
KINDS = {
    **dict.fromkeys(("c10d.broadcast_.default", "_c10d_functional.broadcast.default"), "broadcast"),
    **{f"c10d.{name}.default": _ALL_REDUCE for name in ("allreduce_", "allreduce_coalesced_")},
    **{
        f"_c10d_functional.{name}.default": _ALL_REDUCE
        for name in ("all_reduce", "all_reduce_", "all_reduce_coalesced")
    },
    **{f"c10d.{name}.default": _ALL_GATHER for name in _C10D if "allgather" in name},
    **{f"_c10d_functional.all_gather_into_tensor{end}.default": _ALL_GATHER for end in ("", "_out", "_coalesced")},
    **{f"c10d.{name}.default": _REDUCE_SCATTER for name in _C10D if "reduce_scatter" in name},
    **{f"_c10d_functional.reduce_scatter_tensor{end}.default": _REDUCE_SCATTER for end in ("", "_out", "_coalesced")},
    **dict.fromkeys(("c10d.alltoall_.default", "c10d.alltoall_base_.default"), _ALL_TO_ALL),
    "_c10d_functional.all_to_all_single.default": _ALL_TO_ALL,
    "c10d.reduce_.default": "reduce",
    "c10d.gather_.default": "gather",
    "c10d.scatter_.default": "scatter",
    "c10d.send.default": "send",
    "c10d.recv_.default": "receive",
}
HANDLERS = {
    **{f"c10d.{name}.default": collective for name in _C10D},
    **{f"c10d.{name}.default": exchange for name in _EXCHANGES},
    **{f"c10d.{name}.default": all_gather for name in ("allgather_", "_allgather_base_")},
    "c10d.alltoall_base_.default": all_to_all,
    "c10d.barrier.default": barrier,
    **{f"_c10d_functional.{name}.default": in_place for name in _IN_PLACE},
    **{f"_c10d_functional.{name}.default": to_be_awaited for name in _AWAITED},
    **{f"_c10d_functional.{name}.default": wait for name in ("wait_tensor", "wait_tensors")},
    "_c10d_functional.all_reduce.default": all_reduce,
    "_c10d_functional._wrap_tensor_autograd.default": wrapped,
}

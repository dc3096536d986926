"""Collectives of torch.distributed: nobody answers, and what they allocate is what is noted.

The operators of c10d have no meta kernels; each returns the tensors that it was given and a work that is done. The functional ones
(torch/distributed/_functional_collectives.py) have kernels that allocate on meta what a device does not. Read in PyTorch 2.11 and
2.15: torch/csrc/distributed/c10d/Ops.cpp, Functional.cpp.

NCCL holds what a functional reduce-scatter or all-to-all was given until it is waited for (`stashed_for_allocator_safety_` in
ProcessGroupNCCL.cpp, `register_work` in Functional.cpp).

*Known limitation*: nothing holds what another asynchronous collective was given. If all-gathers do, a rank of tensor and context
parallel reserves 2 MiB more than over the null driver, for a reason that is not known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future

from sizer.tracing.values.handler import HandlerContext
from sizer.tracing.values.known import tensors_of

_META = torch.device("meta")  # made outside of a trace, which tells apart devices that code names so
ALIKE = "every rank was taken to send what this one would send in its place"
CROWDED = "every other rank was taken to send all that it has to this one"
ROUTES = "other ranks were taken to send as much as this one would in their place; the range ends where they send all they have"


def _done(tensors: list[torch.Tensor]) -> Any:
    """A work that is done, with the tensors as its result: the fake process group's own has no future, which DDP asks for."""
    from torch._C._distributed_c10d import _create_work_from_future

    future: Future = Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


def collective(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """c10d's operators (outputs first): the outputs as they are, and the work. Each rank has broadcast what all of them have."""
    outputs = tensors_of(args[:1])
    for tensor in () if func is torch.ops.c10d.broadcast_.default else outputs:
        recorder.values.forget(tensor)
    returned = len(func._schema.returns)
    return (args[0], _done(outputs)) if returned == 2 else _done(outputs) if returned else None


def exchange(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """c10d's send(tensors, ...) and recv_(tensors, ...): a work that is done, and holds none of them, as no device's does."""
    for tensor in () if func is torch.ops.c10d.send.default else tensors_of(args[:1]):
        recorder.values.forget(tensor)
    return _done([])


def barrier(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """c10d.barrier(tensor, group, ...): a work that is done. From 2.15 on the first barrier of a group over NCCL makes a buffer of
    one float, which the group keeps (ProcessGroupNCCL2, seen in PyTorch's memory history over the null NCCL)."""
    from torch.distributed import ProcessGroup

    name = ProcessGroup.unbox(args[1]).group_name
    if recorder.device.kind == "cuda" and recorder.device.version >= (2, 15) and name not in recorder.barriers:
        with recorder:
            recorder.barriers[name] = torch.zeros(1, dtype=torch.float32, device=_META)
    return collective(recorder, func, args, kwargs)


def all_to_all(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """c10d.alltoall_base_(output, input, group, output_splits, input_splits, ...): of each other rank what this one would send in
    its place, where that is known and all parts are as large. By such counts ranks tell each other how many tokens come."""
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
    """Counts where each other rank sends all that it has, `total`, spread evenly over the counts of its part."""
    parts = received.clone().view(group.size(), -1)
    width = parts.shape[1]
    every = torch.tensor([total // width + (place < total % width) for place in range(width)], device="cpu")
    parts[torch.arange(group.size(), device="cpu") != group.rank()] = every.to(parts.dtype)
    return parts


def all_reduce(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """_c10d_functional.all_reduce(input, op, group): a contiguous copy, reduced in place."""
    with recorder:
        return args[0].clone(memory_format=torch.contiguous_format)


def in_place(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """_c10d_functional.all_reduce_(input, op, group) and its like: what they were given."""
    return args[0]


def to_be_awaited(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """_c10d_functional.reduce_scatter_tensor(input, ...) and its like: inputs and outputs are held until they are waited for."""
    out = func(*args, **kwargs)
    recorder.values.follow(func, args, kwargs, out)
    outputs = tensors_of([out])
    for tensor in outputs:
        recorder.unawaited[torch._C._storage_address(tensor)] = (*tensors_of(args[:1]), *outputs)
    return out


def wait(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """_c10d_functional.wait_tensor(tensor) and wait_tensors(tensors): what they were given; what NCCL held is released."""
    for tensor in tensors_of(args[:1]):
        recorder.unawaited.pop(torch._C._storage_address(tensor), None)
    return args[0]


def wrapped(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """_c10d_functional._wrap_tensor_autograd(input): on a device the tensor itself, wrapped; its meta kernel makes one."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(args[0])


def told(func: Any, args: tuple, out: Any) -> tuple[str, int]:
    """Over which group of ranks a collective is, by the name of its dimension of a mesh ("world" for all of them), and the bytes of
    its whole tensor: the larger of what goes in and what comes out."""
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
    "c10d.alltoall_base_.default": all_to_all,
    "c10d.barrier.default": barrier,
    **{f"_c10d_functional.{name}.default": in_place for name in _IN_PLACE},
    **{f"_c10d_functional.{name}.default": to_be_awaited for name in _AWAITED},
    **{f"_c10d_functional.{name}.default": wait for name in ("wait_tensor", "wait_tensors")},
    "_c10d_functional.all_reduce.default": all_reduce,
    "_c10d_functional._wrap_tensor_autograd.default": wrapped,
}

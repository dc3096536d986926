"""A rank's forward and backward pass: the inputs of its model, and the PyTorch contexts around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sizer.architecture.blueprint import Example
from sizer.distributed.context_parallel import shared_sequences, whole_sequences
from sizer.distributed.parallel_plan import Plan

Pass = Callable[[], AbstractContextManager[None]]


def rank_example(example: Example, plan: Plan | None) -> Example:
    """Return the inputs of a batch for a rank's model.

    With sequence parallel they include position ids, because transformers would derive these from embeddings that are sharded.
    """
    if plan is None:
        return example
    if plan.cp > 1:
        return whole_sequences(example)
    if not plan.sp:
        return example
    positions = torch.arange(example.kwargs["input_ids"].shape[1])[None]
    return replace(example, kwargs=example.kwargs | {"position_ids": positions})


def rank_pass(plan: Plan | None, example: Example, kind: str) -> Pass:
    """Return a function that makes the context of a forward and backward pass over a batch, on a rank's device of `kind`."""
    if plan is None or not (plan.lp or plan.cp > 1):
        return nullcontext
    mesh = _sequence_mesh(plan, kind) if plan.cp > 1 else None

    @contextmanager
    def one_pass() -> Iterator[None]:
        from torch.distributed.tensor.parallel import loss_parallel

        with ExitStack() as stack:
            if plan.lp:
                stack.enter_context(_always_left(loss_parallel()))
            if mesh is not None:
                stack.enter_context(_always_left(shared_sequences(example, mesh)))
            yield

    return one_pass


@contextmanager
def _always_left(context: AbstractContextManager[None]) -> Iterator[None]:
    """Leave a context in order even if an error occurs.

    Otherwise PyTorch's loss_parallel, and in 2.11 its context_parallel, would leave their replaced functions behind.
    """
    context.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)


def _sequence_mesh(plan: Plan, kind: str) -> DeviceMesh:
    """Return the mesh of the ranks that share this rank's sequences."""
    sizes = plan.ranks * plan.replicate, plan.cp, plan.tp
    return dist.init_device_mesh(kind, sizes, mesh_dim_names=("data", "cp", "tp"))["cp"]

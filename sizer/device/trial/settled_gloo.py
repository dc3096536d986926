"""A gloo process group whose collectives are synchronous and release their tensors before returning.

PyTorch's gloo works in a separate thread, which references a collective's tensors until shortly after the waiter continues. The
last reference frees them, and torch.profiler does not see tensors freed by that thread. The measured bytes would be too high,
by different tensors each time. Source: runLoop of torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, PyTorch 2.11 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NAME = "settled_gloo"
_LOOPBACK = "127.0.0.1"
_COLLECTIVES = (
    "allgather", "_allgather_base", "all_gather_single", "all_gather_single_coalesced", "allgather_into_tensor_coalesced",
    "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "barrier", "broadcast", "gather",
    "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter",
)  # fmt: skip


class SettledGloo(dist.ProcessGroup):
    """A gloo process group on this computer."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = timeout
        options._threads = 1
        backend = dist.ProcessGroupGloo(store, rank, size, options)
        self._group = dist.ProcessGroup(store, rank, size)
        self._group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        self._nothing = torch.zeros(1)

    def getBackendName(self) -> str:
        """Return the name under which it is registered."""
        return NAME

    @property
    def group_name(self) -> str:
        """Name by which functional collectives find it."""
        return dist._get_process_group_name(self)

    def _get_backend(self, device: torch.device) -> dist.Backend:
        return self._group._get_backend(device)  # since PyTorch 2.15 `batch_isend_irecv` checks whether it coalesces

    def settle(self) -> None:
        """Return when gloo's one thread has taken up a second collective: it holds nothing of the first any more."""
        self._group.allreduce([self._nothing]).wait()


def _settled(name: str) -> Callable[..., dist.Work]:
    def collective(group: SettledGloo, *args: Any, **kwargs: Any) -> dist.Work:
        work = getattr(group._group, name)(*args, **kwargs)
        work.wait()
        group.settle()
        return work

    return collective


def _exchanged(name: str) -> Callable[..., dist.Work]:
    """Return a method that exchanges messages of two ranks without gloo's thread.

    The waiting thread does the work (SendWork, RecvWork of ProcessGroupGloo.hpp).
    """

    def exchange(group: SettledGloo, *args: Any, **kwargs: Any) -> dist.Work:
        return getattr(group._group, name)(*args, **kwargs)

    return exchange


for _name in ("send", "recv"):
    setattr(SettledGloo, _name, _exchanged(_name))
for _name in _COLLECTIVES:  # names differ by version
    if hasattr(dist.ProcessGroup, _name):
        setattr(SettledGloo, _name, _settled(_name))


def register() -> None:
    """Have torch.distributed know the backend by its name, for tensors on the CPU."""

    def create(options: Any, _: Any = None) -> SettledGloo:
        return SettledGloo(options.store, options.group_rank, options.group_size, options.timeout)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])

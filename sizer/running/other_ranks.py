"""Answer for the other ranks of a world: one process runs one rank. Imports torch.

PyTorch's own ProcessGroupNCCL runs over the null NCCL (driver/nccl.c). A store answers keys that other ranks would set. gloo is
replaced by PyTorch's fake process group. Every other rank is assumed to run the same operations and to hold the same data as
this rank.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import FakeProcessGroup

from sizer.base.errors import TraceError

_ID_BYTES = 128  # of an NCCL identifier, which ranks read from the store


class UniformStore(dist.Store):
    """A store in which all ranks have set the same values as this rank."""

    def __init__(self, world: int) -> None:
        """Answer for `world` ranks."""
        super().__init__()
        self._held: dict[str, bytes] = {}
        self._world, self._lock = world, threading.RLock()

    def set(self, key: str, value: str | bytes) -> None:
        """Keep a value."""
        self._held[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return a value; for a key of another rank, bytes of the length that NCCL's identifiers have."""
        return self._held.get(key, b"\x07" * _ID_BYTES)

    def add(self, key: str, amount: int) -> int:
        """Add the amount once for every rank."""
        with self._lock:
            total = int(self._held.get(key, b"0")) + amount * self._world
            self._held[key] = str(total).encode()
            return total

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return at once."""

    def check(self, keys: list[str]) -> bool:
        """Return True if this rank has set all keys."""
        return all(key in self._held for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value."""
        self.set(key, desired)
        return self.get(key)

    def delete_key(self, key: str) -> bool:
        """Return True if there was a value."""
        return self._held.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._held)

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        """Keep several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return True, because the store has multi_get."""
        return True

    def clone(self) -> UniformStore:
        """Return itself."""
        return self


class _Joined:
    """Stand in for torch.multiprocessing.ProcessContext: the processes have ended."""

    def join(self, *args: Any, **kwargs: Any) -> bool:
        return True


@contextmanager
def one_rank(world: int, rank: int, *, all_traced: bool = False) -> Iterator[None]:
    """Run only `rank` in this process if a script starts a process for each rank, within the context.

    Scripts start them with torch.multiprocessing.

    A run of one rank cannot join a larger world: the error names `--world`. With `all_traced` it cannot start several
    processes.
    """
    own = torch.multiprocessing.start_processes
    meet = c10d.rendezvous

    def start_processes(
        fn: Callable[..., object], args: tuple = (), nprocs: int = 1, join: bool = True, *more: Any, **kwargs: Any
    ) -> object:
        if nprocs > world and (world > 1 or all_traced):
            raise _too_small(f"the script starts {nprocs} processes", world, nprocs)
        if nprocs > world:  # probably not ranks: the rendezvous has another world size
            return own(fn, args, nprocs, join, *more, **kwargs)
        fn(rank % nprocs, *args)
        return None if join else _Joined()

    def rendezvous(url: str, own_rank: int = -1, ranks: int = -1, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
        joined = int(os.environ.get("WORLD_SIZE", 1)) if ranks == -1 else ranks
        if joined > world:
            raise _too_small(f"the script joins a world of {joined} ranks", world, joined)
        if joined == 1 and (own_rank != -1 or "RANK" in os.environ):  # no port that another run may use
            return iter([(dist.HashStore(), 0, 1)])
        return meet(url, own_rank, ranks, **kwargs)

    with ExitStack() as stack:
        for place in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
            stack.enter_context(mock.patch.object(place, "start_processes", start_processes))
        if world == 1:
            stack.enter_context(mock.patch.object(c10d, "rendezvous", rendezvous))
            stack.enter_context(_parameters_unread())
        yield


def _parameters_unread() -> Any:
    """Skip DDP's comparison of the ranks' parameters: it reads sizes that a kernel would have copied."""
    return mock.patch.object(dist, "_verify_params_across_processes", lambda *args, **kwargs: None)


def _too_small(what: str, world: int, needed: int) -> TraceError:
    return TraceError(what, given=f"a run of {world}", allowed=f"one rank of {needed}", todo=f"run it with --world {needed}")


def install(world: int, rank: int, local: int, driver: ctypes.CDLL) -> None:
    """Make this process a rank as torchrun starts it, and answer for the other ranks.

    Args:
        world: Number of ranks.
        rank: The rank of this process.
        local: Number of ranks of one host.
        driver: The null driver's library.
    """
    numbers = {
        "WORLD_SIZE": world,
        "RANK": rank,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": min(world, local),
        "GROUP_RANK": rank // local,
        "GROUP_WORLD_SIZE": -(-world // local),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
    }
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "dry-run"})
    # PyTorch's threads that watch other ranks would wait for them.
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"):
        os.environ[f"TORCH_NCCL_{name}"] = "0"
    store = UniformStore(world)

    def rendezvous(url: str, own: int = -1, ranks: int = -1, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
        if own not in (-1, rank):  # a script started a process for each rank; this is not the requested rank
            os._exit(0)
        while True:
            yield store, rank, world

    c10d.rendezvous = rendezvous
    _parameters_unread().start()
    c10d._create_gloo_process_group = lambda common, backend=None: _fake(common.group_rank, common.group_size)
    c10d.ProcessGroupGloo = type("ProcessGroupGloo", (), {"__new__": staticmethod(_fake_gloo)})
    for name in ("_create_nccl2_process_group", "_create_nccl_process_group", "_create_nccl_lazy_process_group"):
        if hasattr(c10d, name):
            setattr(c10d, name, _with_split(getattr(c10d, name), driver))
    split = dist.ProcessGroup.split_group

    def split_group(group: Any, ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        driver.null_next_split(len(ranks), ranks.index(group.rank()) if group.rank() in ranks else 0)
        return split(group, ranks, *args, **kwargs)

    dist.ProcessGroup.split_group = split_group


def _with_split(create: Callable[..., Any], driver: ctypes.CDLL) -> Callable[..., Any]:
    """Tell the null NCCL the size of the group that is created, which it may split from another one."""

    def created(common: Any, backend: Any = None) -> Any:
        driver.null_next_split(common.group_size, common.group_rank)
        return create(common, backend)

    return created


def _fake(rank: int, world: int) -> Any:
    options = FakeProcessGroup.Options()
    if hasattr(options, "simulate_uniform_ranks"):  # from PyTorch 2.12 on
        options.simulate_uniform_ranks = True
    return FakeProcessGroup._create_internal(rank, world, options)


def _fake_gloo(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `ProcessGroupGloo(store, rank, size, ...)`."""
    rank, world = [value for value in (*args, *kwargs.values()) if isinstance(value, int)][:2]
    return _fake(rank, world)

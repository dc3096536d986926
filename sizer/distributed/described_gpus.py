"""torch.cuda as it answers on a machine with GPUs, on a machine without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock
from uuid import UUID

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.data._utils import pin_memory as pinning
from torch.utils.data._utils import worker as workers

from sizer.base.errors import TraceError
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.hardware import HARDWARE, Hardware
from sizer.catalogue.parallel import PER_HOST

_RESETS = (
    "reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
    "set_per_process_memory_fraction", "ipc_collect",
)  # fmt: skip
_OF_POOLS = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
    "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
_OF_ALLOCATOR = ("oversize_allocations", "oversize_segments")
_COUNTS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)
_REPORTED = {kind: torch.device(kind) for kind in ("cuda", "mps")}  # here, since a trace makes them of meta
_STATE_BYTES = 16  # of a GPU's generator
_LOOP = workers._worker_loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Describe the GPUs that code can query: compute capability and, if known, memory in bytes, name and multiprocessors."""

    capability: tuple[int, int]
    total_bytes: int | None = None
    name: str | None = None
    processors: int | None = None
    hardware: Hardware | None = None


def accelerator_of(gpu: Gpu) -> Accelerator:
    """Return the answers of torch.cuda for a CUDA GPU."""
    assert gpu.capability is not None  # a device of CUDA's has one
    hardware = HARDWARE.get(gpu.key)
    processors = None if hardware is None else hardware.processors
    return Accelerator(
        capability=gpu.capability, total_bytes=gpu.total_bytes, name=gpu.name, processors=processors, hardware=hardware
    )


# For every capability from 7.0 on (CUDA C++ Programming Guide 12.9, "Technical Specifications per Compute Capability").
_REGISTERS, _BLOCK_THREADS, _WARP, _BLOCK_SHARED = 65536, 1024, 32, 48 * 1024
# A separate device on no known bus; its UUID is zero.
_OF_ONE: dict[str, Any] = {
    "uuid": UUID(int=0), "pci_bus_id": 0, "pci_device_id": 0, "pci_domain_id": 0, "is_integrated": 0, "is_multi_gpu_board": 0,
}  # fmt: skip


def properties_of(device: Hardware) -> SimpleNamespace:
    """Return the attributes that `torch.cuda.get_device_properties` has, memory in bytes."""
    major, minor = device.capability
    return SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        total_memory=device.gpu.total_bytes,
        multi_processor_count=device.processors,
        max_threads_per_multi_processor=device.threads,
        max_threads_per_block=_BLOCK_THREADS,
        warp_size=_WARP,
        regs_per_multiprocessor=_REGISTERS,
        shared_memory_per_block=_BLOCK_SHARED,
        shared_memory_per_block_optin=(device.shared_kib - device.reserved_kib) * 1024,
        shared_memory_per_multiprocessor=device.shared_kib * 1024,
        L2_cache_size=device.l2_kib * 1024,
        clock_rate=device.clock_khz,
        memory_clock_rate=device.memory_khz,
        gcnArchName=device.name,
        **_OF_ONE,
    )


class Generator(torch.Generator):
    """A CPU generator in place of a GPU's. Tensors on meta have no values to draw.

    The state of a GPU's is its seed and its offset, 16 bytes (torch/csrc/cuda, CUDAGeneratorImpl.cpp, 2.15).
    """

    _device: torch.device | None = None
    _offset = 0

    def __new__(cls, device: Any = "cpu") -> Generator:
        """Make one of the CPU for any accelerator ("cuda", "cuda:0", 0)."""
        kind = "cuda" if isinstance(device, int) else str(device).partition(":")[0]
        made = super().__new__(cls, "cpu" if kind in ("cuda", "mps", "meta") else device)
        made._device = _REPORTED.get(kind)
        return made

    @property
    def device(self) -> torch.device:
        """Return the device for which it was made: libraries draw there."""
        return super().device if self._device is None else self._device

    def get_state(self) -> torch.Tensor:
        """Return the seed and the offset."""
        if self._device is None:
            return super().get_state()
        numbers = (self.initial_seed().to_bytes(8, "little"), self._offset.to_bytes(8, "little"))
        return torch.tensor(list(b"".join(numbers)), dtype=torch.uint8, device="cpu")

    def set_state(self, new_state: torch.Tensor) -> Generator:
        """Set the seed and the offset."""
        if self._device is None:
            return super().set_state(new_state)
        if new_state.dtype != torch.uint8 or new_state.numel() != _STATE_BYTES:
            raise TypeError(f"RNG state must be a torch.ByteTensor of {_STATE_BYTES} bytes")
        numbers = bytes(new_state.tolist())
        self.manual_seed(int.from_bytes(numbers[:8], "little"))
        self._offset = int.from_bytes(numbers[8:], "little")
        return self

    def get_offset(self) -> int:
        """Return the offset."""
        return self._offset

    def set_offset(self, offset: int) -> Generator:
        """Set the offset."""
        self._offset = offset
        return self

    def clone_state(self) -> Generator:
        """Return another generator in this state."""
        return type(self)(self._device or "cpu").set_state(self.get_state())

    def graphsafe_get_state(self) -> Generator:
        """Return a generator that stands for this one's state."""
        return self.clone_state()

    def graphsafe_set_state(self, state: torch.Generator) -> Generator:
        """Take the state of another generator."""
        return self.set_state(state.get_state())


def statistics(device: Any = None) -> dict[str, int]:
    """Return torch.cuda.memory_stats of an allocator that was never used (`memoryStats` of torch/csrc/cuda/Module.cpp, 2.15)."""
    names = [f"{name}.{pool}" for name in _OF_POOLS for pool in ("all", "small_pool", "large_pool")]
    kinds = [
        f"{name}.{kind}" for name in (*names, *_OF_ALLOCATOR) for kind in ("current", "peak", "allocated", "freed")
    ]
    return dict.fromkeys((*kinds, *_COUNTS), 0)


class RawMemory:
    """Memory that code requests directly from the allocator: blocks by address; addresses are arbitrary numbers."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.Tensor] = {}
        self._numbers = count(1)

    def allocate(self, size: int, device: Any = None, stream: Any = None) -> int:
        """Stand in for torch.cuda.caching_allocator_alloc."""
        address = 512 * next(self._numbers)
        self._blocks[address] = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda"))
        return address

    def delete(self, address: int) -> None:
        """Stand in for torch.cuda.caching_allocator_delete."""
        del self._blocks[address]


def run_on_one(module: nn.DataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """Run nn.DataParallel as PyTorch does with a single device: inputs of the host go there. Raises TraceError for several."""
    if len(module.device_ids) != 1:
        raise TraceError(
            "nn.DataParallel with several devices is not traced",
            given=f"{len(module.device_ids)} devices",
            allowed="one device",
            todo="give device_ids=[0], or use DistributedDataParallel",
        )
    inputs, kwargs = tree_map(
        lambda leaf: leaf.to("cuda") if isinstance(leaf, torch.Tensor) else leaf, (inputs, kwargs)
    )
    return module.module(*inputs, **kwargs)


def work_outside(*args: Any) -> None:
    """Run a DataLoader's worker loop in its own process, with the trace's modes removed."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    with _disable_current_modes():
        _LOOP(*args)


@contextmanager
def devices_answer(gpu: Accelerator, local_rank: int = 0, *, count: int = PER_HOST) -> Iterator[None]:
    """Make torch.cuda and torch.accelerator answer for a host with `count` GPUs of a kind, within the context.

    Streams are the trace's own. The allocator's statistics are 0, because a trace has no allocator until it is replayed.
    `torch.meta` is torch.cuda: PyTorch looks it up as the device module of a mesh over meta tensors (`_get_device_handle` of
    torch/distributed/device_mesh.py).
    """
    device = torch.device("cuda", local_rank)

    def nothing() -> Callable[..., None]:
        return lambda *args, **kwargs: None  # one function per name: torch._dynamo requires it

    major, minor = gpu.capability
    figures = {
        "major": major,
        "minor": minor,
        "name": gpu.name,
        "total_memory": gpu.total_bytes,
        "multi_processor_count": gpu.processors,
    }
    properties = SimpleNamespace() if gpu.hardware is None else properties_of(gpu.hardware)
    memory = RawMemory()

    def properties_by_number(device: Any = None) -> SimpleNamespace:
        if isinstance(device, int) and not 0 <= device < count:
            raise AssertionError("Invalid device id")
        return properties

    def set_device(device: Any) -> None:
        if isinstance(device, int) and device >= count:
            raise RuntimeError("CUDA error: invalid device ordinal")

    def index_of(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
        """Stand in for torch.cuda._utils._get_device_index, which would query the name that a trace gives a device."""
        if isinstance(device, int):
            return device
        return -1 if allow_cpu and str(device) == "cpu" else local_rank

    vars(properties).update((name, value) for name, value in figures.items() if value is not None)
    of_accelerators = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "synchronize": nothing(),
        **dict.fromkeys(("current_device_index", "current_device_idx"), lambda: local_rank),
        **dict.fromkeys(("set_device_index", "set_device_idx"), set_device),
        "get_memory_info": lambda device=None: torch.cuda.mem_get_info(device),
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_stream": lambda device=None: torch.cuda.current_stream(device),
    }
    of_cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": nothing(),
        "_lazy_init": nothing(),
        "device_count": lambda: count,
        "current_device": lambda: local_rank,
        "set_device": set_device,
        "can_device_access_peer": lambda device, peer: device != peer,
        "_get_device_index": index_of,
        "_sleep": nothing(),
        "default_generators": tuple(Generator("cuda") for _ in range(count)),
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "caching_allocator_alloc": memory.allocate,
        "caching_allocator_delete": memory.delete,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": properties_by_number,
        "get_device_capability": lambda device=None: gpu.capability,
        "is_bf16_supported": lambda *args, **kwargs: gpu.capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: torch.zeros(_STATE_BYTES, dtype=torch.uint8, device="cpu"),
        "set_rng_state": nothing(),
        "mem_get_info": lambda device=None: (gpu.total_bytes, gpu.total_bytes),
        "memory_stats": statistics,
        "memory_summary": lambda *args, **kwargs: "",
        "memory_snapshot": lambda *args, **kwargs: [],
    }
    of_cuda |= {name: nothing() for name in _RESETS}
    # functions that `torch.cuda.device` and `torch.accelerator.device_index` call as contexts
    of_cuda |= {"_exchange_device": lambda index: local_rank, "_maybe_exchange_device": lambda index: local_rank}
    of_bindings = {
        "_get_accelerator": lambda *args: device,
        "_accelerator_exchangeDevice": lambda index: local_rank,
        "_accelerator_maybeExchangeDevice": lambda index: local_rank,
    }
    with ExitStack() as stack:
        # code also calls the modules in which torch.cuda's functions are defined
        defining: list[tuple[Any, dict[str, Any]]] = [
            (module, {name: answer for name, answer in of_cuda.items() if vars(module).get(name) is getattr(torch.cuda, name)})
            for module in (torch.cuda.random, torch.cuda.memory, torch.cuda._utils)
        ]
        places = [*defining, (torch.cuda, of_cuda), (torch.accelerator, of_accelerators), (torch._C, of_bindings)]
        for module, answers in places:
            for name, answer in answers.items():
                stack.enter_context(mock.patch.object(module, name, answer))
        # torch.backends.cuda.cufft_plan_cache without a plan; the capacity is that of cuda/CuFFTPlanCache.h
        stack.enter_context(mock.patch.multiple(torch.backends.cuda.cuFFTPlanCache, size=0, max_size=4096, clear=nothing()))
        stack.enter_context(mock.patch.object(torch, "meta", torch.cuda, create=True))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.object(nn.DataParallel, "forward", run_on_one))
        stack.enter_context(mock.patch.object(workers, "_worker_loop", work_outside))
        # a DataLoader pins in another thread, where the trace's modes are inactive
        stack.enter_context(mock.patch.object(pinning, "pin_memory", lambda data, device=None: data))
        yield

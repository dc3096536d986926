"""Meta tensors that represent host tensors: memory of FSDP2's CPUOffloadPolicy, and its peak.

FSDP2 leaves parameters on meta instead of moving them to the host (torch/distributed/fsdp/_fully_shard/_fsdp_param.py,
`_init_sharded_param`). Read in PyTorch 2.11 and 2.15.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from sizer.architecture.inner_tensors import parts_of
from sizer.tracing.values.known import is_meta, storage_number, tensors_of

_LARGEST_STORAGE = 2**40  # bytes
# Operators that accept tensors of the device and of the host together.
_COPIES = frozenset(("copy_", "_foreach_copy_", "set_", "_has_compatible_shallow_copy_type"))
_INDEXED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))  # indices may be on the host
_OF_BOTH = _COPIES | _INDEXED
# Operators with an argument that is always on the host: lengths, batch sizes, seeds, scalars of foreach.
_WITH_LENGTHS = (
    "_pack_padded", "_pad_packed", "_ctc_loss", "_cudnn_ctc", "_use_cudnn_ctc", "ctc_loss", "tensor_split", "_foreach_addc",
    "_nested", "_jagged", "_fused_ad", "_fused_sgd",
)  # fmt: skip
_APART = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
_is_cpu = torch._C.TensorBase.is_cpu.__get__


class Addresses:
    """Addresses of storages on meta, which code compares. The setup and the later steps use the same addresses."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._counted = count(1)

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """Return an address that no other storage has had; distances between addresses exceed any storage's bytes."""
        return self._numbers.setdefault(storage, next(self._counted)) * _LARGEST_STORAGE


class HostMemory:
    """Meta storages that represent memory of the host. `peak_bytes` and `most_pinned_bytes` are the largest totals so far.

    Pinned memory is allocated in powers of two (ATen/core/CachingHostAllocator.h, PyTorch 2.11 and 2.15: `PowerOf2Ceil`).
    """

    def __init__(self) -> None:
        self.addresses = Addresses()
        self.gpu: int | None = None  # the number of the GPU that code has named
        self.tells = False  # whether a user's code sees devices as on a real host
        self.is_default_elsewhere = False  # tensors that name no device are on an accelerator
        self.is_default_a_mode = False  # because of torch.set_default_device, not of a default type of tensors
        self.peak_bytes = 0
        self.copied_bytes = 0  # of tensors that were copied from the host to the device
        self.making: bool | None = (
            None  # whether new tensors are on the host; None if that depends on their inputs
        )
        self.offloads = False  # whether FSDP2 has parameters here
        self.setting_up = False  # whether tensors without a device are on the host: while user code sets up
        self.pins = False  # whether the tensor under construction will be pinned
        self._pinning = False  # whether new host tensors are pinned
        self._pinned: dict[int, weakref.ref] = {}
        self.most_pinned_bytes = self._pinned_bytes = 0
        self._held_bytes = 0
        self._storages: dict[int, weakref.ref] = {}

    def __bool__(self) -> bool:
        return bool(self._storages)

    def __contains__(self, tensor: Tensor) -> bool:
        if not self._storages:
            return False
        if type(tensor) is not Tensor and tensor.layout is torch.jagged:
            tensor = tensor._values  # a nested tensor has no storage of its own
        return storage_number(tensor) in self._storages

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return True if this is one of its storages."""
        return bool(self._storages) and storage._cdata in self._storages

    def makes(self, arguments: tuple) -> bool:
        """Return True if the results of an operator with these arguments are on the host."""
        if self.making is not None:
            return self.making
        if not self._storages:
            return False
        on_meta = [tensor for tensor in tensors_of(arguments) if is_meta(tensor)]
        return bool(on_meta) and all(tensor in self for tensor in on_meta)

    def check(self, operator: str, inputs: list[Tensor]) -> None:
        """Raise RuntimeError with PyTorch's message if an operator ("aten.mm.default") mixes host and device tensors.

        A host tensor without dimensions counts as a number; some operators copy, or find indices on the host
        (native/TensorIterator.cpp, native/TensorAdvancedIndexing.cpp). If FSDP2 offloads, it separates the tensors itself.
        """
        namespace, name, *_ = operator.split(".")
        if self.making is not None or self.offloads or name in _COPIES or (name in _INDEXED and not self.tells):
            return
        if self.tells and (namespace != "aten" or name.startswith(_WITH_LENGTHS) or "attention_backward" in name):
            return
        places = [self._place(tensor) for tensor in inputs]
        if name in _INDEXED and False in places[:1] and True in places:  # indices of the device, in a tensor of the host
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        compared = places if name not in _INDEXED else places[:: len(places) - 1] if "put" in name else []  # including the values
        if len({*compared} - {None}) == 2:
            raise RuntimeError(_APART)

    def _place(self, tensor: Tensor) -> bool | None:
        """Return True for a tensor of the device, False for one of the host, None for a number."""
        if is_meta(tensor):
            on_host = tensor in self
            counts = (tensor.dim() or (self.tells and not on_host)) and not torch._is_zerotensor(tensor)
            return (not on_host) if counts else None
        return False if self.tells and _is_cpu(tensor) and tensor.dim() else None

    def mixes(self, operator: str, inputs: list[Tensor]) -> bool:
        """Return True if an operator computes with host tensors, some with values and others on meta."""
        with_values = any(tensor.is_cpu and tensor.dim() for tensor in inputs)
        return with_values and operator.split(".")[1] not in _OF_BOTH and any(is_meta(one) and one in self for one in inputs)

    @contextmanager
    def told(self, making: bool, *, pinned: bool = False) -> Iterator[None]:
        """Make new tensors belong to the host, pinned or not, or to the device, within the context, whatever their inputs."""
        before = self.making, self._pinning
        self.making, self._pinning = making, pinned
        try:
            yield
        finally:
            self.making, self._pinning = before

    def of_no_device(self, *, pinned: bool = False) -> AbstractContextManager[None]:
        """Return the context for tensors without a device: on the host, during the setup of user code."""
        return self.told(True, pinned=pinned) if self.setting_up and self.making is None else nullcontext()

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host that is pinned from now on, as are its views."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._pinned[key] = weakref.ref(storage, lambda _: self._pinned.pop(key))
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return True if a tensor's memory is pinned."""
        return bool(self._pinned) and tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._pinned

    def take(self, tensor: Tensor, *, pinned: bool = False) -> None:
        """Make a meta tensor's storage represent memory of the host from now on."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        pinned_size = 0
        if (pinned or self._pinning) and size:
            size = pinned_size = 1 << (size - 1).bit_length()
        self._storages[key] = weakref.ref(storage, lambda _: self._free(key, size, pinned_size))
        self._pinned_bytes += pinned_size
        self.most_pinned_bytes = max(self.most_pinned_bytes, self._pinned_bytes)
        self._held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)

    def begin(self) -> None:
        """Start the peak at the current bytes."""
        self.peak_bytes = self._held_bytes

    @property
    def held_bytes(self) -> int:
        """Return the bytes that are held now."""
        return self._held_bytes

    @contextmanager
    def peak_apart(self) -> Iterator[list[int]]:
        """Yield a list that has one item when the context has ended: the most bytes held within it, in addition."""
        before, held, found = self.peak_bytes, self._held_bytes, list[int]()
        self.begin()
        try:
            yield found
        finally:
            found.append(self.peak_bytes - held)
            self.peak_bytes = max(before, self.peak_bytes)

    def bring(self, tensors: Iterable[Tensor]) -> None:
        """Replace the data of host tensors by copies on the device."""
        for tensor in tensors:
            if tensor in self:
                with self.told(False), torch.no_grad():
                    tensor.data = Tensor.to(tensor.detach(), "meta", copy=True)

    def copy_of(self, tensor: Tensor, *, pinned: bool) -> Tensor:
        """Return a copy of a meta tensor on the host."""
        with _disable_current_modes():
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self.take(copy, pinned=pinned)
        return copy

    def _free(self, key: int, size: int, pinned: int) -> None:
        del self._storages[key]
        self._held_bytes -= size
        self._pinned_bytes -= pinned


class _ToHost(TorchFunctionMode):
    """Copies tensors to the host on `.to(torch.device("cpu"))`."""

    def __init__(self, host: HostMemory) -> None:
        super().__init__()
        self._host = host

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and args[1] == torch.device("cpu"):
            return self._host.copy_of(args[0], pinned=kwargs["non_blocking"])  # pinned if the copy is non-blocking
        return func(*args, **kwargs)


@contextmanager
def offloading_seen(host: HostMemory, left: Callable[[Tensor], None]) -> Iterator[None]:
    """Keep FSDP2's offloaded tensors on the host within the context, and step the optimizer there.

    `left` is called with each parameter that leaves the device.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    from torch.distributed.fsdp import _init_utils as of_first
    from torch.distributed.fsdp._fully_shard import _fsdp_init as of_second
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    init, gathered, reduce = FSDPParam._init_sharded_param, FSDPParam.all_gather_inputs.fget, groups.foreach_reduce

    move_states, move_module = of_second._move_states_to_device, of_first._move_module_to_device

    def move_states_to_device(params: list, buffers: list, *rest: Any) -> None:
        host.bring((*params, *buffers))
        move_states(params, buffers, *rest)

    def move_module_to_device(module: torch.nn.Module, *rest: Any) -> None:
        if rest[-1] is not None:  # the device that FSDP1 was given
            host.bring((*module.parameters(), *module.buffers()))
        move_module(module, *rest)

    def init_sharded_param(param: FSDPParam, *args: Any, **kwargs: Any) -> None:
        init(param, *args, **kwargs)
        if param.offload_to_cpu:
            host.offloads = True
            left(param._sharded_param_data)
            host.take(param._sharded_param_data, pinned=param.pin_memory)

    def all_gather_inputs(param: FSDPParam) -> list[Tensor]:
        host.making = False
        try:
            return gathered(param)
        finally:
            host.making = None

    def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
        with _ToHost(host):
            return reduce(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FSDPParam, "_init_sharded_param", init_sharded_param))
        stack.enter_context(mock.patch.object(FSDPParam, "all_gather_inputs", property(all_gather_inputs)))
        stack.enter_context(mock.patch.object(groups, "foreach_reduce", foreach_reduce))
        stack.enter_context(mock.patch.object(of_second, "_move_states_to_device", move_states_to_device))
        stack.enter_context(mock.patch.object(of_first, "_move_module_to_device", move_module_to_device))
        stack.enter_context(
            mock.patch.object(groups.FSDPParamGroup, "_validate_cpu_offload_params", lambda group: None)
        )
        stack.enter_context(steps_on(host))
        yield


@contextmanager
def steps_on(host: HostMemory) -> Iterator[None]:
    """Put new tensors of an optimizer's step on the host within the context, if its parameters are there."""

    def begin(optimizer: torch.optim.Optimizer, *args: Any) -> None:
        parameters = [part for group in optimizer.param_groups for one in group["params"] for part in parts_of(one)]
        host.making = True if host and parameters and all(part in host for part in parameters) else None

    def end(*args: Any) -> None:
        host.making = None

    handles = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

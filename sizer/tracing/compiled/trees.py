"""CUDA graphs of compiled code (`mode="reduce-overhead"`): Inductor's own bookkeeping of their pool, on meta tensors.

Inductor passes each compiled graph to a tree manager (torch/_inductor/cudagraph_trees.py, 2.15), which runs it in three ways:
first eagerly, in a private pool; then in that pool while a CUDA graph records it; from then on the graph is replayed, which
allocates nothing. Here that code runs itself, with replaced calls of the device: graphs and pools are those of other code
(sizer.tracing.meta.cuda_graphs), each storage has an address, and storages created again at an address have no memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import _disable_current_modes

from sizer.tape.tape import blocks_alive
from sizer.tracing.blocks import Storages
from sizer.tracing.log import BlockLog
from sizer.tracing.meta.cuda_graphs import stream_of_pool

_META = torch.device("meta")
_LARGEST_STORAGE = 2**44  # bytes between addresses


class Recording(Protocol):
    """Parts of a trace's recorder that graphs use."""

    log: BlockLog
    storages: Storages


class _Names:
    """A module's names, some of them replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Memory:
    """Addresses of storages, blocks by address in the graphs' pool, and storages at addresses of recorded ones."""

    def __init__(self, recorder: Recording) -> None:
        self._log, self._storages = recorder.log, recorder.storages
        self._addresses: weakref.WeakKeyDictionary[UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._of_blocks: dict[int, int] = {}  # addresses
        self._blocks: dict[int, int] = {}  # by address the last block that was logged there
        self._counted = count(1)

    def address_of(self, storage: UntypedStorage) -> int:
        """Return the address of a storage, which no other has had; 0 for one without bytes."""
        if not storage.nbytes():
            return 0
        address = self._addresses.get(storage)
        if address is None:
            address = self._addresses[storage] = next(self._counted) * _LARGEST_STORAGE
            block = self._storages.block_in(storage)
            if block is not None:
                self._place(block, address)
        return address

    def storage_at(self, address: int, device: Any, size: int) -> UntypedStorage:
        """Return a storage of `size` bytes at an address; its memory belongs to the pool."""
        storage = UntypedStorage(size, device=_META)
        if address:
            self._addresses[storage] = address
            self._storages.follow_unowned(storage, self._blocks[address])
        return storage

    def checkpoint(self, device: int, pool: Any) -> int:
        """Return the current contents of the pool, as a position of the log."""
        return len(self._log.order)

    def restore(self, stream: Any, position: int, alive: list[int]) -> None:
        """Restore the pool to a checkpoint; storages with a `_cdata` in `alive` own their blocks again.

        Source: setCheckpointPoolState, c10/cuda/CUDACachingAllocator.cpp (2.15). The caller then deletes the other storages.
        """
        log = self._log
        held = [
            block
            for block in blocks_alive(log.order[:position])
            if block in self._of_blocks and log.streams[block] == stream.stream_id
        ]
        with torch.cuda.stream(stream):
            for block in held:
                self._place(log.allocate_again(block), self._of_blocks[block])
        for key in alive:
            self._storages.own(key, lambda storage: self._blocks[self._addresses[storage]])

    def delete(self, address: int) -> None:
        """Log that the block at an address is free."""
        self._log.release(self._blocks[address])

    def _place(self, block: int, address: int) -> None:
        self._of_blocks[block] = address
        self._blocks[address] = block

    @staticmethod
    def tensor_of(metadata: dict[str, Any], storage: UntypedStorage) -> Tensor:
        """Return the tensor over a storage that its metadata describes."""
        with _disable_current_modes():
            tensor = torch.empty(0, dtype=metadata["dtype"], device=_META)
            return tensor.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])

    def are_at(self, tensors: list[Any], addresses: list[int | None], places: list[int]) -> bool:
        """Return True if each of the tensors at some places has the address of that place."""
        return all(self.address_of_tensor(tensors[place]) == addresses[place] for place in places)

    def address_of_tensor(self, tensor: Tensor) -> int:
        """Return the address of a tensor's first element."""
        address = self.address_of(tensor.untyped_storage())
        return address and address + tensor.storage_offset() * tensor.itemsize


@contextmanager
def trees_on(recorder: Recording, on_host: Callable[[Tensor], bool]) -> Iterator[None]:
    """Let Inductor's tree manager record compiled code within the context. Enter it within `graphs_seen`."""
    import torch._inductor.cudagraph_trees as trees

    memory = _Memory(recorder)
    containers: dict[int, Any] = {}

    def container(index: int) -> Any:
        if index not in containers:
            containers[index] = trees.TreeManagerContainer(index)
        return containers[index]

    entered: list[Any] = []

    def begin_pool(device: int, pool: tuple[int, int]) -> None:
        entered.append(torch.cuda.stream(stream_of_pool(pool)))
        entered[-1].__enter__()

    def end_pool(device: int, pool: tuple[int, int]) -> None:
        entered.pop().__exit__(None, None, None)

    def restore(device: int, position: int, stale: list[int], alive: list[int]) -> None:
        memory.restore(stream_of_pool(containers[device].tree_manager.cuda_graphs_thread_pool), position, alive)

    def forbid(storage: int, message: str) -> None:
        recorder.storages.overwritten[storage] = message

    bindings = _Names(
        torch._C,
        _cuda_clearCublasWorkspaces=lambda: None,  # they are held during the call
        _cuda_get_conv_benchmark_empty_cache=lambda: True,
        _cudnn_set_conv_benchmark_empty_cache=lambda on: None,
        _cuda_beginAllocateCurrentThreadToPool=begin_pool,
        _cuda_endAllocateToPool=end_pool,
        _cuda_releasePool=lambda device, pool: None,
        _cuda_getCheckpointState=memory.checkpoint,
        _cuda_setCheckpointPoolState=restore,
        _cuda_cudaCachingAllocator_raw_delete=memory.delete,
        _construct_storage_from_data_pointer=memory.storage_at,
        _construct_CUDA_Tensor_From_Storage_And_Metadata=memory.tensor_of,
        _tensors_data_ptrs_at_indices_equal=memory.are_at,
        _has_Standard_Deleter=recorder.storages.owns,
        _free_And_Remove_DeleterFn=recorder.storages.release_early,
        _set_storage_access_error_msg=lambda tensor, message: forbid(tensor.untyped_storage()._cdata, message),
        _set_storage_data_ptr_access_error_msg=forbid,
    )
    names = {
        "torch": _Names(torch, cuda=_Names(torch.cuda, device=_on_device), _C=bindings, device=_on_device),
        "get_container": container,
        "check_memory_pool": lambda *args: None,  # requests a snapshot from the device
        "preserve_rng_state": nullcontext,
        "_update_current_stream_external_object": nullcontext,
        "ControlFlowOpWarmupDispatchMode": nullcontext,
        "CUDAGraphCaptureControlFlowOpDispatchMode": nullcontext,
        "get_history_recording": nullcontext,
    }

    run = trees.CUDAGraphTreeManager.run

    def run_for_device(manager: Any, inputs: list[Any], function_id: Any) -> Any:
        with _answers_of_device(vars(trees), memory, on_host):  # for each call: a step has replaced attributes of tensors
            return run(manager, inputs, function_id)

    with ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(mock.patch.object(trees, name, value))
        stack.enter_context(mock.patch.object(trees.CUDAGraphTreeManager, "run", run_for_device))
        stack.callback(torch._C._set_cached_tensors_enabled, False)
        try:
            yield
        finally:
            for one in containers.values():
                if one.tree_manager is not None:
                    one.tree_manager.shutdown()


def _on_device(index: int) -> AbstractContextManager[None]:
    """Replace torch.device and torch.cuda.device as contexts: there is only one device."""
    return nullcontext()


@contextmanager
def _answers_of_device(caller: dict[str, Any], memory: _Memory, on_host: Callable[[Tensor], bool]) -> Iterator[None]:
    """Make tensors and storages report the device to a module, given by its names, within the context."""

    def answering(own: Callable[[Any], Any], answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: answer(value) if sys._getframe(1).f_globals is caller else own(value)

    is_cuda, is_meta = Tensor.is_cuda.__get__, vars(torch._C.TensorBase)["is_meta"].__get__
    answers = (
        (Tensor, "is_cuda", property(answering(is_cuda, lambda tensor: is_meta(tensor) and not on_host(tensor)))),
        (Tensor, "data_ptr", answering(Tensor.data_ptr, memory.address_of_tensor)),
        (UntypedStorage, "data_ptr", answering(UntypedStorage.data_ptr, memory.address_of)),
    )
    with ExitStack() as stack:
        for place, name, value in answers:
            stack.enter_context(mock.patch.object(place, name, value, create=name not in vars(place)))
        yield

"""FSDP1, `torch.distributed.fsdp.FullyShardedDataParallel`, on meta tensors: what its flat parameters ask of storages and devices.

Read in PyTorch 2.11 and 2.15: torch/distributed/fsdp/_flat_param.py, _init_utils.py, _common_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


@contextmanager
def flat_parameters_patched(on_no_device: Callable[[Tensor], bool]) -> Iterator[None]:
    """Within the context FSDP1 takes tensors on meta for those of a device, but for such as are `on_no_device`, which it
    materializes; it knows their storages apart, and tells the allocator which streams use them."""
    from torch.distributed.fsdp import _flat_param, _init_utils, _runtime_utils

    def needs_materializing(module: nn.Module, ignored: Iterable[nn.Parameter], *others: Any) -> tuple[bool, bool]:
        left_out = set(ignored)
        held = (*(one for one in module.parameters() if one not in left_out), *module.buffers())
        return any(on_no_device(tensor) for tensor in held), False

    def record_stream(tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def compute_device(*args: Any) -> torch.device:
        return torch.device("meta")

    def moved_to(device_id: int | torch.device | None, *args: Any) -> torch.device | None:
        return None if device_id is None else torch.device("meta")

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(_init_utils, "_get_compute_device", compute_device))
        stack.enter_context(mock.patch.object(_init_utils, "_get_device_from_device_id", moved_to))
        stack.enter_context(mock.patch.object(_init_utils, "_need_to_materialize_module", needs_materializing))
        for module in (_flat_param, _runtime_utils):
            stack.enter_context(mock.patch.object(module, "_no_dispatch_record_stream", record_stream))
        stack.enter_context(_storages_told_apart())
        yield


@contextmanager
def _storages_told_apart() -> Iterator[None]:
    """FSDP1 compares storages by their addresses, which are all 0 on meta, as is that of a storage without bytes anywhere."""
    address = torch.UntypedStorage.data_ptr

    def data_ptr(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta":
            return address(storage)
        return storage._cdata if storage.nbytes() else 0

    with mock.patch.object(torch.UntypedStorage, "data_ptr", data_ptr):
        yield

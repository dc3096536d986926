"""Deferred initialization: meta tensors of user code, materialized later with `to_empty` or `empty_like`.

A trace's own tensors are on meta too, and represent tensors of the device. While a model is set up, tensors represent nothing
if code names meta for them or creates them under its own `torch.device("meta")`. The same holds for tensors made from these
only, such as shards. Tensors for which code names the device are on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from sizer.tracing.values.known import is_meta, storage_number, tensors_of

_META = torch.device("meta")


class Deferred:
    """Meta tensors that represent nothing yet.

    `making` says whether new tensors are among them; None if that depends on the tensors from which they are made.
    """

    def __init__(self) -> None:
        self.making: bool | None = None
        self._storages: dict[int, weakref.ref] = {}
        self._emptied: set[int] = set()  # storages of tensors that had memory before
        self.is_setting_up = False
        self._devices: dict[int, torch.device] = {}  # devices that code named meta, by id: equal devices may represent others

    def __contains__(self, tensor: Tensor) -> bool:
        return bool(self._storages) and storage_number(tensor) in self._storages

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return True if this is one of its storages."""
        return bool(self._storages) and storage._cdata in self._storages

    def makes(self, arguments: tuple) -> bool:
        """Return True if the results of an operator with these arguments are on no device."""
        if not self.is_setting_up or self.making is not None:
            return bool(self.is_setting_up and self.making)
        on_meta = [tensor for tensor in tensors_of(arguments) if is_meta(tensor)]
        on_meta = [tensor for tensor in on_meta if tensor.dim()] or on_meta  # a number is on no device
        return bool(on_meta) and all(tensor in self for tensor in on_meta)

    def take(self, tensor: Tensor) -> None:
        """Make a tensor represent nothing."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._storages[key] = weakref.ref(storage, lambda _: self._forget(key))

    def emptied(self, tensor: Tensor) -> Tensor:
        """Return a tensor on meta like one that code moves there: accelerate leaves it in the place of offloaded weights.

        It represents nothing until code replaces it.
        """
        if tensor in self:
            return tensor
        with _disable_current_modes():
            left = torch.empty_like(tensor, device="meta")
        self.take(left)
        self._emptied.add(left.untyped_storage()._cdata)
        return left

    def _forget(self, key: int) -> None:
        self._storages.pop(key, None)
        self._emptied.discard(key)

    @property
    def is_left(self) -> bool:
        """Return whether code has set up its model and some tensors are still on meta."""
        return bool(self._storages) and not self.is_setting_up

    def place(self, tensor: Tensor) -> bool:
        """Make a tensor represent one of the device from now on, if code computes with it without materializing it.

        Return False for a tensor that represents nothing since code moved it to meta.
        """
        key = tensor.untyped_storage()._cdata
        return key not in self._emptied and self._storages.pop(key, None) is not None

    def name(self, device: torch.device) -> torch.device:
        """Return a device that code has named meta, and record it, to distinguish it from representations of others."""
        self._devices[id(device)] = device
        return device

    @property
    def device(self) -> torch.device:
        """Return the device of these tensors, as one that code has named: code makes other tensors on it."""
        return self.name(_META)

    def names(self, device: object) -> bool:
        """Return whether code has named the device meta: by the word, or by a device registered with `name`."""
        return device == "meta" if isinstance(device, str) else id(device) in self._devices

    @contextmanager
    def told(self, making: bool) -> Iterator[None]:
        """Make new tensors belong to no device, or to the device, within the context, whatever they are made from."""
        before, self.making = self.making, making
        try:
            yield
        finally:
            self.making = before

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Treat the context as the setup of a model: tensors under its own `torch.device("meta")` are on no device."""
        call = DeviceContext.__torch_function__

        def __torch_function__(
            context: DeviceContext, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            makes = func in _device_constructors() and (kwargs or {}).get("device") is None
            if makes and self.names(context.device):
                with self.told(True):
                    return call(context, func, types, args, kwargs)
            return call(context, func, types, args, kwargs)

        self.is_setting_up = True
        try:
            with mock.patch.object(DeviceContext, "__torch_function__", __torch_function__):
                yield
        finally:
            self.is_setting_up = False

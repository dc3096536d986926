"""Checkpoints that a dry run does not write, and that the script reads again. Imports torch.

A script saves its best weights, and loads them when it evaluates. Values on the device were never computed, and files of the
user stay as they are: a checkpoint is kept as what it holds, without the bytes of the device's tensors.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_LARGE_BYTES = 2**20  # a tensor of the host up to this size keeps its values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A tensor of a checkpoint. `storage` numbers its storage, `value` is a tensor of the host that keeps its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage: int
    elements: int
    on_device: bool
    is_parameter: bool
    requires_grad: bool
    value: Tensor | None


class Checkpoints:
    """The checkpoints of one run. `not_saved` lists the names of their files."""

    def __init__(self, on_device: Callable[[Tensor], bool], *, by_host: bool = False) -> None:
        """Keep checkpoints of tensors for which `on_device` is True; save and load others as PyTorch does.

        With `by_host` files are read on the host and then moved, since PyTorch cannot read them to the device.
        """
        self.not_saved: list[str] = []
        self._on_device, self._by_host = on_device, by_host
        self._save, self._load = torch.save, torch.load
        self._of_names: dict[str, tuple[bytes, list[_Kept]]] = {}
        self._of_files: WeakKeyDictionary[Any, tuple[bytes, list[_Kept]]] = WeakKeyDictionary()

    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> bool:
        """Stand in for torch.save. Return True if the checkpoint was kept instead of written."""
        pickler = _Pickler(self._on_device)
        data = pickler.pickled(obj)
        if data is None or not any(one.on_device for one in pickler.kept):
            self._save(obj, f, *args, **kwargs)
            return False
        if isinstance(f, (str, os.PathLike)):
            self._of_names[os.path.abspath(f)] = data, pickler.kept
            self.not_saved.append(os.fspath(f))
        else:
            self._of_files[f] = data, pickler.kept
        return True

    def load(self, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Stand in for torch.load: what `save` has kept comes from there, on the device or the host."""
        is_name = isinstance(f, (str, os.PathLike))
        found = self._of_names.get(os.path.abspath(f)) if is_name else self._of_files.get(f)
        if found is None and self._by_host and (place := _place(map_location)) not in (None, "cpu", "meta"):
            return pytree.tree_map(lambda leaf: _moved(leaf, place), self._load(f, "cpu", *args, **kwargs))
        if found is None:
            return self._load(f, map_location, *args, **kwargs)
        data, kept = found
        return _Unpickler(data, kept, _place(map_location)).load()


def _moved(leaf: Any, place: str) -> Any:
    return leaf.to(place) if isinstance(leaf, (Tensor, nn.Module)) else leaf


def _place(map_location: Any) -> str | None:
    """The kind of device that `map_location` of torch.load sends the device's tensors to, None if they stay there."""
    if callable(map_location) and not isinstance(map_location, torch.device):
        storage = torch.UntypedStorage(0)
        moved = map_location(storage, "cuda:0")
        return None if moved is None else moved.device.type
    if isinstance(map_location, dict):
        map_location = map_location.get("cuda:0", map_location.get("cuda"))
    if map_location is None or isinstance(map_location, int):
        return None
    return str(map_location).partition(":")[0]


class _Pickler(pickle.Pickler):
    """Pickles an object without its tensors, which `kept` lists."""

    def __init__(self, on_device: Callable[[Tensor], bool]) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=4)
        self.kept: list[_Kept] = []
        self._on_device = on_device
        self._numbers: dict[int, int] = {}
        self._held: list[torch.UntypedStorage] = []

    def pickled(self, obj: Any) -> bytes | None:
        """Return the bytes of an object, None if it cannot be pickled so."""
        try:
            with torch.no_grad():
                self.dump(obj)
        except (pickle.PicklingError, AttributeError, TypeError):  # PyTorch will say so, if it cannot either
            return None
        return self._buffer.getvalue()

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor) or obj.layout is not torch.strided:
            return None
        storage, on_device = obj.untyped_storage(), self._on_device(obj)
        self._held.append(storage)
        small = not on_device and not obj.is_meta and storage.nbytes() <= _LARGE_BYTES
        self.kept.append(
            _Kept(
                shape=obj.shape,
                stride=obj.stride(),
                offset=obj.storage_offset(),
                dtype=obj.dtype,
                storage=self._numbers.setdefault(storage._cdata, len(self._numbers)),
                elements=storage.nbytes() // obj.itemsize,
                on_device=on_device,
                is_parameter=isinstance(obj, nn.Parameter),
                requires_grad=obj.requires_grad,
                value=obj.detach().clone() if small else None,
            )
        )
        return len(self.kept) - 1


class _Unpickler(pickle.Unpickler):
    """Makes an object again that `_Pickler` has pickled in this process, with new tensors."""

    def __init__(self, data: bytes, kept: list[_Kept], place: str | None) -> None:
        super().__init__(io.BytesIO(data))
        self._kept, self._place = kept, place
        self._whole: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        kept = self._kept[pid]
        tensor = self._tensor(kept)
        if kept.is_parameter:
            return nn.Parameter(tensor, requires_grad=kept.requires_grad)
        return tensor.requires_grad_(kept.requires_grad)

    def _tensor(self, kept: _Kept) -> Tensor:
        if kept.value is not None:
            return kept.value.clone() if self._place in (None, "cpu") else kept.value.to(self._place)
        on_host = not kept.on_device if self._place is None else self._place == "cpu"
        whole = self._whole.get(kept.storage)
        if whole is None:
            whole = torch.empty(kept.elements, dtype=kept.dtype, device="cpu" if on_host else "cuda")
            self._whole[kept.storage] = whole
        if whole.dtype != kept.dtype:
            whole = whole.view(kept.dtype)
        return torch.as_strided(whole, kept.shape, kept.stride, kept.offset)

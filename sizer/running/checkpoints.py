"""Checkpoints that a dry run does not write to disk, and that the script can load again. Imports torch.

A script saves its best weights, and loads them for an evaluation. Values on the device were never computed, and the user's
files must not change. A checkpoint is therefore kept without the bytes of the device's tensors. Safetensors files keep their
header, and all values read as 0.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sizer.running.kept_files import KeptFiles
from sizer.running.rank_messages import Messages

_LARGE_BYTES = 2**20  # a host tensor up to this size keeps its values


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
    is_meta: bool
    is_parameter: bool
    requires_grad: bool
    value: Tensor | None


class Checkpoints:
    """The checkpoints of one run. `not_saved` lists the names of their files."""

    def __init__(
        self, on_device: Callable[[Tensor], bool], *, saved: Callable[[], None] = lambda: None, by_host: bool = False
    ) -> None:
        """Keep checkpoints of tensors for which `on_device` is True; save and load other tensors with PyTorch's own functions.

        `saved` is called after each kept checkpoint. With `by_host`, files are read on the host and then moved, because PyTorch
        cannot read them to the device.
        """
        self.not_saved: list[str] = []
        self.ranks: Messages | None = None  # passes checkpoints of this rank to other ranks
        self._on_device, self._saved, self._by_host = on_device, saved, by_host
        self._save, self._load = torch.save, torch.load
        self._folder: tempfile.TemporaryDirectory | None = None
        self._files = KeptFiles(self._make_folder)
        self._of_objects: WeakKeyDictionary[Any, tuple[bytes, list[_Kept]]] = WeakKeyDictionary()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make PyTorch and safetensors save and load through this object, within the context."""
        with ExitStack() as stack:
            stack.enter_context(self._files.installed())
            for place in (torch, torch.serialization):
                stack.enter_context(mock.patch.multiple(place, save=self.save, load=self.load))
            if importlib.util.find_spec("safetensors") is not None:
                package, files = (importlib.import_module(name) for name in ("safetensors", "safetensors.torch"))
                self._save_tensors = files.save_file
                stack.enter_context(mock.patch.object(files, "save_file", self.save_tensors))
                for place in (package, files):
                    stack.enter_context(mock.patch.object(place, "safe_open", self._reading(package.safe_open)))
            yield

    def close(self) -> None:
        """Remove the folder of kept files."""
        if self._folder is not None:
            self._folder.cleanup()

    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for torch.save."""
        if isinstance(obj, (torch.TypedStorage, torch.UntypedStorage)):  # `pickle` writes a tensor this way (torch/storage.py)
            self._save(obj, f, *args, **kwargs)
            return
        pickler = _Pickler(self._on_device)
        data = pickler.pickled(obj)
        name = _name_of(f)
        if data is None or not any(one.on_device or one.is_meta for one in pickler.kept):
            self._save(obj, f, *args, **kwargs)
            self._files.forget(name)
            return
        if name is not None:
            size_bytes = len(data) + sum({one.storage: one.elements * one.dtype.itemsize for one in pickler.kept}.values())
            self._keep(name, size_bytes, content=(data, pickler.kept))
            if self.ranks is not None:
                self.ranks.keep_checkpoint(name, (data, pickler.kept))
        else:
            self._of_objects[f] = data, pickler.kept
        self._saved()

    def load(self, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Stand in for torch.load: kept checkpoints are loaded from memory, to the device or the host."""
        name = _name_of(f)
        if name is not None:
            file = self._files.find(name)
            found = None if file is None else file.content
        else:
            found = self._of_objects.get(f)
        if found is None and self.ranks is not None and name is not None and not os.path.exists(name):
            found = self.ranks.find_checkpoint(name)
        if found is None and self._by_host and (place := _place(map_location)) not in (None, "cpu", "meta"):
            return pytree.tree_map(lambda leaf: _moved(leaf, place), self._load(f, "cpu", *args, **kwargs))
        if found is None:
            return self._load(f, map_location, *args, **kwargs)
        data, kept = found
        return _Unpickler(data, kept, _place(map_location)).load()

    def save_tensors(self, tensors: Mapping[str, Tensor], filename: Any, metadata: Mapping[str, str] | None = None) -> None:
        """Stand in for safetensors.torch.save_file."""
        if not any(self._on_device(tensor) or tensor.is_meta for tensor in tensors.values()):
            self._save_tensors(tensors, filename, metadata)
            return
        head, size_bytes = _header(tensors, metadata or {})
        self._keep(filename, size_bytes, head=head)
        self._saved()

    def _keep(self, name: Any, size_bytes: int, *, head: bytes = b"", content: Any = None) -> None:
        self._files.add(name, size_bytes, head=head, content=content)
        self.not_saved.append(os.fspath(name))

    def _make_folder(self) -> str:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="sizer-kept-")
        return self._folder.name

    def _reading(self, safe_open: Callable[..., Any]) -> Callable[..., Any]:
        def opened(filename: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._files.find(filename)
            return safe_open(filename if found is None else found.stand_in, *args, **kwargs)

        return opened


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Return the header of a file of safetensors, and the file's size in bytes.

    The format is that of github.com/safetensors/safetensors ("Format", 0.8).
    """
    types = {dtype: name for name, dtype in importlib.import_module("safetensors.torch")._TYPES.items()}
    rows: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda row: (-row[1].itemsize, row[0])):
        begin, end = end, end + tensor.nbytes
        rows[name] = {"dtype": types[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + end


def _name_of(f: Any) -> str | os.PathLike | None:
    """Return the name of a file, or of the file that an object has opened. None for other objects, such as io.BytesIO."""
    if isinstance(f, (str, os.PathLike)):
        return f
    name = getattr(f, "name", None)
    return name if isinstance(name, (str, os.PathLike)) and os.path.isfile(name) else None


def _moved(leaf: Any, place: str) -> Any:
    return leaf.to(place) if isinstance(leaf, (Tensor, nn.Module)) else leaf


def _place(map_location: Any) -> str | None:
    """Return the device type to which `map_location` of torch.load sends the device's tensors, None if they stay there."""
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
        except (pickle.PicklingError, AttributeError, TypeError):  # PyTorch raises the error, if it cannot pickle the object either
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
                is_meta=obj.is_meta,
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

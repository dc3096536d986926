"""Files and checkpoints that a dry run does not write to disk, and that the script can find and load again. Imports torch.

A script saves its best weights, and loads them for an evaluation. Values on the device were never computed, and the user's
files must not change. A checkpoint is therefore kept without the bytes of the device's tensors. Safetensors files keep their
header, and all values read as 0.

Each file is a sparse file of the same size in a folder of the run. `os.stat` answers for that file, so that `os.path.exists`,
`getsize` and pathlib do too. Renaming, copying and removing change only the name. The user's files are not changed.

A checkpoint begins with a line of text, by which it is found again: in a buffer, and in the sparse file, which `open` reads.
`Path.write_bytes` of this line keeps a file, and so does renaming a file that a script has written with it, as fsspec does.

*Known limitations*: listings of folders do not have these names. A line that a script writes with `open` stays on disk.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import io
import json
import os
import pickle
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sizer.running.rank_messages import Messages
from sizer.tracing.values.libraries import entered_once_imported


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """A file that was not written: a sparse file of its size, and the known parts of its content."""

    stand_in: Path
    content: Any


_ASKING = ("stat", "access", "chmod", "utime")  # functions of `os` that need the file itself


class KeptFiles:
    """Kept files by their absolute names."""

    def __init__(self, folder: Callable[[], str | os.PathLike]) -> None:
        """Keep sparse files in the folder that `folder` returns, which is called at the first file."""
        self._folder = folder
        self._files: dict[str, KeptFile] = {}
        self._count = 0
        self.written: Callable[[Any, bytes], bool] = lambda name, data: False  # keeps a file in place of some data, else False

    def add(self, name: str | os.PathLike, size_bytes: int, *, head: bytes = b"", content: Any = None) -> None:
        """Keep a file.

        Args:
            name: The file's name.
            size_bytes: Its size. Bytes after `head` read as 0.
            head: Its first bytes.
            content: Anything that `find` shall return.

        Raises:
            RuntimeError: The folder does not exist, as PyTorch says it (caffe2/serialize/inline_container.cc, 2.15).
        """
        path = _absolute(name)
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            raise RuntimeError(f"Parent directory {parent} does not exist.")
        self._count += 1
        stand_in = Path(self._folder()) / f"kept-{os.getpid()}-{self._count}"
        with open(stand_in, "wb") as file:
            file.write(head)
            file.truncate(max(size_bytes, len(head)))
        self._files[path] = KeptFile(stand_in=stand_in, content=content)

    def find(self, name: object) -> KeptFile | None:
        """Return the kept file of a name, None for other names. A file disappears with its folder."""
        if not self._files or not isinstance(name, (str, os.PathLike)):
            return None
        path = _absolute(name)
        found = self._files.get(path)
        if found is not None and not os.path.isdir(os.path.dirname(path)):
            del self._files[path]
            return None
        return found

    def forget(self, name: str | os.PathLike | None) -> None:
        """Forget the kept file of a name, if there is one: a file was written in its place."""
        if name is not None:
            self._files.pop(_absolute(name), None)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make functions of `os` and `shutil` find the kept files, within the context."""
        own = {name: getattr(os, name) for name in (*_ASKING, "rename", "replace", "remove", "unlink")}
        copies: dict[str, Any] = {name: getattr(shutil, name) for name in ("copyfile", "copy", "copy2")}

        def asking(ask: Callable[..., Any]) -> Callable[..., Any]:
            def asked(path: Any, *args: Any, **kwargs: Any) -> Any:
                found = self.find(path) if not kwargs.get("dir_fd") else None
                return ask(path if found is None else found.stand_in, *args, **kwargs)

            return asked

        def moving(move: Callable[..., None]) -> Callable[..., None]:
            def moved(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
                found = self.find(source)
                if found is None:
                    if self.written(target, _head(source)):
                        own["remove"](source)
                        return
                    move(source, target, *args, **kwargs)
                    self._move_folder(source, target)
                    return
                del self._files[_absolute(source)]
                self._files[_absolute(target)] = found

            return moved

        def removing(remove: Callable[..., None]) -> Callable[..., None]:
            def removed(path: Any, *args: Any, **kwargs: Any) -> None:
                if kwargs.get("dir_fd") is None and self.find(path) is not None:
                    del self._files[_absolute(path)]
                else:
                    remove(path, *args, **kwargs)

            return removed

        def copying(copy: Callable[..., Any]) -> Callable[..., Any]:
            def copied(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
                found = self.find(source)
                if found is None:
                    return copy(source, target, *args, **kwargs)
                if os.path.isdir(target):
                    target = os.path.join(target, os.path.basename(source))
                self._files[_absolute(target)] = found
                return target

            return copied

        write = Path.write_bytes
        opening = _Opening(self)

        def write_bytes(path: Path, data: Any) -> int:
            return len(data) if self.written(path, bytes(data[:_LINE_BYTES])) else write(path, data)

        copies = {name: copying(copy) for name, copy in copies.items()}
        answers: dict[str, Any] = {name: asking(own[name]) for name in _ASKING}
        answers |= {name: moving(own[name]) for name in ("rename", "replace")}
        answers |= {name: removing(own[name]) for name in ("remove", "unlink")}
        # shutil checks whether os.stat is in these sets
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            able.update(answer for name, answer in answers.items() if own[name] in able)
        with (
            mock.patch.multiple(os, **answers),
            mock.patch.multiple(shutil, **copies),
            mock.patch.object(Path, "write_bytes", write_bytes),
            mock.patch.object(builtins, "open", opening),
            mock.patch.object(io, "open", opening),
        ):
            yield

    def _move_folder(self, source: Any, target: Any) -> None:
        """Rename the kept files of a renamed folder; a real file replaces a kept one of the same name."""
        if not self._files or isinstance(source, int):
            return
        old, new = _absolute(source), _absolute(target)
        self._files.pop(new, None)
        for name in [name for name in self._files if name.startswith(old + os.sep)]:
            self._files[new + name.removeprefix(old)] = self._files.pop(name)


class _Opening:
    """Stands in for `open`. Not a function, which would become a method as an attribute of a class."""

    def __init__(self, files: KeptFiles) -> None:
        self._files, self._open = files, open

    def __call__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        found = self._files.find(file)
        if found is not None and set(mode) & set("wxa"):
            self._files.forget(file)
        elif found is not None:
            file = found.stand_in
        return self._open(file, mode, *args, **kwargs)


def _absolute(name: Any) -> str:
    return os.path.abspath(os.fsdecode(name))


_LINE_BYTES = 80


def _line(number: int) -> bytes:
    """Return the first line of a checkpoint that is not written."""
    return f"A checkpoint of a dry run, {number} of process {os.getpid()}".encode().ljust(_LINE_BYTES - 1) + b"\n"


def _head(name: Any) -> bytes:
    """Return the first bytes of a file, none of other names."""
    if not isinstance(name, (str, os.PathLike)) or not os.path.isfile(name):
        return b""
    with open(name, "rb") as file:
        return file.read(_LINE_BYTES)


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


_Content = tuple[bytes, list[_Kept]]
_DISTRIBUTED = "torch.distributed.checkpoint"


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
        self._files.written = self._write
        self._of_lines: dict[bytes, tuple[int, _Content]] = {}  # by the line of a buffer: the size of the file, and its content

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
            stack.enter_context(entered_once_imported({_DISTRIBUTED: self._distributed_kept}))
            yield

    @contextmanager
    def _distributed_kept(self) -> Iterator[None]:
        """Keep distributed checkpoints: no rank writes its part. A kept one is loaded by leaving the tensors as they are."""
        package = sys.modules[_DISTRIBUTED]
        saver, loader = (importlib.import_module(f"{_DISTRIBUTED}.state_dict_{name}") for name in ("saver", "loader"))
        kept, load = set[str](), package.load

        def name_of(checkpoint_id: Any, storage: Any) -> str:
            name = checkpoint_id or getattr(storage, "path", None) or "a distributed checkpoint"
            return os.path.abspath(os.fspath(name))

        def save(state_dict: Any, *, checkpoint_id: Any = None, storage_writer: Any = None, **kwargs: Any) -> Any:
            kept.add(name := name_of(checkpoint_id, storage_writer))
            self.not_saved.append(name)
            self._saved()
            return package.Metadata(state_dict_metadata={})

        def async_save(state_dict: Any, *, async_stager: Any = None, **kwargs: Any) -> Any:
            uploaded: Future[Any] = Future()
            uploaded.set_result(save(state_dict, **kwargs))
            if not getattr(getattr(async_stager, "_config", None), "use_async_staging", False):
                return uploaded
            staged: Future[None] = Future()
            staged.set_result(None)
            return saver.AsyncSaveResponse(staging_completion=staged, upload_completion=uploaded)

        def load_kept(state_dict: Any, *, checkpoint_id: Any = None, storage_reader: Any = None, **kwargs: Any) -> Any:
            if name_of(checkpoint_id, storage_reader) in kept:
                return None
            with warnings.catch_warnings():  # each rank reads its own parts, without a plan of rank 0
                warnings.simplefilter("ignore", UserWarning)
                return load(state_dict, checkpoint_id=checkpoint_id, storage_reader=storage_reader, **kwargs | {"no_dist": True})

        saves: dict[str, Any] = {"save": save, "async_save": async_save}
        with (
            mock.patch.multiple(package, load=load_kept, **saves),
            mock.patch.multiple(saver, **saves),
            mock.patch.multiple(loader, load=load_kept),
        ):
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
        size_bytes = len(data) + sum({one.storage: one.elements * one.dtype.itemsize for one in pickler.kept}.values())
        line = _line(len(self._of_lines))
        self._of_lines[line] = size_bytes, (data, pickler.kept)
        if name is not None:
            self._write(name, line)
        else:
            f.write(line)
        self._saved()

    def _write(self, name: Any, line: bytes) -> bool:
        """Keep a file for the first line of a checkpoint. Return False for other bytes."""
        size_bytes, content = self._of_lines.get(line, (0, None))
        if content is not None:
            self._keep(name, size_bytes, head=line, content=content)
        return content is not None

    def load(self, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Stand in for torch.load: kept checkpoints are loaded from memory, to the device or the host."""
        name = _name_of(f)
        file = None if name is None else self._files.find(name)
        found = None if file is None else file.content
        if found is None and self._of_lines:
            found = self._of_lines.get(_head(name) if name is not None else _next_line(f), (0, None))[1]
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
        if content is not None and self.ranks is not None:
            self.ranks.keep_checkpoint(name, content)
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


def _next_line(f: Any) -> bytes:
    """Return the next bytes of an object that PyTorch can load from. Its position stays."""
    position = f.tell()
    line = f.read(_LINE_BYTES)
    f.seek(position)
    return line


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

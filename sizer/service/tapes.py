"""Stored results of earlier jobs for later jobs: in memory, and on disk in a file for each architecture.

    sizer tapes ARCHITECTURE
    {"name": "...", "size": 5}
    <5 bytes>{"name": ...

Results are appended. The last result under a name is valid. A file that ends with an incomplete result is rewritten with the
complete ones.

Everything is kept under an architecture (its name, config and the versions of all that reads it) and a name (the rest that it
depends on). A job never names an architecture, and its names are checked (`sizer.service.access`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sizer.base.units import MIB

LONGEST_NAME = 1_000
DISK_BYTES = 1024 * MIB
ITEM_BYTES = 8 * MIB
# Per architecture: five dtypes and 32 batch sizes of Mask R-CNN, each traced separately, take some 6 MB under 160 names.
ARCHITECTURE_NAMES, ARCHITECTURE_BYTES = 256, 8 * MIB
FILE_BYTES = 2 * ARCHITECTURE_BYTES  # above which a file is rewritten, without results that newer ones replace
BLOCK_BYTES = 4096  # minimum size of a file: an empty value is charged as much
_SUFFIX = ".tapes"
_LONGEST_HEADER = 12 * LONGEST_NAME + 100  # a character is at most 12 as \\uXXXX\\uXXXX


class TapeFolder:
    """Results by architecture and name. For use from one thread.

    A file that cannot be written or read is as if it were not there.
    """

    def __init__(self, folder: str, *, disk_bytes: int = DISK_BYTES) -> None:
        self._folder, self._disk_bytes = Path(folder) / "tapes", disk_bytes
        self._written: int | None = None  # bytes on disk, once they were counted

    def read(self, architecture: str) -> dict[str, bytes]:
        """Return the results of an architecture, the newest last."""
        path = self._path(architecture)
        with contextlib.suppress(OSError):
            with open(path, "rb") as file:
                text = file.read(2 * FILE_BYTES)
            found, whole = _parse(architecture, text)
            if whole:
                os.utime(path)
            else:
                self._replace(architecture, found)
            return found
        return {}

    def add(self, architecture: str, name: str, data: bytes) -> None:
        """Append a result."""
        path, record = self._path(architecture), _record(name, data)
        with contextlib.suppress(OSError):
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._make_room(max(len(record), BLOCK_BYTES))
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
            try:
                size = os.fstat(descriptor).st_size
                text = record if size else _header(architecture) + record
                if os.write(descriptor, text) < len(text):  # for example if the disk is full
                    os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)
            if size + len(text) > FILE_BYTES:
                self._write_anew(architecture)

    def _write_anew(self, architecture: str) -> None:
        """Rewrite a file, without the results that newer ones replace."""
        self._replace(architecture, self.read(architecture))

    def _replace(self, architecture: str, entry: Mapping[str, bytes]) -> None:
        text = _header(architecture) + b"".join(_record(name, data) for name, data in entry.items())
        descriptor, temporary = tempfile.mkstemp(dir=self._folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
            os.replace(temporary, self._path(architecture))
        except OSError:
            os.unlink(temporary)
            raise

    def _path(self, architecture: str) -> Path:
        return self._folder / f"{architecture}{_SUFFIX}"

    def _make_room(self, size: int) -> None:
        """Remove the files that were used longest ago until `size` bytes more may be written."""
        if self._written is not None and self._written + size <= self._disk_bytes:
            self._written += size
            return
        paths = self._folder.parent.glob(f"*/*{_SUFFIX}")  # earlier versions had a folder for each architecture
        files = [(path, path.stat()) for path in paths]
        held = sum(max(status.st_size, BLOCK_BYTES) for _, status in files)
        for path, status in sorted(files, key=lambda one: one[1].st_mtime):
            if held + size <= self._disk_bytes:
                break
            path.unlink(missing_ok=True)
            held -= max(status.st_size, BLOCK_BYTES)
        self._written = held + size


def forget_oldest(entry: dict[str, bytes]) -> None:
    """Drop the oldest results of an architecture with too many."""
    held = sum(map(len, entry.values()))
    while len(entry) > ARCHITECTURE_NAMES or (len(entry) > 1 and held > ARCHITECTURE_BYTES):
        held -= len(entry.pop(next(iter(entry))))


def _header(architecture: str) -> bytes:
    return f"sizer tapes {architecture}\n".encode()


def _record(name: str, data: bytes) -> bytes:
    return json.dumps({"name": name, "size": len(data)}).encode("ascii") + b"\n" + data


def _parse(architecture: str, text: bytes) -> tuple[dict[str, bytes], bool]:
    """Return the results of a file, and whether it ends with a whole one. The file names its architecture itself."""
    found: dict[str, bytes] = {}
    begin = len(_header(architecture))
    if not text.startswith(_header(architecture)):
        return found, False
    while begin < len(text):
        end = text.find(b"\n", begin, begin + _LONGEST_HEADER)
        try:
            head = json.loads(text[begin:end] if end >= 0 else b"")
            name, size = str(head["name"]), int(head["size"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return found, False
        data = text[end + 1 : end + 1 + size]
        if not 0 <= size <= ITEM_BYTES or len(data) < size or len(name) > LONGEST_NAME:
            return found, False
        found.pop(name, None)
        found[name] = data
        begin = end + 1 + size
    forget_oldest(found)
    return found, True


MEMORY_BYTES = 256 * MIB  # Llama-3.1-405B's tapes take 0.5 MB in each dtype


class TapeStore:
    """Bytes by architecture and name, least recently used ones are dropped; on disk too if there is a folder.

    One thread reads and writes the folder, so that the caller's event loop never waits for the disk.
    """

    def __init__(self, folder: str = "", *, memory_bytes: int = MEMORY_BYTES, disk_bytes: int = DISK_BYTES) -> None:
        self._folder = TapeFolder(folder, disk_bytes=disk_bytes) if folder else None
        self._thread = ThreadPoolExecutor(max_workers=1) if folder else None
        self._memory_bytes = memory_bytes
        self._entries: OrderedDict[str, dict[str, bytes]] = OrderedDict()  # by architecture
        self._reads: dict[str, asyncio.Task[None]] = {}  # by architecture, for files being read
        self._held = 0

    async def load(self, architecture: str) -> None:
        """Load the results of an architecture from disk into memory."""
        if self._folder is None or architecture in self._entries:
            return
        if architecture not in self._reads:
            self._reads[architecture] = asyncio.get_running_loop().create_task(self._read(architecture))
        await asyncio.shield(self._reads[architecture])

    def of(self, architecture: str) -> Mapping[str, bytes]:
        """Return the results of an architecture in memory, by name."""
        if architecture in self._entries:
            self._entries.move_to_end(architecture)
        return dict(self._entries.get(architecture, {}))

    def put(self, architecture: str, name: str, data: bytes) -> bool:
        """Store a value and return True; False if its bytes or its name are too long, which does not end the job."""
        if len(name) > LONGEST_NAME or len(data) > ITEM_BYTES:
            return False
        entry = dict(self.of(architecture))
        entry.pop(name, None)
        self._hold(architecture, {**entry, name: data})
        if self._thread is not None and self._folder is not None:
            self._thread.submit(self._folder.add, architecture, name, data)
        return True

    def close(self) -> None:
        """Wait until everything is written."""
        if self._thread is not None:
            self._thread.shutdown()

    async def _read(self, architecture: str) -> None:
        assert self._folder is not None, "`load` has looked"
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._folder.read, architecture)
        finally:
            del self._reads[architecture]
        if found:
            self._hold(architecture, {**found, **self.of(architecture)})

    def _hold(self, architecture: str, entry: dict[str, bytes]) -> None:
        """Store an architecture's results in memory, and drop the least recently used ones."""
        forget_oldest(entry)
        self._held -= _charge_all(self._entries.pop(architecture, {}))
        self._entries[architecture] = entry
        self._held += _charge_all(entry)
        while self._held > self._memory_bytes and self._entries:
            _, dropped = self._entries.popitem(last=False)
            self._held -= _charge_all(dropped)


def _charge_all(entry: Mapping[str, bytes]) -> int:
    return sum(max(len(data), BLOCK_BYTES) for data in entry.values())

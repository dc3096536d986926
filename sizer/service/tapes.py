"""What jobs have counted and traced, kept for the jobs to come: in memory, and in a folder for the servers to come.

Everything is kept under an architecture (its name, config and the versions of all that reads it) and a name (the rest that it
depends on). A job is given what is kept of its own architecture and may add to that; it never names another.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from sizer.errors import RequestError
from sizer.request import parse_query
from sizer.units import MIB

FOLDER_VARIABLE = "SIZER_TAPES"  # the folder to keep tapes in; empty for none
LONGEST_NAME = 1_000
MEMORY_BYTES = 256 * MIB  # Llama-3.1-405B's tapes take 0.5 MB in each dtype
DISK_BYTES = 1024 * MIB
ITEM_BYTES = 8 * MIB
# Of one architecture: five dtypes and 32 batch sizes of Mask R-CNN, each traced by itself, keep some 6 MB under 160 names.
ARCHITECTURE_NAMES, ARCHITECTURE_BYTES = 256, 8 * MIB
BLOCK_BYTES = 4096  # what a file takes at least: an empty value is charged as much
_SUFFIX = ".tapes"


def default_folder() -> str:
    """The folder of this user's tapes, empty where none is to be kept."""
    if (given := os.environ.get(FOLDER_VARIABLE)) is not None:
        return given
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(cache)
    return os.path.join(folder, "sizer") if os.path.isabs(folder) else ""  # a user without a home keeps none


def architecture_of(query: str, config_text: str | None, versions: str) -> str | None:
    """A digest of the architecture that a query names, by the given versions; None for a query that is refused."""
    try:
        request = parse_query(query)
    except RequestError:
        return None
    parts = (versions, request.source, request.name, request.revision or "", request.config or "", config_text or "")
    digest = hashlib.sha256()
    for part in parts:
        text = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(text) + text)
    return digest.hexdigest()


def _charge(data: bytes | None) -> int:
    """Return what a value counts for; nothing if there is none."""
    return 0 if data is None else max(len(data), BLOCK_BYTES)


class TapeStore:
    """Bytes by architecture and name, the most recently used of them; on disk too where there is a folder.

    A file that cannot be written or read is as if it were not there.
    """

    def __init__(self, folder: str = "", *, memory_bytes: int = MEMORY_BYTES, disk_bytes: int = DISK_BYTES) -> None:
        self._folder = Path(folder) if folder else None
        self._memory_bytes, self._disk_bytes = memory_bytes, disk_bytes
        self._entries: OrderedDict[str, dict[str, bytes]] = OrderedDict()  # by architecture
        self._held = 0
        self._written: int | None = None  # bytes on disk, once they were counted

    def of(self, architecture: str) -> Mapping[str, bytes]:
        """All that is kept of one architecture, by name."""
        if architecture not in self._entries and (found := self._read(architecture)):
            self._entries[architecture] = found
            self._held += sum(map(_charge, found.values()))
            self._drop()
        if architecture in self._entries:
            self._entries.move_to_end(architecture)
        return dict(self._entries.get(architecture, {}))

    def put(self, architecture: str, name: str, data: bytes) -> bool:
        """Keep something and return True; False if its bytes or its name are too long, which is no reason to end a job."""
        if len(name) > LONGEST_NAME or "\n" in name or len(data) > ITEM_BYTES:
            return False
        self.of(architecture)
        entry = self._entries.setdefault(architecture, {})
        self._held -= _charge(entry.pop(name, None))
        entry[name] = data
        self._held += _charge(data)
        self._forget_oldest(architecture, entry)
        self._entries.move_to_end(architecture)
        self._drop()
        self._write(architecture, name, data)
        return True

    def _forget_oldest(self, architecture: str, entry: dict[str, bytes]) -> None:
        """Drop what was kept longest ago of an architecture that keeps too much."""
        while len(entry) > ARCHITECTURE_NAMES or (len(entry) > 1 and sum(map(len, entry.values())) > ARCHITECTURE_BYTES):
            oldest = next(iter(entry))
            self._held -= _charge(entry.pop(oldest))
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    self._path(architecture, oldest).unlink()

    def _drop(self) -> None:
        while self._held > self._memory_bytes and self._entries:
            _, entry = self._entries.popitem(last=False)
            self._held -= sum(map(_charge, entry.values()))

    def _path(self, architecture: str, name: str) -> Path:
        return self._folder / architecture / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}{_SUFFIX}"

    # ------------------------------------------------------------------------------------------------------- on disk

    def _read(self, architecture: str) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        if self._folder is None:
            return found
        with contextlib.suppress(OSError):
            for path in (self._folder / architecture).glob(f"*{_SUFFIX}"):
                name, newline, data = path.read_bytes().partition(b"\n")
                if newline and len(name) <= LONGEST_NAME and len(data) <= ITEM_BYTES:
                    found[name.decode("utf-8", "replace")] = data
                    os.utime(path)
        return found

    def _write(self, architecture: str, name: str, data: bytes) -> None:
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(len(data))
            folder = self._folder / architecture
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(name.encode() + b"\n" + data)
                os.replace(temporary, self._path(architecture, name))
            except OSError:  # the disk is full, say
                os.unlink(temporary)
                raise

    def _make_room(self, size: int) -> None:
        """Remove the files that were used longest ago until `size` bytes more may be written."""
        size = max(size, BLOCK_BYTES)
        if self._written is not None and self._written + size <= self._disk_bytes:
            self._written += size
            return
        files = [(path, path.stat()) for path in self._folder.glob("*/*")]
        kept = sum(max(status.st_size, BLOCK_BYTES) for _, status in files)
        for path, status in sorted(files, key=lambda one: one[1].st_mtime):
            if kept + size <= self._disk_bytes:
                break
            path.unlink(missing_ok=True)
            kept -= max(status.st_size, BLOCK_BYTES)
        for folder in self._folder.iterdir():
            with contextlib.suppress(OSError):
                folder.rmdir()  # succeeds where it is empty
        self._written = kept + size

"""Counts and traces of earlier jobs, kept for later jobs: in memory, and in a folder for later servers.

Everything is kept under an architecture (its name, config and the versions of all that reads it) and a name (the rest that it
depends on). A job never names an architecture, and its names are checked (`sizer.service.access`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from sizer.base.units import MIB
from sizer.service.tape_folder import BLOCK_BYTES, DISK_BYTES, ITEM_BYTES, LONGEST_NAME, TapeFolder, forget_oldest

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

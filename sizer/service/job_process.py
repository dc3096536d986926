"""The two ways to run a job in a process of its own: a fork of the preloaded server, or a fresh Python (Windows)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from base64 import b64encode

from sizer.processes.process import kill, kill_group, python_command
from sizer.processes.wire import to_line
from sizer.service.child import run_forked
from sizer.service.settings import Settings

REAP_SECONDS = 0.005


class ForkedJob:
    """A copy of this process, in a process group of its own. Raises OSError where the system refuses to fork."""

    def __init__(self, job: dict, settings: Settings):
        parent = os.getpid()
        source, sink = os.pipe()
        self._limit = settings.result_bytes
        self._source = os.fdopen(source, "rb", buffering=0)
        self._transport: asyncio.ReadTransport | None = None
        try:
            self._process = os.fork()
            if self._process == 0:
                run_forked(job, settings, sink, parent)
        finally:
            os.close(sink)
        with contextlib.suppress(OSError):  # the child does it, too; the second of the two may fail
            os.setpgid(self._process, self._process)

    async def open(self) -> asyncio.StreamReader:
        """The child's output. Raises OSError where the process could not be started."""
        reader = asyncio.StreamReader(limit=self._limit)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._source)
        return reader

    async def stop(self) -> int:
        """Kills the child with all that it started; its exit status, negative for the signal that ended it.

        A child that had ended by itself keeps the exit status it had.
        """
        kill_group(self._process)
        while (ended := os.waitpid(self._process, os.WNOHANG))[0] == 0:
            await asyncio.sleep(REAP_SECONDS)
        (self._transport or self._source).close()
        return os.waitstatus_to_exitcode(ended[1])


class SpawnedJob:
    """The same in a fresh Python process, which imports everything again."""

    def __init__(self, job: dict, settings: Settings):
        self._job = job
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None

    async def open(self) -> asyncio.StreamReader:
        self._process = await asyncio.create_subprocess_exec(
            *python_command("sizer.service.child", *self._settings.to_arguments()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            limit=self._settings.result_bytes,
            start_new_session=os.name == "posix",
        )
        kept = {name: b64encode(data).decode("ascii") for name, data in self._job["kept"].items()}
        self._process.stdin.write(to_line({**self._job, "kept": kept}))
        self._process.stdin.close()
        return self._process.stdout

    async def stop(self) -> int:
        if self._process is None:
            return 0
        kill(self._process)
        return await self._process.wait()

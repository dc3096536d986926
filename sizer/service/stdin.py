"""The lines of stdin for an event loop, in the two ways that systems allow."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator


async def read_pipe(limit: int) -> AsyncIterator[bytes | None]:
    """Yield the lines of stdin until it ends, without threads; None for a line of more than `limit` bytes."""
    reader = asyncio.StreamReader(limit=limit)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer.raw)  # type: ignore[union-attr]
    skipping = False
    while True:
        try:
            line = await reader.readuntil(b"\n")
            yield None if skipping else line
            skipping = False
        except asyncio.LimitOverrunError as overrun:
            await reader.readexactly(overrun.consumed)
            skipping = True
        except asyncio.IncompleteReadError:
            return


async def read_thread(limit: int) -> AsyncIterator[bytes | None]:
    """Yield the same lines from a thread, for Windows, whose event loop cannot wait for stdin. Never combined with fork."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the loop or stdin has been closed: the server is ending
            while True:
                line = sys.stdin.buffer.readline(limit)
                loop.call_soon_threadsafe(lines.put_nowait, line)
                if not line:
                    return

    threading.Thread(target=read, daemon=True).start()
    skipping = False
    while line := await lines.get():
        if line.endswith(b"\n"):
            yield None if skipping else line
        skipping = not line.endswith(b"\n")

"""One attempt in a forked child with a wall clock, so that what hangs or crashes ends nobody else."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable


def in_child(attempt: Callable[[], dict[str, str]], *, seconds: int) -> dict[str, str] | None:
    """What `attempt` returns in a forked process, its texts clipped to one line; None where it was killed after so many seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(seconds)
        outcomes = {key: text.replace("\n", " ")[:500] for key, text in attempt().items()}
        os.write(writing, json.dumps(outcomes).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    return json.loads(text) if text else None

"""A Redis server and workers of its own for a test. Without them these tests are skipped, where CI is set they fail."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from sizer.processes.environment import own_environment
from sizer.service.client import JobClient
from sizer.service.settings import Settings
from tests.processes.running import wait_until

PROGRAM = "redis-server"
WORK = "tests.service.scripted:run_or_answer"


def need_broker() -> None:
    """Skip what follows where there is no Redis server, or no Celery; not under CI, which has both."""
    missing = [name for name in ("celery", "redis") if importlib.util.find_spec(name) is None]
    missing += [] if shutil.which(PROGRAM) else [PROGRAM]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"there is no {' and no '.join(missing)}", allow_module_level=True)


class RedisServer:
    """A Redis server on the loopback interface, which keeps what it holds in a folder."""

    def __init__(self, folder: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._folder = folder
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.start()

    def start(self) -> None:
        """Start it, with what it held when it ended."""
        options = {
            "port": self._port,
            "bind": "127.0.0.1",
            "dir": self._folder,
            "appendonly": "yes",
            "appendfsync": "always",
        }
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen([PROGRAM, *words], stdout=subprocess.DEVNULL)
        wait_until(self._listens)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0


PROGRAM_OF_WORKER = """
import sys
from dataclasses import replace
from sizer.service.broker.worker import serve
from sizer.service.settings import Settings
serve(sys.argv[1], sys.argv[2].split(","), Settings.from_arguments(sys.argv[3:]))
"""


@contextmanager
def running_worker(
    url: str, log: Path, *, queues: str = "short,long", **settings: object
) -> Iterator[subprocess.Popen]:
    """A worker with one place, whose jobs are scripts, or real ones where `preload` is left to be."""
    told = Settings(**{"function": WORK, "max_jobs": 1, "tapes": "", "spares": 0, "sharing": "yes"} | settings)
    command = [sys.executable, "-c", PROGRAM_OF_WORKER, url, queues, *told.to_arguments()]
    with log.open("ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=own_environment(), start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def client_of(url: str, **arguments: object) -> JobClient:
    """A client that asks the workers of a broker."""
    from sizer.service.broker.connection import BrokerConnection

    settings = Settings(spares=0, preload=(), max_jobs=8, max_waiting=64)
    return JobClient(settings, connect=partial(BrokerConnection, url), **arguments)

"""One job in one process: confine it, call its function, write progress and one result as JSON lines, end.

A freshly forked child calls `run_forked`. `python -m sizer.service.job_child` does the same in a fresh process, for systems
without fork: it reads its job as one line from stdin.

The template is the process from which jobs are forked. It has imported everything and has read no job, so that no job inherits
another's data.

    server -> template   "F" with two descriptors: the input and the output of the job                       (process id)
                         "W" and a process id                                                             (1, exit status) or (0, 0)

It is forked from the job server before the server reads its first request, and ends with the server.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NoReturn

from sizer.base.errors import JobError
from sizer.processes.child import Channel, redirect_to_null, run_job
from sizer.processes.sandbox import Limits, confine, die_with
from sizer.processes.wall import raise_wall, readable_folders
from sizer.processes.wire import from_line
from sizer.service.job_memory import join
from sizer.service.settings import Settings

# Factor of a job's time limit for its lifetime, pauses included, and extra seconds: ends the job if the server does not.
LASTING, GRACE_SECONDS = 10.0, 2.0


def load_function(name: str) -> Callable[[dict, Channel], dict]:
    """Return the function that MODULE:FUNCTION names. Raises ImportError, AttributeError or ValueError if there is none."""
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def run_forked(settings: Settings, source: int, sink: int, *, parent: int, group: Path | None) -> NoReturn:
    """Run the job in `source` in the process that os.fork just made, write to the pipe `sink`, and end the process.

    It moves to its control `group`, if any.
    """
    try:
        os.setpgid(0, 0)
        if group is not None:
            join(group)
        with open(source, "rb") as file:
            job = _read(file)
        _run(job, settings, _detach(sink), parent)
        os._exit(0)
    finally:
        os._exit(1)


def _read(file: BinaryIO) -> dict:
    """Return a job's line with the stored results after it; the line lists their names and sizes."""
    job = from_line(file.readline())
    job["kept"] = {name: file.read(size) for name, size in job["kept"]}
    return job


def _detach(descriptor: int) -> int:
    """Close all files of the parent except one pipe; return its new descriptor. Standard streams become the null device."""
    pipe = os.dup2(descriptor, 3) if descriptor != 3 else 3
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    redirect_to_null(0, 1, 2)
    return pipe


def _run(job: dict, settings: Settings, descriptor: int, parent: int) -> None:
    def call(channel: Channel) -> dict:
        limits = Limits(
            cpu_seconds=settings.cpu_seconds,
            memory_bytes=settings.memory_bytes,
            headroom_bytes=settings.headroom_bytes,
        )
        confine(LASTING * settings.wall_seconds + GRACE_SECONDS, limits=limits, parent=parent)
        missing = raise_wall((*readable_folders(), *settings.readable))
        if settings.wall == "required" and "seccomp" in missing:
            raise JobError(f"the job could not be confined (seccomp: {missing['seccomp']})", todo="try again")
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)
        return load_function(settings.function)(job, channel)

    run_job(call, descriptor)


def main() -> None:
    """Run the job on stdin; its progress and result go to the original stdout."""
    settings = Settings.from_arguments(sys.argv[1:])
    job = _read(sys.stdin.buffer)
    descriptor = os.dup(1)
    redirect_to_null(0, 1, 2)
    _run(job, settings, descriptor, os.getppid())
    os._exit(0)


if __name__ == "__main__":
    main()


# ------------------------------------------------------------------------------------------------------------ template


_QUESTION, _FORKED, _STATUS = struct.Struct("=cq"), struct.Struct("=q"), struct.Struct("=?i")
_FORK, _WAIT = b"F", b"W"


class Template:
    """The template as the job server sees it.

    If it has ended, for example killed by the system, the server ends too: SystemExit.
    """

    def __init__(self, settings: Settings, group: Path | None = None):
        server = os.getpid()
        self._channel, theirs = socket.socketpair()  # a stream: each question waits for its answer
        if os.fork() == 0:
            try:
                self._channel.close()
                _serve(theirs, settings, server, group)
            finally:
                os._exit(1)
        theirs.close()

    def fork(self, source: int, sink: int) -> int:
        """Return the process id of a new job, which reads its work from one descriptor and writes to the other.

        Raises OSError if the system refuses to fork.
        """
        (process,) = _FORKED.unpack(self._ask(_QUESTION.pack(_FORK, 0), _FORKED.size, source, sink))
        if process < 0:
            raise OSError(-process, os.strerror(-process))
        return process

    def status(self, process: int) -> int | None:
        """Return the wait status of a job, None while it runs. The status is returned once."""
        ended, status = _STATUS.unpack(self._ask(_QUESTION.pack(_WAIT, process), _STATUS.size))
        return status if ended else None

    def _ask(self, question: bytes, size: int, *descriptors: int) -> bytes:
        with contextlib.suppress(OSError):  # it has ended: there will be no answer
            socket.send_fds(self._channel, [question], descriptors)
            if len(answer := self._channel.recv(size, socket.MSG_WAITALL)) == size:
                return answer
        raise SystemExit("the process that jobs are forked from has ended")


def _serve(channel: socket.socket, settings: Settings, server: int, group: Path | None) -> None:
    """Fork jobs, which go to their control `group`, and wait for them until the server has ended."""
    die_with(server)
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    own = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _QUESTION.size, 2)
        if not message:
            return
        kind, process = _QUESTION.unpack(message)
        if kind == _WAIT:
            ended, status = os.waitpid(process, os.WNOHANG)
            channel.sendall(_STATUS.pack(ended != 0, status))
            continue
        try:
            forked = os.fork()
        except OSError as error:
            assert error.errno is not None, "a call of the system says why it failed"
            forked = -error.errno
        if forked == 0:
            run_forked(settings, *descriptors, parent=own, group=group)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.sendall(_FORKED.pack(forked))

"""The process that jobs are forked from: it has imported everything and has seen no job, so that no job inherits another's data.

    server -> template   "F" with two descriptors: where the job is read from, where its answers go      (process id)
                         "W" and a process id                                                             (1, exit status) or (0, 0)

Forked from the job server before that reads its first request. It ends when the server does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

from sizer.processes.sandbox import die_with
from sizer.service.job_child import run_forked
from sizer.service.settings import Settings

_QUESTION, _FORKED, _STATUS = struct.Struct("=cq"), struct.Struct("=q"), struct.Struct("=?i")
_FORK, _WAIT = b"F", b"W"


class Template:
    """The template as the job server sees it. Where it has ended, killed by the system say, the server ends too: SystemExit."""

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
        """The process id of a new job, which reads its work from one descriptor and writes to the other.

        Raises OSError where the system refuses to fork.
        """
        (process,) = _FORKED.unpack(self._ask(_QUESTION.pack(_FORK, 0), _FORKED.size, source, sink))
        if process < 0:
            raise OSError(-process, os.strerror(-process))
        return process

    def status(self, process: int) -> int | None:
        """The wait status of a job, None while it runs. It is told once."""
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

"""A child process as its parent sees it: started in a clean environment, spoken to in JSON lines, killed with all it started.

`run_program` runs a module as a separate program that answers with one JSON value, so that the caller imports no torch.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sizer.base.errors import JobError, SizerError, quote
from sizer.processes.environment import environment, own_environment
from sizer.processes.wire import error_from_wire, error_to_wire, to_line

if TYPE_CHECKING:
    from asyncio.subprocess import Process

CLOSE_SECONDS = 5.0
LIMIT_STDERR_LINE = 64 * 2**10
STDERR_LINES = 20


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as a program, without the current folder on its path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def kill(process: subprocess.Popen | Process) -> None:
    """Kill a process that leads its own session, with all its descendants."""
    if os.name == "posix":
        kill_group(process.pid)
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            process.kill()


def kill_group(group: int) -> None:
    """Kill every process of a process group; do nothing if it has ended."""
    signal_group(group, signal.SIGKILL)


def signal_group(group: int, number: int) -> None:
    """Send a signal to every process of a process group; do nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM if only a zombie is left
        os.killpg(group, number)


class ChildProcess:
    """A module run as a program, with pipes to and from it, in a new session, with an empty folder as `home`.

    `name` begins the sentences about it ("the job server"). Write messages with `send`, read them with `lines`, and call `wait`
    after the last one. Raises JobError if the process cannot be started.
    """

    def __init__(self, module: str, *arguments: str, name: str, accelerators: bool = False):
        try:
            self.home = tempfile.mkdtemp(prefix="sizer-")
        except OSError as error:
            todo = "set TMPDIR to a folder that can be written"
            raise JobError(f"{name} has no folder for temporary files ({error.strerror})", todo=todo) from error
        try:
            self._process = subprocess.Popen(
                python_command(module, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment(self.home, accelerators=accelerators),
                start_new_session=os.name == "posix",  # Ctrl-C in the parent's terminal is for the parent
            )
        except OSError as error:
            shutil.rmtree(self.home, ignore_errors=True)
            raise JobError(f"{name} could not be started ({error.strerror})") from error
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None, "all are pipes"
        self._stdin, self._stdout, self._stderr = stdin, stdout, stderr
        self._stderr_lines: collections.deque[str] = collections.deque(maxlen=STDERR_LINES)
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()

    @property
    def id(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, message: dict) -> None:
        """Write a message. Raises OSError if the process has ended."""
        self._stdin.write(to_line(message))
        self._stdin.flush()

    def close_stdin(self) -> None:
        """Tell the process that there are no more messages."""
        with contextlib.suppress(OSError):  # it has ended without reading a message
            self._stdin.close()

    def lines(self, limit: int) -> Iterator[bytes]:
        """Yield the lines that the process writes until it ends; a line of more than `limit` bytes comes in parts."""
        while line := self._stdout.readline(limit):
            yield line

    def kill(self) -> None:
        """Kill the process with all that it started, unless it was waited for."""
        if self._process.returncode is None:
            kill(self._process)

    def ends_within(self, seconds: float) -> bool:
        """Return whether the process ends in this time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self) -> int:
        """Return the exit status, negative for the signal that ended the process; wait for its end and remove its home."""
        status = self._process.wait()
        self._stderr_reader.join(CLOSE_SECONDS)
        self._stdout.close()
        shutil.rmtree(self.home, ignore_errors=True)
        return status

    def saying(self) -> str:
        """Return the last line on its standard error as the end of a sentence, ", saying '...'"; empty if there is none."""
        lines = [line for line in self._stderr_lines if line]
        return f", saying {quote(lines[-1], 300)}" if lines else ""

    def _read_stderr(self) -> None:
        with self._stderr as pipe:
            for line in iter(lambda: pipe.readline(LIMIT_STDERR_LINE), b""):
                self._stderr_lines.append(line.decode("utf-8", "replace").strip())


def run_program(module: str, *arguments: str, seconds: float, what: str) -> object:
    """Return the value (plain data) that `python -m MODULE ARGUMENTS` prints with `print_value`.

    `what` completes the sentence "... could not be ...".

    Raises:
        SizerError: The program's own error.
        JobError: The program crashed, gave no valid answer, or took longer than `seconds` and was killed.
    """
    try:
        done = subprocess.run(
            python_command(module, *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=own_environment(),
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise JobError(f"{what} within {seconds:.0f} s") from None
    try:
        message = json.loads(done.stdout.splitlines()[-1])
        if "error" in message:
            raise error_from_wire(message["error"])
        return message["result"]
    except (ValueError, IndexError, KeyError, TypeError):
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.returncode}"]
        todo = "check that torch can be imported"
        raise JobError(f"{what} ({quote(lines[-1], 300)})", todo=todo) from None


def print_value(make: Callable[[], object]) -> None:
    """Print what `make` returns, or the SizerError that it raises, as the last line of standard output."""
    try:
        message = {"result": make()}
    except SizerError as error:
        message = {"error": error_to_wire(error)}
    sys.stdout.write(f"\n{json.dumps(message, allow_nan=False)}\n")

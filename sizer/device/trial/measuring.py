"""One process that measures, as its parent sees it: started with its job, read to its answer, killed. No torch here."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from sizer.base.codec import DecodeError
from sizer.base.errors import JobError, quote
from sizer.device.record.recording import Measured
from sizer.processes.process import ChildProcess
from sizer.processes.wire import clip_progress, error_from_wire, from_line

LIMIT_LINE = 256 * 2**20  # bytes of a result, recording included


class Measuring:
    """A process of its own for a job of `sizer.device.trial.child`, which it is given when it is read; `progress` is what it said
    last. Raises JobError where it cannot be started."""

    def __init__(self, name: str) -> None:
        self.progress = "starting"
        self._name = name
        self._process = ChildProcess("sizer.device.trial.child", name=name, accelerators=True)

    @property
    def id(self) -> int:
        """The process id."""
        return self._process.id

    @property
    def home(self) -> str:
        """A folder of its own, which is there until it has ended."""
        return self._process.home

    def read(self, job: dict, say: Callable[[str], None]) -> Measured:
        """Send the job and read to the answer; stdin stays open, since the child ends with it.

        Raises what the child raised, JobError where it ended without an answer.
        """
        with contextlib.suppress(OSError):  # the process has ended already: explained below, where no answer comes
            self._process.send(job)
        for line in self._process.lines(LIMIT_LINE):
            try:
                message = from_line(line)
                if "progress" in message:
                    self.progress = clip_progress(message["progress"])
                    say(self.progress)
                elif "error" in message:
                    raise error_from_wire(message["error"])
                else:
                    return Measured.from_dict(message["result"])
            except (ValueError, KeyError, DecodeError) as error:
                raise JobError(f"the answer is not what was expected ({quote(str(error), 200)})") from None
        raise self._explain_end(self._process.wait())

    def kill(self) -> None:
        """Kill the process with all that it started; one that was waited for stays as it is."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process, wait for its end and remove its home."""
        self.kill()
        self._process.wait()
        self._process.close_stdin()

    def _explain_end(self, status: int) -> JobError:
        if os.name == "posix" and status == -signal.SIGKILL:
            return JobError(
                f"{self._name} was killed while {self.progress}",
                todo="the computer's memory may have run out: try a smaller batch",
            )
        ended = f"{self._name} ended (exit status {status}) while {self.progress}"
        return JobError(f"{ended}{self._process.saying()}")

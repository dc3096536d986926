"""Why a job has ended without an answer, in words."""

from __future__ import annotations

import signal

from sizer.base.errors import JobError, TimeLimitError
from sizer.base.units import format_bytes
from sizer.service.settings import Settings, is_public
from sizer.service.variables import JOB_SECONDS

CRASHES = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGKILL", "SIGSEGV", "SIGSYS")


def is_crash(status: int) -> bool:
    """Whether an exit status is that of a process that something else than its own limits ended."""
    return status < 0 and -status in set(signal.Signals) and signal.Signals(-status).name in CRASHES


def too_slow(settings: Settings) -> JobError:
    """It took longer than it may."""
    todo = "try a smaller model, a shorter sequence or fewer batch sizes"
    if not is_public():
        todo += f", or set {JOB_SECONDS.name} to more seconds"
    return TimeLimitError(f"the job was stopped after {settings.wall_seconds:g} s (wall clock)", todo=todo)


def too_large(settings: Settings) -> JobError:
    """It said more than it may."""
    todo = "try fewer dtypes or batch sizes"
    return JobError(f"the job wrote more than {settings.result_bytes:,} bytes", todo=todo)


def over_budget(held_bytes: int, settings: Settings) -> JobError:
    """It held most when all jobs together held more than they may."""
    held, budget = format_bytes(held_bytes), format_bytes(settings.budget_bytes)
    todo = "try again in a minute, or a smaller model"
    return JobError(f"the job was stopped: it held {held} when all jobs together held more than {budget}", todo=todo)


def without_memory(settings: Settings) -> JobError:
    """It held most when all jobs together asked for more than their control group may hold."""
    budget = format_bytes(settings.budget_bytes)
    todo = "try again in a minute, or a smaller model"
    return JobError(f"the job was stopped: it held most when all jobs together needed more than {budget}", todo=todo)


def explain_end(status: int, settings: Settings) -> JobError:
    """Why a child ended without an answer, from its exit status (negative: the signal)."""
    if status >= 0:
        return JobError(f"the job ended without an answer (exit status {status})", todo="try again")
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    if name == "SIGALRM":  # the child's own deadline, where this process was too busy to keep it
        return too_slow(settings)
    if name == "SIGXCPU":
        return TimeLimitError(f"the job used more than {settings.cpu_seconds} s of CPU time", todo="try a smaller model")
    if name == "SIGKILL":
        return JobError("the job was killed, probably because the host ran out of memory", todo="try a smaller model")
    return JobError(f"the job crashed ({name})", todo="please report this query as a bug")

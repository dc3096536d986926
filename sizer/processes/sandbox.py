"""Restrictions of a child process, set before it reads untrusted input.

The kernel's limits apply to any code: address space, CPU time, file size, a deadline, death with the parent. An audit hook also
refuses operations of Python code by name: sockets, programs, files opened for writing. It stops a library that downloads,
caches or compiles, and says so in words. Malicious code can remove the hook, and is stopped by `wall`.

*Known limitations*: macOS does not enforce RLIMIT_AS; Windows has none of the limits of `resource` (the parent's wall clock and
the audit hook remain). RLIMIT_NPROC does not apply to root: `wall` refuses root's threads and processes, if seccomp is
available.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PROCESSES = "start or signal processes"
_FILES = "change files"
_REFUSED_EVENTS = {
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"), _PROCESSES),
    **dict.fromkeys(("os.fork", "os.forkpty", "os.startfile", "pty.spawn", "os.kill", "os.killpg"), _PROCESSES),
    **dict.fromkeys(("os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.truncate"), _FILES),
    **dict.fromkeys(("os.chmod", "os.chown", "os.setxattr", "shutil.rmtree", "shutil.move"), _FILES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of a job.

    Its address space is `memory_bytes`, and at least `headroom_bytes` more than it has at its start.
    """

    cpu_seconds: int
    memory_bytes: int
    headroom_bytes: int


def confine(seconds: float, *, limits: Limits | None = None, parent: int | None = None, compiles: bool = False) -> None:
    """Set a deadline for the calling process, and permanently refuse it the network, new processes and writing files.

    `limits` also sets the kernel's limits; without them memory and CPU time are unlimited, as a measurement requires. The
    process ends with the process of id `parent` (Linux). With `compiles`, for code that compiles an accelerator's kernels at
    run time, the process may write files and start programs. Raises OSError or ValueError if the system refuses a limit that it
    has.
    """
    sys.dont_write_bytecode = not compiles
    tempfile.gettempdir()  # its first call writes a test file; later ones only return the name, and are still allowed
    if parent is not None:
        die_with(parent)
    if os.name == "posix":
        import resource

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        _lower(resource.RLIMIT_CORE, 0)
        if limits is not None:
            _set_limits(limits)
    sys.addaudithook(_refuse_network if compiles else _refuse)


def address_space_bytes() -> int | None:
    """Return the bytes of address space of this process, or None if the system does not tell (anything but Linux)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_limit_bytes() -> int | None:
    """Return the address space in bytes that this process may use; None without a limit."""
    if os.name != "posix":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _set_limits(limits: Limits) -> None:
    import resource

    _lower(resource.RLIMIT_CPU, limits.cpu_seconds, above=1)  # SIGXCPU at the soft limit tells the parent why
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_NPROC, 0)
    if (held := address_space_bytes()) is not None:
        _lower(resource.RLIMIT_AS, max(limits.memory_bytes, held + limits.headroom_bytes))


def _lower(limit: int, value: int, *, above: int = 0) -> None:
    """Set a soft limit, and the hard one `above` it; neither ever rises."""
    import resource

    _, hard = resource.getrlimit(limit)
    ceiling = value + above if hard == resource.RLIM_INFINITY else min(value + above, hard)
    resource.setrlimit(limit, (min(value, ceiling), ceiling))


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, for any reason. Only on Linux."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl was called
        os._exit(1)


def _refuse(event: str, arguments: tuple) -> None:
    """Raise PermissionError for operations that a job must not do: an audit hook."""
    if event == "open":
        path, _, flags = arguments
        if flags & _WRITING and path != os.devnull:
            raise PermissionError("a job may not open files for writing")
    elif event in _REFUSED_EVENTS:
        raise PermissionError(f"a job may not {_REFUSED_EVENTS[event]} ({event})")
    else:
        _refuse_network(event, arguments)


def _refuse_network(event: str, arguments: tuple) -> None:
    if event.startswith("socket.") and event != "socket.gethostname":
        raise PermissionError(f"a job may not use the network ({event})")

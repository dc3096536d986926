"""A wall by the kernel around a process that reads what a stranger wrote: it holds whatever code runs there.

Limits and an audit hook (`sandbox`) stop a library that helpfully downloads, caches or compiles; code that means harm lifts the
hook. The layers here are the kernel's, and no process can take them off itself (linux/prctl.h, seccomp.h, landlock.h, sched.h).

*Known limitations*: Linux alone has them, and a container may refuse some. They share the kernel with the process: a hole in the
kernel is a hole in the wall. What the process may read, it may read whole; time and memory are the limits' business.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sizer.processes.syscalls import filter_program

# What each layer does, for who is told that it is missing.
LAYERS = {
    "namespaces": "a network and shared memory of the job's own, empty",
    "landlock": "files: the interpreter's and the packages' folders, read-only, and nothing else",
    "seccomp": "a list of system calls, without sockets, programs, threads, new processes, or other processes",
}

_SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 4, 22, 38  # linux/prctl.h
_FILTER = 2  # SECCOMP_MODE_FILTER
_NEW_USER, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x40000000, 0x08000000  # linux/sched.h
# The same numbers on all architectures; linux/landlock.h, ABI 7 (Linux 6.15).
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_ASKED, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_FILE_RIGHTS = ((1, 13), (2, 14), (3, 15), (5, 16))  # from which ABI on there are how many rights
_TCP, _SCOPES = 0b11, 0b11  # bind and connect, from ABI 4 on; abstract sockets and signals, from ABI 6 on

PACKAGE = Path(__file__).resolve().parents[1]
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_MACHINE = (
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/sys/devices/system/cpu",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


def raise_wall(readable: Iterable[str]) -> dict[str, str]:
    """Raise the wall around the calling process, which has one thread, for good: the layers that are missing, each with why.

    `readable` are the files and folders that it may still read. Without privileges, and as root.
    """
    if sys.platform != "linux":
        return dict.fromkeys(LAYERS, f"{sys.platform} has no such thing")
    missing = {}
    _prctl(_SET_NO_NEW_PRIVS, 1)
    steps: dict[str, Callable[[], None]] = {
        "namespaces": _leave_namespaces,
        "landlock": lambda: _restrict_files(readable),
        "seccomp": _filter_calls,
    }
    for layer, step in steps.items():
        if layer == "seccomp":
            _prctl(_SET_DUMPABLE, 0)  # no other process of this user reads its memory; it may not be set again
        try:
            step()
        except OSError as error:
            missing[layer] = error.strerror or str(error)
    return missing


def readable_folders() -> tuple[str, ...]:
    """Return what an interpreter reads: its own folders, those of the packages, the system's libraries, and what the machine is."""
    own = sysconfig.get_paths()
    packages = {own[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders = packages | {path for path in sys.path if path}
    if (project := str(PACKAGE.parent)) not in packages:  # a checkout: beside the package are the operator's own files
        folders = {path for path in folders if os.path.realpath(path) != os.path.realpath(project)} | {str(PACKAGE)}
    for prefix in (sys.prefix, sys.base_prefix):
        folders |= {str(Path(prefix, name)) for name in ("lib", "lib64")}
    folders |= set(filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)))
    return tuple(sorted({*folders, *_LIBRARIES, *_MACHINE, *_DEVICES}))


def _leave_namespaces() -> None:
    libc = _libc()
    for flags in (_NEW_USER | _NEW_NETWORK | _NEW_IPC, _NEW_NETWORK | _NEW_IPC):  # the second is for root alone
        if libc.unshare(flags) == 0:
            return
    raise _last_error()


def _restrict_files(readable: Iterable[str]) -> None:
    """Leave the process nothing of the file system but to read what is named, and, from ABI 4 and 6 on, no TCP and no signals."""
    version = _system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_ASKED))
    rights = (1 << max(count for first, count in _FILE_RIGHTS if version >= first)) - 1
    words = [rights, *([_TCP] if version >= 4 else []), *([_SCOPES] if version >= 6 else [])]
    attributes = struct.pack(f"={len(words)}Q", *words)
    rules = _system_call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    try:
        for descriptor, is_folder in _opened(readable):
            allowed = _READ_FILE | (_READ_FOLDER if is_folder else 0)
            rule = struct.pack("=Qi", allowed, descriptor)
            _system_call(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
        _system_call(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))
    finally:
        os.close(rules)


def _opened(paths: Iterable[str]) -> Iterator[tuple[int, bool]]:
    """A descriptor of each path that is there, and whether it is a folder."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # not on this system, or not for this user: then nobody misses the permission
            continue
        try:
            yield descriptor, os.path.isdir(path)
        finally:
            os.close(descriptor)


def _filter_calls() -> None:
    code = filter_program(os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    _prctl(_SET_SECCOMP, _FILTER, program)


def _prctl(option: int, *arguments: object) -> None:
    filled = [*(ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments), *[ctypes.c_ulong(0)] * 4][
        :4
    ]
    if _libc().prctl(ctypes.c_int(option), *filled) != 0:
        raise _last_error()


def _system_call(number: int, *arguments: object) -> int:
    libc = _libc()
    libc.syscall.restype = ctypes.c_long
    if (result := libc.syscall(ctypes.c_long(number), *arguments)) < 0:
        raise _last_error()
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _last_error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

"""The kernel's restrictions of a process that reads untrusted input. They apply to any code that runs there.

Limits and an audit hook (`sandbox`) stop a library that downloads, caches or compiles; malicious code can remove the hook. The
layers here belong to the kernel, and no process can remove them itself (linux/prctl.h, seccomp.h, landlock.h, sched.h).

*Known limitations*: only Linux has these layers, and a container may refuse some. They share the kernel with the process, so a
vulnerability in the kernel bypasses them. The process can read the allowed files completely. Time and memory are bounded by
limits.
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

# The purpose of each layer, for the message that it is missing.
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
_FILE_RIGHTS = ((1, 13), (2, 14), (3, 15), (5, 16))  # (ABI, number of rights): the number of rights from this ABI on
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
    """Permanently raise the wall around the calling process, which has one thread.

    Return the missing layers with their reasons.

    `readable` are the files and folders that it may still read. Works with and without root.
    """
    if sys.platform != "linux":
        return dict.fromkeys(LAYERS, f"{sys.platform} does not support it")
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
    """Return the folders that an interpreter reads: its own, its packages, the system's libraries, and facts about the machine."""
    own = sysconfig.get_paths()
    packages = {own[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders = packages | {path for path in sys.path if path}
    # a checkout: the operator's own files are in the same folder as the package
    if (project := str(PACKAGE.parent)) not in packages:
        folders = {path for path in folders if os.path.realpath(path) != os.path.realpath(project)} | {str(PACKAGE)}
    for prefix in (sys.prefix, sys.base_prefix):
        folders |= {str(Path(prefix, name)) for name in ("lib", "lib64")}
    folders |= set(filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)))
    return tuple(sorted({*folders, *_LIBRARIES, *_MACHINE, *_DEVICES}))


def _leave_namespaces() -> None:
    libc = _libc()
    for flags in (_NEW_USER | _NEW_NETWORK | _NEW_IPC, _NEW_NETWORK | _NEW_IPC):  # the second is only possible for root
        if libc.unshare(flags) == 0:
            return
    raise _last_error()


def _restrict_files(readable: Iterable[str]) -> None:
    """Restrict the process to reading the named files; from ABI 4 on also refuse TCP, from ABI 6 on signals."""
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
    """Yield a descriptor of each existing path, and whether it is a folder."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # absent on this system or unreadable for this user: the permission is not needed
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

"""The kernel's restrictions of a process that reads untrusted input. They apply to any code that runs there.

Limits and an audit hook (`sandbox`) stop a library that downloads, caches or compiles; malicious code can remove the hook. The
layers here belong to the kernel, and no process can remove them itself (linux/prctl.h, seccomp.h, landlock.h, sched.h).

System calls that a job may make are listed by number on x86-64 and on 64-bit ARM; a filter program refuses all others. Numbers:
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h, Linux 6.12. Calls that 64-bit ARM does not have are
None there (open, pause: ARM has openat, ppoll). From number 424 on, all architectures use the same numbers. A call of a newer
kernel is in no table, and fails with ENOSYS, as on a kernel without it. A job has one thread: `clone` is refused to root and to
other users, because RLIMIT_NPROC only applies to other users.

*Known limitations*: only Linux has these layers, and a container may refuse some. They share the kernel with the process, so a
vulnerability in the kernel bypasses them. The process can read the allowed files completely. Time and memory are bounded by
limits.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

# Architectures by the name that uname gives: the number of their column below, and AUDIT_ARCH_* of linux/audit.h.
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000  # the bit of x86-64's other table of calls

_Numbers = tuple[int | None, int | None]

# Recorded by strace from jobs of every source, mode and task: newfstatat, mmap, munmap, read, openat, lseek, close, write, ioctl,
# getdents64, brk, futex, exit_group, getpid and madvise. The other calls are used by glibc, Python and torch for the same
# purposes on other kernels and in other versions. An issue that runs a new library in a job extends this table in the same
# commit.
ALLOWED: dict[str, _Numbers] = {
    # Memory of the process's own. mseal is for glibc 2.41 and later.
    "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "brk": (12, 214),
    "mincore": (27, 232), "membarrier": (324, 283), "get_mempolicy": (239, 236), "mseal": (462, 462),
    # Files that Landlock allows the process to read, and descriptors.
    "newfstatat": (262, 79), "read": (0, 63), "openat": (257, 56), "lseek": (8, 62), "close": (3, 57), "write": (1, 64),
    "getdents64": (217, 61), "open": (2, None), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "statx": (332, 291),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78),
    "getdents": (78, None), "getcwd": (79, 17), "statfs": (137, 43), "fstatfs": (138, 44), "pread64": (17, 67), "readv": (19, 65),
    "preadv": (295, 69), "preadv2": (327, 286), "writev": (20, 66), "fadvise64": (221, 223), "close_range": (436, 436),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None),
    "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441), "eventfd2": (290, 19),
    # Waiting, and signals to itself. A job that was paused in a sleep continues with restart_syscall.
    "futex": (202, 98), "futex_waitv": (449, 449), "futex_wake": (454, 454), "futex_wait": (455, 455), "futex_requeue": (456, 456),
    "set_robust_list": (273, 99), "rseq": (334, 293), "set_tid_address": (218, 96), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "restart_syscall": (219, 128), "exit": (60, 93), "exit_group": (231, 94),
    # Facts about the process and the machine. No timer: the alarm that ends a job cannot be changed.
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158),
    "getpgid": (121, 155), "getpgrp": (111, None), "getsid": (124, 156), "getpriority": (140, 141), "getrlimit": (97, 163),
    "getrusage": (98, 165), "times": (100, 153), "sysinfo": (99, 179), "uname": (63, 160), "getcpu": (309, 168),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "getrandom": (318, 278),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "arch_prctl": (158, None),
}  # fmt: skip
# Refused with EPERM, a clearer error than ENOSYS: programs, processes, threads, and the network.
_FORBIDDEN: dict[str, _Numbers] = {
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "socket": (41, 198),
    "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200),
}  # fmt: skip
# Allowed requests of `ioctl`: whether a file is a terminal, its width, and inheritance and waiting bytes of a descriptor (TCGETS,
# TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; asm-generic/ioctls.h). Other requests set flags and versions of files.
_IOCTL, _IOCTL_REQUESTS = (16, 29), (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# Allowed for `fcntl`: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC (linux/fcntl.h). Others lock files and signal
# owners.
_FCNTL, _FCNTL_COMMANDS = (72, 25), (0, 1, 2, 3, 4, 1030)
# Allowed for `prctl`: PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS,
# PR_GET_THP_DISABLE, and PR_SET_VMA, with which glibc names its memory (linux/prctl.h).
_PRCTL, _PRCTL_OPTIONS = (157, 167), (3, 15, 16, 21, 23, 39, 42, 0x53564D41)
# From this advice on (MADV_HWPOISON, asm-generic/mman-common.h) root takes the machine's own pages away.
_MADVISE, _HWPOISON = (28, 233), 100
_KILL, _TGKILL, _PRLIMIT = (62, 129), (234, 131), (302, 261)

# Instructions of linux/filter.h, and return values of linux/seccomp.h.
_LOAD, _EQUAL, _GREATER_OR_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_Check = tuple[int, int, int, bool]  # argument's offset, comparison, value, whether it must hold


def filter_program(process_id: int, machine: str = "") -> bytes:
    """Return the instructions (struct sock_filter, 8 bytes each) of a seccomp filter for a job with this process id.

    - An unknown call fails with ENOSYS.
    - A call that starts programs, processes, threads or connections fails with EPERM.
    - Other requests of ioctl and fcntl fail with ENOTTY and EINVAL.
    - A call of another architecture ends the process.
    - The process may signal itself and read its limits.

    Raises OSError for a machine without a table of numbers.
    """
    column, architecture = _architecture_of(machine)
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NUMBER),
    ]
    if column == 0:
        program += [_step(_GREATER_OR_EQUAL, _X32, 0, 1), _step(_RETURN, _KILL_PROCESS)]
    for calls, answer in ((ALLOWED, _ALLOW), (_FORBIDDEN, _ERROR | errno.EPERM)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                program += [_step(_EQUAL, number, 0, 1), _step(_RETURN, answer)]
    program += _only_among(_IOCTL[column], 1, _IOCTL_REQUESTS, errno.ENOTTY)
    program += _only_among(_FCNTL[column], 1, _FCNTL_COMMANDS, errno.EINVAL)
    program += _only_among(_PRCTL[column], 0, _PRCTL_OPTIONS, errno.EPERM)
    program += _only_if(_MADVISE[column], (_argument(2), _GREATER_OR_EQUAL, _HWPOISON, False))
    itself: _Check = (_argument(0), _EQUAL, process_id, True)
    program += _only_if(_KILL[column], itself)
    program += _only_if(_TGKILL[column], itself)
    nothing_new = ((_argument(2) + half, _EQUAL, 0, True) for half in (0, 4))
    program += _only_if(_PRLIMIT[column], (_argument(0), _EQUAL, 0, True), *nothing_new)
    return b"".join([*program, _step(_RETURN, _ERROR | errno.ENOSYS)])


def usable_numbers(machine: str = "") -> frozenset[int]:
    """Return the numbers of the calls that a job may make, with some arguments at least."""
    column, _ = _architecture_of(machine)
    rows = (*ALLOWED.values(), _IOCTL, _FCNTL, _PRCTL, _MADVISE, _KILL, _TGKILL, _PRLIMIT)
    return frozenset(number for row in rows if (number := row[column]) is not None)


def _architecture_of(machine: str) -> tuple[int, int]:
    """Return a machine's column in the tables and its AUDIT_ARCH; this machine's if none is named."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    return _ARCHITECTURES[machine]


def _only_if(number: int, *checks: _Check) -> list[bytes]:
    """Allow a call if all checks on its arguments succeed, refuse it otherwise."""
    body = []
    for offset, comparison, value, must in checks:
        body += [_step(_LOAD, offset), _step(comparison, value, *((1, 0) if must else (0, 1)))]
        body.append(_step(_RETURN, _ERROR | errno.EPERM))
    body.append(_step(_RETURN, _ALLOW))
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _only_among(number: int, index: int, requests: tuple[int, ...], error: int) -> list[bytes]:
    """Allow a call if an argument is one of some requests; any other fails with an error."""
    body = [_step(_LOAD, _argument(index))]
    for left, request in enumerate(reversed(requests)):
        body.insert(1, _step(_EQUAL, request, left + 1, 0))
    body += [_step(_RETURN, _ERROR | error), _step(_RETURN, _ALLOW)]
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _argument(index: int) -> int:
    """Return the offset of the low half of an argument, on little-endian machines."""
    return _ARGUMENTS + 8 * index


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


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

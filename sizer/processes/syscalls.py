"""The system calls that a job has no use for, by number on x86-64 and on 64-bit ARM, and the filter program that refuses them.

Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h, Linux 6.12. What 64-bit ARM does not have
(fork, rename: there they are clone, renameat2) is None there. From number 424 on all architectures count alike.
"""

from __future__ import annotations

import errno
import platform
import struct

# Architectures by the name that uname gives: the number of their column below, and AUDIT_ARCH_* of linux/audit.h.
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000  # the bit of x86-64's other table of calls

_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # The network, and other ways to talk to processes.
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211),
    "recvmsg": (47, 212), "sendmmsg": (307, 269), "recvmmsg": (299, 243), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "mq_open": (240, 180),
    # Other processes: what they hold, what they do, when they end. `kill` and `tgkill` are below.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "setpgid": (109, 154), "setsid": (112, 157), "setrlimit": (160, 164),
    # New processes and programs. `clone` is below; glibc takes it where `clone3` is not there.
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    # Files: what Landlock does not cover, and where it is missing.
    "creat": (85, None), "mknod": (133, None), "mknodat": (259, 33), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "lchown": (94, None), "fchown": (93, 55),
    "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # The kernel itself: mounts, namespaces, modules, keys, the clock, and interfaces in which holes were found.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "personality": (135, 92), "modify_ldt": (154, None), "iopl": (172, None),
    "ioperm": (173, None),
}  # fmt: skip
_CLONE3 = 435
# The first number that this table does not know: a newer kernel's open_tree_attr, file_getattr, file_setattr and all after them.
_UNKNOWN = 467
_IOCTL = (16, 29)
# What of `ioctl` a job may ask: whether a file is a terminal, how wide that is, and how a descriptor is passed on and waits
# (TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; asm-generic/ioctls.h). Flags and versions of files are set by others.
_ASKED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_CLONE, _KILL, _TGKILL, _PRCTL, _PRLIMIT = (56, 220), (62, 129), (234, 131), (157, 167), (302, 261)
_CLONE_THREAD = 0x00010000  # linux/sched.h
_SET_PDEATHSIG, _SET_DUMPABLE = 1, 4  # linux/prctl.h

# Instructions of linux/filter.h, and what linux/seccomp.h lets them return.
_LOAD, _EQUAL, _GREATER_OR_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_Check = tuple[int, int, int, bool]  # argument's offset, comparison, value, whether it must hold


def filter_program(process_id: int, machine: str = "") -> bytes:
    """The instructions (struct sock_filter, 8 bytes each) of a seccomp filter for a job with this process id.

    A refused call fails with EPERM (clone3, and what no table knew when this was written, with ENOSYS; ioctl with ENOTTY, as for a
    file that is no terminal), one of another architecture ends the process. Threads may be started, a
    process may signal itself and read its limits. Raises OSError for a machine without a table of numbers.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    column, architecture = _ARCHITECTURES[machine]
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        program += [_step(_GREATER_OR_EQUAL, _X32, 0, 1), _step(_RETURN, _KILL_PROCESS)]
    program += [_step(_GREATER_OR_EQUAL, _UNKNOWN, 0, 1), _step(_RETURN, _ERROR | errno.ENOSYS)]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            program += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ERROR | errno.EPERM)]
    program += [_step(_EQUAL, _CLONE3, 0, 1), _step(_RETURN, _ERROR | errno.ENOSYS)]
    program += _only_among(_IOCTL[column], _ASKED)
    itself: _Check = (_argument(0), _EQUAL, process_id, True)
    program += _only_if(_CLONE[column], (_argument(0), _ANY_BIT, _CLONE_THREAD, True))
    program += _only_if(_KILL[column], itself)
    program += _only_if(_TGKILL[column], itself)
    program += _only_if(
        _PRCTL[column], *((_argument(0), _EQUAL, option, False) for option in (_SET_PDEATHSIG, _SET_DUMPABLE))
    )
    nothing_new = ((_argument(2) + half, _EQUAL, 0, True) for half in (0, 4))
    program += _only_if(_PRLIMIT[column], (_argument(0), _EQUAL, 0, True), *nothing_new)
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def _only_if(number: int, *checks: _Check) -> list[bytes]:
    """Allow a call where all of the checks on its arguments hold, refuse it otherwise."""
    body = []
    for offset, comparison, value, must in checks:
        body += [_step(_LOAD, offset), _step(comparison, value, *((1, 0) if must else (0, 1)))]
        body.append(_step(_RETURN, _ERROR | errno.EPERM))
    body.append(_step(_RETURN, _ALLOW))
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _only_among(number: int, requests: tuple[int, ...]) -> list[bytes]:
    """Allow a call whose second argument is one of some requests; any other fails with ENOTTY."""
    body = [_step(_LOAD, _argument(1))]
    for left, request in enumerate(reversed(requests)):
        body.insert(1, _step(_EQUAL, request, left + 1, 0))
    body += [_step(_RETURN, _ERROR | errno.ENOTTY), _step(_RETURN, _ALLOW)]
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _argument(index: int) -> int:
    """The offset of the low half of an argument, on machines that store it first."""
    return _ARGUMENTS + 8 * index


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)

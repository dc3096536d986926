"""The wall around a job: what hostile code gets from inside, with it and without it, as root and as nobody."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sizer.processes.wall import ALLOWED, LAYERS, PACKAGE, filter_program, raise_wall, readable_folders, usable_numbers
from tests.processes.attacks import ATTACKS, NEEDED

NOBODY = 65534
HOSTILE = [attack.__name__ for attack in ATTACKS if attack not in NEEDED]
ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the wall is Linux's")


@pytest.fixture(scope="module", params=["this user", "nobody"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What each attack got, from `tests.processes.attacks`."""
    if request.param == "nobody" and os.getuid() != 0:
        pytest.skip("only root can become nobody")
    folder = tmp_path_factory.mktemp("attacked")
    for parent in folder.parents:  # pytest's own, which nobody else may enter
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    user = [str(NOBODY)] if request.param == "nobody" else []
    command = [sys.executable, "-m", "tests.processes.attacks", str(folder), *user]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120, cwd=Path(__file__).parents[2])
    results = json.loads(done.stdout)
    if isinstance(walled := results["connect"]["walled"], dict):
        pytest.skip(f"this system cannot raise the wall: {walled['missing']}")
    return {"nobody": bool(user), **results}


@ONLY_LINUX
@pytest.mark.parametrize("attack", HOSTILE)
def test_attack_succeeds_without_the_wall_and_not_with_it(found: dict, attack: str) -> None:
    assert found[attack]["open"], "an attack that never succeeds proves nothing"
    assert not found[attack]["walled"]


@ONLY_LINUX
@pytest.mark.parametrize("need", [need.__name__ for need in NEEDED])
def test_what_model_code_needs_is_still_there(found: dict, need: str) -> None:
    # nobody may lack it even without the wall: a thread under RLIMIT_NPROC, packages in root's home
    assert found[need]["open"] or found["nobody"]
    assert found[need]["walled"] == found[need]["open"]


def test_other_systems_have_no_layer_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert raise_wall(()) == dict.fromkeys(LAYERS, "darwin does not support it")


def decide(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """What a filter returns for a call: the few instructions of classic BPF that it is made of."""
    filled = (*arguments, *[0] * 6)[:6]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *filled)
    steps, at, held = list(struct.iter_unpack("=HBBI", program)), 0, 0
    while True:
        code, if_true, if_false, value = steps[at]
        if code == 0x06:
            return value
        if code == 0x20:
            (held,) = struct.unpack_from("=I", data, value)
            at += 1
        else:
            holds = {0x15: held == value, 0x35: held >= value, 0x45: held & value != 0}[code]
            at += 1 + (if_true if holds else if_false)


ALLOW, KILL, EPERM, EINVAL, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050016, 0x00050026


@pytest.mark.parametrize(
    ("machine", "architecture", "calls"),
    [
        ("x86_64", 0xC000003E, {"read": 0, "socket": 41, "execve": 59, "clone": 56, "kill": 62, "prctl": 157, "prlimit": 302,
                                   "madvise": 28, "fcntl": 72}),
        ("aarch64", 0xC00000B7, {"read": 63, "socket": 198, "execve": 221, "clone": 220, "kill": 129, "prctl": 167,
                                 "prlimit": 261, "madvise": 233, "fcntl": 25}),
    ],
)  # fmt: skip
def test_filter_by_architecture(machine: str, architecture: int, calls: dict[str, int]) -> None:
    program = filter_program(7, machine)

    def of(name: str, *arguments: int) -> int:
        return decide(program, architecture, calls[name], *arguments)

    assert decide(program, architecture ^ 1, calls["read"]) == KILL
    assert of("read") == ALLOW
    assert of("socket") == of("execve") == EPERM
    assert decide(program, architecture, 435) == ENOSYS
    assert of("clone", 0x003D0F00) == of("clone", 0x01200011) == EPERM  # pthread_create's flags, fork's
    assert (of("kill", 7, 9), of("kill", 8, 0), of("kill", 0, 9), of("kill", 2**64 - 7, 9)) == (
        ALLOW,
        EPERM,
        EPERM,
        EPERM,
    )
    assert of("prctl", 15) == of("prctl", 0x53564D41) == ALLOW
    assert of("prctl", 1) == of("prctl", 4, 1) == of("prctl", 22) == of("prctl", 100) == EPERM  # a newer kernel's, too
    assert of("madvise", 0, 4096, 4) == of("madvise", 0, 4096, 25) == ALLOW
    assert of("madvise", 0, 4096, 100) == of("madvise", 0, 4096, 101) == EPERM
    assert of("fcntl", 3, 1) == of("fcntl", 3, 1030) == ALLOW
    assert of("fcntl", 3, 8, 1) == of("fcntl", 3, 1024) == EINVAL  # F_SETOWN, F_SETLEASE
    assert of("prlimit", 0, 9, 0, 1) == ALLOW
    assert of("prlimit", 8, 9, 0, 1) == of("prlimit", 0, 9, 2**32, 0) == EPERM  # another's; a new limit


def test_machine_without_a_table_has_no_filter() -> None:
    with pytest.raises(OSError, match="no table of system calls for riscv64"):
        filter_program(7, "riscv64")


@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)])
def test_calls_of_a_newer_kernel_are_not_there(machine: str, architecture: int) -> None:
    program = filter_program(77, machine)
    assert decide(program, architecture, 462) == ALLOW  # mseal
    for number in (467, 468, 469, 500, 100_000):
        assert decide(program, architecture, number) == ENOSYS


@pytest.mark.parametrize(
    ("machine", "architecture", "ioctl"), [("x86_64", 0xC000003E, 16), ("aarch64", 0xC00000B7, 29)]
)
def test_descriptors_are_asked_for_terminals_alone(machine: str, architecture: int, ioctl: int) -> None:
    program, enotty = filter_program(77, machine), 0x00050019
    for request in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451):  # isatty, the terminal's size, waiting, inheriting
        assert decide(program, architecture, ioctl, 1, request) == ALLOW
    for request in (0x40086602, 0x40086604, 0x40087602, 0x5412, 0):  # file flags and versions, TIOCSTI
        assert decide(program, architecture, ioctl, 3, request) == enotty


@ONLY_LINUX
def test_beside_the_package_nothing_of_a_checkout_is_readable() -> None:
    folders = readable_folders()
    assert str(PACKAGE) in folders
    project = os.path.realpath(PACKAGE.parent)
    assert not any(os.path.realpath(folder) == project for folder in folders)


# By number on x86-64 and on 64-bit ARM: each was a way out of some sandbox, or sets what other processes read or feel.
DANGEROUS = {
    "ptrace": (101, 117), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "clone": (56, 220), "clone3": (435, 435), "unshare": (272, 97), "setns": (308, 268),
    "execve": (59, 221), "execveat": (322, 281), "socket": (41, 198), "sendmsg": (46, 211), "shmget": (29, 194),
    "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447), "mount": (165, 40),
    "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "mount_setattr": (442, 442), "statmount": (457, 457), "listmount": (458, 458), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "add_key": (248, 217),
    "keyctl": (250, 219), "init_module": (175, 105), "kexec_load": (246, 104), "reboot": (169, 142), "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444), "lsm_set_self_attr": (460, 460), "setuid": (105, 146), "setgid": (106, 144),
    "capset": (126, 91), "setrlimit": (160, 164), "setitimer": (38, 103), "timer_create": (222, 107), "splice": (275, 76),
    "vmsplice": (278, 75), "copy_file_range": (326, 285), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fchmodat2": (452, 452), "setxattr": (188, 5), "setxattrat": (463, 463), "quotactl_fd": (443, 443), "cachestat": (451, 451),
    "sched_setaffinity": (203, 122), "setpriority": (141, 140), "mbind": (237, 235), "move_pages": (279, 239), "sync": (162, 81),
}  # fmt: skip


@pytest.mark.parametrize(("column", "machine", "architecture"), [(0, "x86_64", 0xC000003E), (1, "aarch64", 0xC00000B7)])
def test_nothing_is_allowed_that_is_in_no_table(column: int, machine: str, architecture: int) -> None:
    program, usable = filter_program(77, machine), usable_numbers(machine)
    for number in set(range(1_000)) - usable:
        assert decide(program, architecture, number) in (EPERM, ENOSYS), number
    assert all(
        decide(program, architecture, one[column]) == ALLOW for one in ALLOWED.values() if one[column] is not None
    )
    assert not usable & {numbers[column] for numbers in DANGEROUS.values()}


@ONLY_LINUX
def test_a_job_has_no_call_that_is_in_no_table() -> None:
    # The test above says that the filter refuses each of these. Linux 6.14 lets uretprobe and uprobe of x86-64 pass every filter,
    # and ends a process that calls them from its own code (kernel/seccomp.c, arch/x86/kernel/uprobes.c).
    refused = sorted(set(range(600)) - usable_numbers() - {335, 336})
    code = (
        "import ctypes, json, sys\n"
        "from sizer.processes.wall import raise_wall, readable_folders\n"
        "missing = raise_wall(readable_folders())\n"
        "if 'seccomp' in missing:\n"
        "    sys.exit(json.dumps(missing))\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "found = {}\n"
        "for number in json.loads(sys.argv[1]):\n"
        "    found[number] = libc.syscall(number, -1, 0, 0, 0, 0, 0), ctypes.get_errno()\n"
        "print(json.dumps(found))\n"
    )
    command = [sys.executable, "-c", code, json.dumps(refused)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    if done.returncode == 1 and "seccomp" in done.stderr:
        pytest.skip(f"this system cannot raise the wall: {done.stderr}")
    found = json.loads(done.stdout)
    assert len(found) == len(refused) > 400
    assert {number: answer for number, answer in found.items() if answer not in ([-1, 1], [-1, 38])} == {}
    assert all(found[str(number)] == [-1, 38] for number in (467, 468, 469, 599))  # ENOSYS

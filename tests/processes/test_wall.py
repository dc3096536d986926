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

from sizer.processes.syscalls import filter_program
from sizer.processes.wall import LAYERS, PACKAGE, raise_wall, readable_folders
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
    assert raise_wall(()) == dict.fromkeys(LAYERS, "darwin has no such thing")


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


ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


@pytest.mark.parametrize(
    ("machine", "architecture", "calls"),
    [
        ("x86_64", 0xC000003E, {"read": 0, "socket": 41, "execve": 59, "clone": 56, "kill": 62, "prctl": 157, "prlimit": 302}),
        ("aarch64", 0xC00000B7, {"read": 63, "socket": 198, "execve": 221, "clone": 220, "kill": 129, "prctl": 167,
                                 "prlimit": 261}),
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
    assert (of("clone", 0x003D0F00), of("clone", 0x01200011)) == (ALLOW, EPERM)  # pthread_create's flags, fork's
    assert (of("kill", 7, 9), of("kill", 8, 0), of("kill", 0, 9), of("kill", 2**64 - 7, 9)) == (
        ALLOW,
        EPERM,
        EPERM,
        EPERM,
    )
    assert (of("prctl", 15), of("prctl", 1), of("prctl", 4, 1)) == (ALLOW, EPERM, EPERM)
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


@pytest.mark.parametrize(("machine", "architecture", "ioctl"), [("x86_64", 0xC000003E, 16), ("aarch64", 0xC00000B7, 29)])
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


@ONLY_LINUX
def test_a_job_has_no_call_beyond_the_table() -> None:
    code = (
        "import ctypes, json\n"
        "from sizer.processes.wall import raise_wall, readable_folders\n"
        "missing = raise_wall(readable_folders())\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "found = [(libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno()) for number in (467, 468, 469, 555)]\n"
        "print(json.dumps([missing, found]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    missing, found = json.loads(done.stdout)
    if "seccomp" in missing:
        pytest.skip(f"this system cannot raise the wall: {missing}")
    assert found == [[-1, 38]] * 4  # ENOSYS

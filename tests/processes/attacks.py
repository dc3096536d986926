"""What hostile code would try from inside a job, in the place of model code: each with the wall and without it.

    python -m tests.processes.attacks FOLDER [USER_ID]

prints a JSON object: attack -> {"open": what it got without the wall, "walled": what it got with it}, null where it was refused.
The process that starts the attackers stands for the job server: it holds a secret, a listening socket and a pipe.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from sizer.processes import sandbox
from sizer.processes.wall import raise_wall, readable_folders

SECRET = b"secret-" + b"of-the-server"
LIMITS = sandbox.Limits(cpu_seconds=20, memory_bytes=2**30, headroom_bytes=2**29)
READABLE = readable_folders()  # found out before this process becomes a user who may not look
libc = ctypes.CDLL(None, use_errno=True)


class Victim:
    """The process that the attackers were forked from, and what it holds."""

    def __init__(self, folder: Path):
        self.process_id = os.getpid()
        self.folder = folder
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.answers, self.pipe = os.pipe()
        self.buffer = ctypes.create_string_buffer(SECRET)
        self.address = ctypes.addressof(self.buffer)


def checked(result: int) -> int:
    """The result of a C function. Raises OSError where it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def reached(result: int) -> bool:
    """Whether a call with senseless arguments came as far as the kernel's own checks of them."""
    return result >= 0 or ctypes.get_errno() not in (1, 38)  # EPERM, ENOSYS


def connect(victim: Victim) -> object:
    with socket.socket() as client:
        client.connect(("127.0.0.1", victim.port))
        return client.getsockname()


def make_socket(victim: Victim) -> object:
    return checked(libc.socket(1, 1, 0))


def pair_sockets(victim: Victim) -> object:
    return [one.fileno() for one in socket.socketpair()]


def read_environment(victim: Victim) -> object:
    return len(Path(f"/proc/{victim.process_id}/environ").read_bytes())


def read_memory(victim: Victim) -> object:
    with open(f"/proc/{victim.process_id}/mem", "rb", buffering=0) as memory:
        memory.seek(victim.address)
        return memory.read(len(SECRET)) == SECRET


def read_memory_by_call(victim: Victim) -> object:
    mine = ctypes.create_string_buffer(len(SECRET))
    local = (ctypes.c_size_t * 2)(ctypes.addressof(mine), len(SECRET))
    remote = (ctypes.c_size_t * 2)(victim.address, len(SECRET))
    checked(libc.process_vm_readv(victim.process_id, local, 1, remote, 1, 0))
    return mine.raw == SECRET


def write_memory(victim: Victim) -> object:
    return os.open(f"/proc/{victim.process_id}/mem", os.O_RDWR)


def trace(victim: Victim) -> object:
    checked(libc.ptrace(0x4206, victim.process_id, 0, 0))  # PTRACE_SEIZE: does not stop it
    return "seized"


def send_signal(victim: Victim) -> object:
    return libc.kill(victim.process_id, 0) == 0


def send_signal_by_descriptor(victim: Victim) -> object:
    signal.pidfd_send_signal(os.pidfd_open(victim.process_id), 0)
    return "delivered"


def take_descriptor(victim: Victim) -> object:
    return checked(libc.syscall(438, os.pidfd_open(victim.process_id), victim.pipe, 0))


def forge_an_answer(victim: Victim) -> object:
    with open(f"/proc/{victim.process_id}/fd/{victim.pipe}", "wb", buffering=0) as pipe:
        return pipe.write(b'{"id":1,"result":{}}\n')


def use_what_was_inherited(victim: Victim) -> object:
    return os.write(victim.pipe, b'{"id":1,"result":{}}\n')


def lower_its_limits(victim: Victim) -> object:
    return resource.prlimit(victim.process_id, resource.RLIMIT_CORE, (0, resource.prlimit(victim.process_id, 4)[1]))


def slow_it_down(victim: Victim) -> object:
    os.setpriority(os.PRIO_PROCESS, victim.process_id, os.getpriority(os.PRIO_PROCESS, victim.process_id))
    return "set"


def pin_it(victim: Victim) -> object:
    os.sched_setaffinity(victim.process_id, os.sched_getaffinity(victim.process_id))
    return "pinned"


def start_a_process(victim: Victim) -> object:
    if (process := checked(libc.fork())) == 0:
        os._exit(0)
    return process


def run_a_program(victim: Victim) -> object:
    os.execv("/bin/true", ["true"])  # which ends with 0: seen by who waits for this process
    return None


def outlive_the_server(victim: Victim) -> object:
    return checked(libc.prctl(1, 0, 0, 0, 0)) == 0


def leave_the_group(victim: Victim) -> object:
    os.setpgid(0, os.getpgid(victim.process_id))
    return "left"


def become_dumpable(victim: Victim) -> object:
    return checked(libc.prctl(4, 1, 0, 0, 0)) == 0


def read_a_file(victim: Victim) -> object:
    return (victim.folder / "file").read_text()


def read_accounts(victim: Victim) -> object:
    return len(Path("/etc/passwd").read_text())


def list_a_folder(victim: Victim) -> object:
    return os.listdir(victim.folder)


def make_a_file(victim: Victim) -> object:
    return checked(libc.open(os.fsencode(victim.folder / "made"), os.O_WRONLY | os.O_CREAT, 0o600))


def truncate_a_file(victim: Victim) -> object:
    return checked(libc.truncate(os.fsencode(victim.folder / "file"), 0)) == 0


def remove_a_file(victim: Victim) -> object:
    os.unlink(victim.folder / "removed")
    return "removed"


def rename_a_file(victim: Victim) -> object:
    os.rename(victim.folder / "renamed", victim.folder / "renamed too")
    return "renamed"


def change_the_mode(victim: Victim) -> object:
    os.chmod(victim.folder / "file", 0o600)
    return "changed"


def change_the_time(victim: Victim) -> object:
    os.utime(victim.folder / "file", (0, 0))
    return "changed"


def make_a_folder(victim: Victim) -> object:
    os.mkdir(victim.folder / "folder")
    return "made"


def link_a_file(victim: Victim) -> object:
    os.symlink("/etc", victim.folder / "link")
    return "linked"


def share_memory(victim: Victim) -> object:
    shared = checked(libc.shmget(0, 4096, 0o1600))
    return checked(libc.shmctl(shared, 0, None)) == 0  # removes it


def use_keys(victim: Victim) -> object:
    return checked(libc.syscall(250, 0, -3, 1))


def use_rings(victim: Victim) -> object:
    return reached(libc.syscall(425, 1, None))


def mount(victim: Victim) -> object:
    return reached(libc.mount(None, None, None, 0, None))


def leave_namespaces(victim: Victim) -> object:
    return checked(libc.unshare(0x10000000)) == 0


def start_a_thread(victim: Victim) -> object:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(1))
    thread.start()
    thread.join()
    return found


def put_off_its_end(victim: Victim) -> object:
    signal.setitimer(signal.ITIMER_REAL, 3600.0)
    return "put off"


def have_its_pipe_signal_another(victim: Victim) -> object:
    return fcntl.fcntl(0, fcntl.F_SETOWN, victim.process_id) == 0


def lock_a_file(victim: Victim) -> object:
    fcntl.lockf(os.open("/dev/zero", os.O_RDONLY), fcntl.LOCK_SH)
    return "locked"


# Not attacks: what model code needs. These must succeed behind the wall, too.
def read_a_package(victim: Victim) -> object:
    return len(Path(sandbox.__file__).read_bytes()) and len(Path(json.__file__).read_bytes())


def read_own_limits(victim: Victim) -> object:
    return resource.getrlimit(resource.RLIMIT_AS)


def signal_itself(victim: Victim) -> object:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.raise_signal(signal.SIGUSR1)
    return "raised"


NEEDED = (read_a_package, read_own_limits, signal_itself)
ATTACKS = tuple(
    value
    for value in list(globals().values())
    if callable(value) and getattr(value, "__code__", None) and value.__code__.co_varnames[:1] == ("victim",)
)


UNLIMITED = (start_a_process, start_a_thread)  # RLIMIT_NPROC stops them too, but not root's


def run(attack: Callable[[Victim], object], victim: Victim, *, walled: bool) -> object:
    """What an attack got in a process of its own; None where it got nothing."""
    source, sink = os.pipe()
    if (process := os.fork()) == 0:
        try:
            os.setpgid(0, 0)
            sink = os.dup2(sink, 100)
            if walled:
                os.closerange(3, 100)  # as `sizer.service.job_child` does it
            sandbox.confine(20, limits=None if attack in UNLIMITED else LIMITS, parent=victim.process_id)
            missing = raise_wall(READABLE) if walled else {}
            if missing.keys() - {"namespaces"}:  # which a container may refuse; the other two hold without them
                os.write(sink, json.dumps({"missing": missing}).encode())
                os._exit(3)
            # The audit hook, lifted by assignments.
            sandbox._WRITING, sandbox._refuse_network = 0, lambda *_: None
            sandbox._REFUSED_EVENTS.clear()
            os.write(sink, json.dumps(attack(victim)).encode())
        except BaseException:  # whatever stopped it
            os._exit(1)
        os._exit(0)
    os.close(sink)
    with open(source, "rb") as pipe:
        found = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if attack is run_a_program and status == 0 and not found:
        return "ran"
    return json.loads(found) if found else None


def main() -> None:
    """Run every attack, without the wall and with it."""
    folder, user = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else os.getuid()
    if user != os.getuid():
        os.chown(folder, user, user)
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        checked(libc.prctl(4, 1, 0, 0, 0))  # a process that has changed its user is not dumpable
    for name in ("file", "removed", "renamed"):
        (folder / name).write_text("canary")
    victim = Victim(folder)
    found = {}
    for attack in ATTACKS:
        kinds = {"walled": True, "open": False}  # in this order: what succeeds in the open may change the folder
        found[attack.__name__] = {kind: run(attack, victim, walled=walled) for kind, walled in kinds.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()

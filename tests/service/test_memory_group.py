"""The control group of the jobs: made where the app's group is its own, put back at the end; and a job that it ends.

What needs a kernel with control groups of version 2 to write in runs there alone; a folder stands for it elsewhere.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sizer.base.errors import JobError
from sizer.base.units import MIB
from sizer.service import job_memory
from sizer.service.job_memory import APP, JOBS, MemoryGroup, join
from tests.processes.running import is_running, wait_until
from tests.service.control_groups import Group, real_group, stand_in
from tests.service.test_server import RawServer

BUDGET = 300 * MIB


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    """The group of this process, which stands in a folder, with this process in it and two more that it started."""
    for name in ("CONTROL_GROUPS", "OWN_GROUP"):
        monkeypatch.setattr(job_memory, name, getattr(job_memory, name))
    monkeypatch.setattr(job_memory.os, "getppid", os.getpid)  # this process stands for the app
    group = stand_in(str(tmp_path / "cgroup"))
    children = [
        subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in (os.getpid(), *(child.pid for child in children)):
        (group / "cgroup.procs").write_text(str(process))
    yield group
    for child in children:
        child.communicate()


def processes(group: Path) -> set[str]:
    return set((group / "cgroup.procs").read_text().split())


def test_jobs_have_a_group_below_the_apps_and_everything_is_put_back(own):
    before = processes(own)
    assert len(before) == 3
    group = MemoryGroup(BUDGET)
    assert (processes(own), processes(own / APP)) == (set(), before)
    assert (own / JOBS / "memory.max").read_text() == str(BUDGET)
    assert (own / JOBS / "memory.swap.max").read_text() == "0"
    assert "memory" in (own / JOBS / "cgroup.controllers").read_text()
    group.close()
    assert processes(own) == before
    assert [one for one in own.iterdir() if one.is_dir()] == []
    assert (own / "cgroup.subtree_control").read_text() == ""


def test_servers_of_one_app_share_the_group_until_the_last_has_ended(own):
    first = MemoryGroup(BUDGET)
    job_memory.OWN_GROUP.write_text(f"0::/{APP}\n")  # where a server is that is started now
    second = MemoryGroup(BUDGET)
    assert second.jobs == first.jobs
    first.close()
    assert (own / JOBS).exists()
    second.close()
    assert not (own / JOBS).exists() and len(processes(own)) == 3


def test_a_job_moves_into_the_group_and_stays_where_it_is_when_that_has_gone(own):
    group = MemoryGroup(BUDGET)
    join(group.jobs)
    assert processes(own / JOBS) == {str(os.getpid())}
    group.close()  # there is a process in it
    assert (own / JOBS).exists()
    join(own / "gone")
    assert processes(own / JOBS) == {str(os.getpid())}


def test_each_job_that_the_kernel_has_ended_is_told_once(own):
    events = own / JOBS / "memory.events"
    (own / JOBS).mkdir()
    events.write_text("oom 4\noom_kill 4\noom_group_kill 0\n")  # before this server
    group = MemoryGroup(BUDGET)
    assert not group.has_killed()
    events.write_text("oom 9\noom_kill 6\noom_group_kill 0\n")
    assert [group.has_killed() for _ in range(3)] == [True, True, False]
    group.close()


def no_memory(own: Group) -> None:
    (own / "cgroup.controllers").write_text("cpu pids\n")


def a_stranger(own: Group) -> None:
    Path(own, "cgroup.procs").write_text(f"{os.getpid()} {os.getppid()} 0")  # 0: of another namespace of processes


def another_group(own: Group) -> None:
    (own / "other").mkdir()


def the_machine(own: Group) -> None:
    (own / "memory.max").unlink()


@pytest.mark.parametrize(
    ("change", "why"),
    [(no_memory, "no control group of version 2 with a controller of memory"), (a_stranger, "other processes in it than"),
     (another_group, "divided already"), (the_machine, "of the whole machine")],
)  # fmt: skip
def test_a_group_that_is_not_the_apps_own_is_left_as_it_is(own, change, why):
    change(own)
    before = {path: path.read_text() for path in own.rglob("*") if path.is_file()}
    with pytest.raises(OSError, match=why):
        MemoryGroup(BUDGET)
    assert {path: path.read_text() for path in own.rglob("*") if path.is_file()} == before


def test_what_was_begun_is_undone_where_the_kernel_refuses(own, monkeypatch):
    before, write = processes(own), Group.write_text

    def refuse(path: Group, text: str) -> int:
        if path.name == "memory.max":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(path, text)

    monkeypatch.setattr(Group, "write_text", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        MemoryGroup(BUDGET)
    assert processes(own) == before
    assert [one for one in own.iterdir() if one.is_dir()] == []


def test_a_system_without_such_groups_is_told_so(own):
    job_memory.OWN_GROUP.write_text("4:memory:/docker/1\n")
    with pytest.raises(OSError, match="this system has no control groups of version 2"):
        MemoryGroup(BUDGET)


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts servers whose process runs some code first."""
    servers = []

    def begin(code: str, **settings: object) -> RawServer:
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        servers.append(RawServer(tmp_path / "home", budget_bytes=BUDGET, **settings))
        return servers[-1]

    yield begin
    for server in servers:
        server.__exit__()


STOOD_IN = """
import os
from tests.service.control_groups import stand_in
own = stand_in({folder!r})
(own / "cgroup.procs").write_text(str(os.getpid()))
"""


def test_a_job_that_the_kernel_ends_for_its_memory_is_told_so_and_not_tried_again(tmp_path, begin):
    folder = tmp_path / "cgroup"
    server = begin(STOOD_IN.format(folder=str(folder)))
    assert job_memory.GROUP not in server.read()["missing"]
    assert (folder / JOBS / "memory.max").read_text() == str(BUDGET)
    process = server.hold()
    assert str(process) in processes(folder / JOBS)
    (folder / JOBS / "memory.events").write_text("oom_kill 1\n")
    os.kill(process, 9)
    assert "it held most when all jobs together needed more than 300.00 MiB" in server.read_until(1, "error")["what"]
    process = server.hold(2)
    os.kill(process, 9)  # by whomever: it is begun again once
    server.read_until(2, "progress")


def test_a_paused_job_that_the_kernel_ends_begins_again(tmp_path, begin):
    folder = tmp_path / "cgroup"
    server = begin(STOOD_IN.format(folder=str(folder)), max_jobs=1)
    assert "ready" in server.read()
    server.submit(1, "hold", address="10.0.0.1")
    process = held(server, 1)
    server.submit(2, "hold", address="10.0.0.2")
    held(server, 2)  # the first is paused
    (folder / JOBS / "memory.events").write_text("oom_kill 1\n")
    os.kill(process, 9)
    wait_until(lambda: not is_running(process))
    time.sleep(0.5)  # the server learns of it a moment later, and says nothing of a paused job
    server.write(b'{"cancel": 2}\n')
    assert held(server, 1) != process


def held(server: RawServer, number: int) -> int:
    """The process id of a job that waits for ever, once it does."""
    while not (text := str(server.read_until(number, "progress", "error"))).startswith("holding in "):
        assert "what" not in text
    return int(text.split()[-1])


def test_a_server_without_a_group_says_what_is_done_instead(begin):
    server = begin("from sizer.service import job_memory as budget\nbudget.CONTROL_GROUPS /= 'nowhere'\n")
    assert server.read()["missing"][job_memory.GROUP].endswith("their memory is polled four times a second")


REAL = "from pathlib import Path\nPath({group!r}, 'cgroup.procs').write_text('0')\n"


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A group of the kernel's for a server."""
    try:
        group = real_group()
    except OSError as error:
        pytest.skip(f"no control group of version 2 with a controller of memory can be made here: {error}")
    yield group
    wait_until(lambda: not processes(group))
    group.rmdir()


def test_the_kernel_ends_the_job_that_holds_most(real, begin):
    server = begin(REAL.format(group=str(real)))
    assert job_memory.GROUP not in server.read()["missing"]
    assert (int((real / JOBS / "memory.max").read_text()), processes(real)) == (BUDGET, set())
    assert str(server.process.pid) in processes(real / APP)
    server.submit(1, "fill_and_hold", "100")
    assert server.read_until(1, "progress")
    wait_until(lambda: int((real / JOBS / "memory.current").read_text()) > 100 * MIB)
    with pytest.raises(JobError, match=r"it held most when all jobs together needed more than 300.00 MiB"):
        server.finish("fill", "2000")  # at once: no look in between
    assert processes(real / JOBS)  # the other one goes on
    assert server.finish("fill", "50") == {}
    server.process.stdin.close()
    server.process.wait(30)
    assert [one for one in real.iterdir() if one.is_dir()] == []

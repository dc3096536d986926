"""The memory of all jobs together: what is read of it, and what becomes of a job too many."""

from __future__ import annotations

import mmap
import os

import pytest

from sizer.base.errors import JobError
from sizer.base.units import GIB, MIB
from sizer.service import job_memory
from sizer.service.job_memory import budget_bytes, host_bytes, private_bytes
from sizer.service.settings import Settings
from sizer.service.variables import JOB_SECONDS, JOBS, LIMITS, MEMORY, SPARES, WAITING
from tests.service.test_server import start  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("machine", "groups", "bytes_"),
    [("MemTotal: 1000 kB\n", {".": "max\n"}, 1_024_000), ("MemTotal: 1000 kB\n", {".": "5000\n"}, 5000),
     (None, {".": "5000\n"}, 5000), (None, {}, None), ("MemTotal: 1000 kB\n", {"system.slice": "7000\n"}, 7000),
     (None, {"system.slice/sizer.service": "7000\n", "system.slice": "9000\n"}, 7000)],
)  # fmt: skip
def test_the_host_has_what_the_machine_or_its_control_groups_have(tmp_path, monkeypatch, machine, groups, bytes_):
    for name in ("MACHINE", "CONTROL_GROUPS", "OWN_GROUP"):
        monkeypatch.setattr(job_memory, name, tmp_path / name)
    if machine is not None:
        (tmp_path / "MACHINE").write_text(machine)
    (tmp_path / "OWN_GROUP").write_text("4:memory:/other\n0::/system.slice/sizer.service\n")
    for group, text in groups.items():
        (tmp_path / "CONTROL_GROUPS" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "CONTROL_GROUPS" / group / "memory.max").write_text(text)
    monkeypatch.delenv(MEMORY.name, raising=False)
    assert host_bytes() == bytes_
    assert budget_bytes() == (bytes_ or 0) // 2
    monkeypatch.setenv(MEMORY.name, "3")
    assert budget_bytes() == 3 * GIB


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS], ids=["private", "shared"])
def test_memory_that_no_file_holds_is_a_jobs_own(flags):
    # mapped anew: an allocation may be cut from memory that this process has freed and not returned to the system
    with mmap.mmap(-1, 64 * MIB, flags=flags) as block:
        before = private_bytes(os.getpid())
        block.write(bytes(len(block)))
        assert private_bytes(os.getpid()) - before == pytest.approx(len(block), rel=0.1)
    assert private_bytes(2**30) == 0


def test_operator_sets_limits_by_the_environment(monkeypatch):
    for limit, text in ((JOBS, "3"), (WAITING, "5"), (JOB_SECONDS, "7"), (SPARES, "0")):
        monkeypatch.setenv(limit.name, text)
    settings = Settings(preload=())
    assert (settings.max_jobs, settings.max_waiting, settings.wall_seconds, settings.spares) == (3, 5, 7.0, 0)
    monkeypatch.setenv(JOBS.name, "none")
    with pytest.raises(
        JobError, match=r"SIZER_JOBS \(jobs that run at once\) cannot be used: given 'none', allowed a whole"
    ):
        Settings(preload=())


def test_no_variable_is_told_twice():
    assert len({limit.name for limit in LIMITS}) == len(LIMITS)


def test_job_that_holds_most_is_ended_where_all_hold_too_much(start):  # noqa: F811
    server = start(budget_bytes=300 * MIB)
    assert server.finish("fill", "100") == {}
    server.submit(1, "fill_and_hold", "100")
    server.submit(2, "fill_and_hold", "250")
    error = server.read_until(2, "error")
    assert "when all jobs together held more than 300.00 MiB" in error["what"]
    server.write(b'{"cancel": 1}\n')
    assert server.read_until(1, "error")["what"] == "the job was cancelled"
    assert server.finish("fill", "100") == {}


@pytest.mark.exhaustive
def test_paused_job_is_stopped_for_its_memory_and_begins_again(start):  # noqa: F811
    server = start(budget_bytes=300 * MIB, max_jobs=1)
    server.submit(1, "fill_and_sleep", "200", address="10.0.0.1")
    server.read_until(1, "progress")
    server.submit(2, "fill_and_sleep", "201", address="10.0.0.2")
    results, processes = {}, {1: set(), 2: set()}
    while len(results) < 2:
        message = server.read()
        assert "error" not in message
        if "result" in message:
            results[message["id"]] = message["result"]
        elif (said := message.get("progress", "")).startswith("holding in "):
            processes[message["id"]].add(said)
    assert results == {1: {}, 2: {}}
    assert len(processes[1]) > 1

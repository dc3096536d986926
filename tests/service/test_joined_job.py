"""Jobs that each make a part of one answer, on scripted jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from sizer.base.errors import JobError
from sizer.catalogue.gpus import GPUS, in_parts
from sizer.report.decision import DeviceReport, DeviceRow
from sizer.service.client import JobClient
from sizer.service.job import JoinedJob
from sizer.service.settings import Settings
from tests.ui.decisions import served_devices_for


@dataclass
class Scripted:
    """A job that is as far as a test says."""

    partial: object = None
    value: object = None
    error: JobError | None = None
    progress: str = ""
    parts: int = 0
    cancelled: bool = False
    left: bool = False

    @property
    def done(self) -> bool:
        return self.value is not None or self.error is not None

    def result(self, timeout: float | None = None) -> object:
        if self.error is not None:
            raise self.error
        return self.value

    def cancel(self) -> None:
        self.cancelled = True

    def leave(self) -> None:
        self.left = True


def joined(*jobs: Scripted) -> JoinedJob:
    return JoinedJob(jobs, lambda found: [one for one in found if one is not None] or None)


def test_the_result_is_there_once_every_part_is():
    first, second = Scripted(progress="one"), Scripted(progress="two", parts=3)
    job = joined(first, second)
    assert (job.partial, job.result(0), job.done, job.progress, job.parts) == (None, None, False, "one", 3)
    first.value, second.partial = "a", "half of b"
    assert (job.partial, job.result(0), job.done, job.progress) == (["a", "half of b"], None, False, "two")
    second.value = "b"
    assert (job.partial, job.result(0), job.done, job.progress) == (["a", "b"], ["a", "b"], True, "")


def test_what_one_part_is_refused_for_ends_the_others_and_what_was_known_stays():
    first, second = Scripted(partial="half of a"), Scripted(partial="half of b", error=JobError("stopped"))
    job = joined(first, second)
    with pytest.raises(JobError, match="stopped"):
        job.result(0)
    assert first.cancelled and second.cancelled
    assert job.partial == ["half of a", "half of b"]


def test_leaving_leaves_every_part():
    jobs = Scripted(), Scripted()
    joined(*jobs).leave()
    assert all(job.left for job in jobs)


def row(key: str) -> DeviceRow:
    return DeviceRow(gpu=key, name=GPUS[key].name, total_bytes=GPUS[key].total_bytes, query="")


@pytest.mark.parametrize("max_jobs", [1, 2, 8])
def test_which_gpu_is_asked_in_as_many_jobs_as_may_run_and_no_more_than_two(max_jobs: int, monkeypatch):
    asked = []

    def submit(self: JobClient, task: str, query: str, config: str | None, read: object, part: str) -> Scripted:
        asked.append(part)
        number, parts = map(int, part.split("/"))
        mine = sorted(in_parts(parts)[number - 1], key=lambda gpu: gpu.key)
        known = DeviceReport(query=query, rows=(row(mine[0].key),), pending=tuple(gpu.key for gpu in mine[1:]))
        return Scripted(partial=known if number == 1 else None)

    monkeypatch.setattr(JobClient, "_submit", submit)
    job = JobClient(Settings(max_jobs=max_jobs)).submit_devices("arch=torchvision:resnet18")
    assert asked == [["1/1"], ["1/2", "2/2"]][max_jobs > 1]
    assert len(job.partial.rows) == 1
    assert sorted([*job.partial.pending, job.partial.rows[0].gpu]) == sorted(GPUS)
    rows = [[row(gpu.key) for gpu in part] for part in in_parts(len(asked))]
    for scripted, whole in zip(job.jobs, rows, strict=True):
        scripted.value = DeviceReport(query="", rows=tuple(whole))
    assert [one.total_bytes for one in job.result(0).rows] == sorted(gpu.total_bytes for gpu in GPUS.values())
    assert job.result(0).pending == ()


def test_servers_of_both_parts_are_sorted_by_what_they_hold(monkeypatch):
    def submit(self: JobClient, task: str, query: str, config: str | None, read: object, part: str) -> Scripted:
        whole, first = served_devices_for(query), part.startswith("1")
        return Scripted(value=replace(whole, rows=whole.rows[1:] if first else whole.rows[:1]))

    monkeypatch.setattr(JobClient, "_submit", submit)
    found = JobClient(Settings(max_jobs=2)).submit_devices("arch=hf:qwen3-8b&mode=serve").result(0)
    assert ([row.gpu for row in found.rows], found.serves) == (["h100-80gb", "l4", "m2-ultra-64gb"], True)

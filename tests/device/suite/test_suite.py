"""The suite on a scripted runner: what is measured, passed over, left, and written of cases that fail."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sizer.__main__ import main
from sizer.base.errors import DeviceError, JobError, RequestError
from sizer.catalogue.modes import MODES
from sizer.commands import measurements as command
from sizer.device.comparison.row import family_of
from sizer.device.machine.inventory import Inventory
from sizer.device.record.measurement import DeviceFacts, DeviceOutOfMemory, KernelRecord
from sizer.device.record.recording import Measured, read_measured
from sizer.device.suite import suite
from sizer.device.suite.cases import Case, cases_for, list_cases, list_small_cases
from sizer.device.suite.suite import (
    CASE_SECONDS,
    NOTHING,
    Runner,
    choose_cases,
    delete_failures,
    folder_for,
    run_suite,
    short_name,
    without_paths,
)
from sizer.query.text import parse_query
from tests.device.replayed import disagreements
from tests.device.suite import slow_device
from tests.tape.tapes import make_tape

H200 = DeviceFacts(device="cuda:0", name="NVIDIA H200", total_bytes=143156 * 2**20, capability=(9, 0))
CASES = tuple(Case(name=name, query=slow_device.QUERY) for name in ("one", "two", "three"))


class ScriptedBench:
    """Each process takes `spends` seconds, or what it is allowed; `fails` gives the error of a case."""

    def __init__(self, *, spends: float = 10, fails: dict[str, Exception] | None = None):
        self.spends, self.fails = spends, fails or {}
        self.clock = 0.0
        self.asked: list[tuple[str, str, float]] = []

    def measure(self, case: Case, seconds: float) -> Measured:
        self._work("measure", case, seconds)
        return slow_device.run(make_tape([("w", 512)], marks=[(1, "load")]), [1])

    def kernels(self, case: Case, seconds: float) -> KernelRecord:
        self._work("kernels", case, seconds)
        return KernelRecord(query=case.query, device=H200, versions={}, rows=())

    def _work(self, what: str, case: Case, seconds: float) -> None:
        self.asked.append((what, case.name, seconds))
        self.clock += min(self.spends, seconds)
        if self.spends > seconds:
            raise JobError("measuring took too long")
        if case.name in self.fails:
            raise self.fails[case.name]

    def now(self) -> float:
        return self.clock

    def date(self) -> datetime:
        return datetime(2026, 11, 21, 12, 30, tzinfo=UTC)


def run(folder: Path, runner: ScriptedBench, *, record: bool = False, seconds: float = 540, facts: DeviceFacts = H200):
    said: list[str] = []
    left = run_suite(CASES, facts, folder, runner, record=record, seconds=seconds, say=said.append)
    return left, said


def done(runner: ScriptedBench) -> list[tuple[str, str]]:
    return [(what, name) for what, name, _ in runner.asked]


def test_every_case_is_measured_before_any_kernel_is_recorded(tmp_path):
    runner = ScriptedBench()
    left, said = run(tmp_path, runner, record=True)
    assert left == ()
    assert done(runner) == list(itertools.product(("measure", "kernels"), ("one", "two", "three")))
    assert len(said) == 6
    # 512 B requested: 512 B allocated in one segment of 2 MiB
    assert said[0] == f"{'one':46} peak allocated 512 B, reserved 2.00 MiB  (10 s)"
    assert {case.name for case in read_measured(tmp_path) if case.kernels is not None} == {"one", "two", "three"}


def test_a_second_run_goes_on_where_the_first_stopped(tmp_path):
    # 75 s: the first case ends at 25, the second at 50; 25 s are too few (30) to start the third.
    first = ScriptedBench(spends=25)
    left, _ = run(tmp_path, first, seconds=75)
    assert (left, done(first)) == (("three",), [("measure", "one"), ("measure", "two")])
    second = ScriptedBench()
    left, _ = run(tmp_path, second)
    assert (left, done(second)) == ((), [("measure", "three")])


def test_a_case_that_is_cut_short_by_the_end_of_the_run_is_left(tmp_path):
    # The first needs 100 s of 150; the second has 50 of the 100 it needs and is killed; the third has none.
    runner = ScriptedBench(spends=100)
    left, said = run(tmp_path, runner, seconds=150)
    assert (left, len(said)) == (("two", "three"), 1)
    assert [seconds for _, _, seconds in runner.asked] == [150, 50]
    assert [case.name for case in read_measured(tmp_path)] == ["one"]


def test_a_case_that_takes_longer_than_any_may_is_a_result(tmp_path):
    runner = ScriptedBench(spends=CASE_SECONDS + 1)
    left, said = run(tmp_path, runner, seconds=2.5 * CASE_SECONDS)
    assert left == ("three",)
    assert "failed: JobError: measuring took too long" in said[0]


def test_a_failing_case_is_written_with_its_reason_and_does_not_stop_the_rest(tmp_path):
    error = RuntimeError("cannot open /opt/somewhere/lib/libcuda.so.1: no such file")
    left, said = run(tmp_path, ScriptedBench(fails={"two": error}))
    assert (left, len(said)) == ((), 3)
    _, _, two = sorted(read_measured(tmp_path), key=lambda case: case.name)
    assert two.name == "two"
    failed = two.measured.measurement
    assert failed.failure == "RuntimeError: cannot open libcuda.so.1: no such file"
    assert (failed.phases, failed.source, failed.device) == ((), NOTHING, H200)
    assert failed.measured_at == "2026-11-21T12:30:00+00:00"
    again = ScriptedBench()
    run(tmp_path, again)
    assert done(again) == []


def test_what_failed_is_measured_again_when_asked(tmp_path):
    runner = ScriptedBench(fails={"two": RuntimeError("for once")})
    run(tmp_path, runner)
    runner.fails = {"three": JobError("for once")}
    run(tmp_path, runner, record=True)
    again = ScriptedBench()
    delete_failures(CASES, tmp_path)
    left, _ = run(tmp_path, again, record=True)
    assert (left, done(again)) == ((), [("measure", "two"), ("kernels", "two"), ("kernels", "three")])
    assert all(case.measured.measurement.failure is None for case in read_measured(tmp_path))


def test_failing_kernels_are_written_too(tmp_path):
    runner = ScriptedBench()
    run(tmp_path, runner)
    runner.fails = {"one": JobError("the process was killed")}
    left, said = run(tmp_path, runner, record=True)
    assert left == ()
    assert said[0] == f"{'one':46} kernels: 0 kinds of calls, then the process was killed  (10 s)"
    one = next(case for case in read_measured(tmp_path) if case.name == "one")
    assert one.kernels.failure == "the process was killed"


def test_a_device_that_is_gone_ends_the_suite(tmp_path):
    with pytest.raises(DeviceError, match="no such device"):
        run(tmp_path, ScriptedBench(fails={"one": DeviceError("no such device")}))
    assert read_measured(tmp_path) == ()


def test_where_nothing_counts_peaks_kernels_are_not_recorded(tmp_path):
    mps = DeviceFacts(device="mps", name="GPU of Apple M2 Ultra", total_bytes=2**36)
    runner = ScriptedBench()
    left, said = run(tmp_path, runner, record=True, facts=mps)
    assert (left, {what for what, _, _ in runner.asked}) == ((), {"measure"})
    assert said[-1] == "mps has no peak counter: memory inside its kernels cannot be recorded"


def test_out_of_memory_is_said(tmp_path):
    class SmallDevice(ScriptedBench):
        def measure(self, case: Case, seconds: float) -> Measured:
            measured = super().measure(case, seconds)
            full = DeviceOutOfMemory(
                phase="backward",
                requested_bytes=2**30,
                free_bytes=2**20,
                allocated_bytes=None,
                reserved_bytes=None,
                message="CUDA out of memory.",
            )
            return replace(measured, measurement=replace(measured.measurement, out_of_memory=full))

    _, said = run(tmp_path, SmallDevice())
    assert "out of memory in backward" in said[0]


@pytest.mark.parametrize(
    ("device", "name", "short"),
    [
        ("cuda:0", "NVIDIA H200", "h200"),
        ("cuda:1", "NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("cuda:0", "NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("mps", "GPU of Apple M2 Ultra", "m2-ultra"),
        ("cpu", "Some Processor @ 2.00GHz", "cpu"),
        ("cuda:0", "", "cuda"),
    ],
)
def test_folders_are_named_for_device_torch_and_date(device, name, short):
    facts = DeviceFacts(device=device, name=name, total_bytes=None)
    inventory = Inventory(devices=(facts,), missing=(), line="", versions={"torch": "2.11.0+cu128"})
    assert short_name(facts) == short
    folder = folder_for(inventory, facts, datetime(2026, 11, 21, tzinfo=UTC))
    assert folder == Path("tests/measured") / f"{short}-2.11-2026-11-21"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('File "/home/me/env/lib/torch/x.py", line 3', 'File "x.py", line 3'),
        (r"C:\Users\me\x.py is missing", "x.py is missing"),
        ("2 GiB/s, and/or 1/2 of aten/src", "2 GiB/s, and/or 1/2 of aten/src"),
    ],
)
def test_messages_lose_their_folders(text, left):
    assert without_paths(text) == left


# --------------------------------------------------------------------------------------------------------------- the cases


@pytest.mark.parametrize("case", [*list_cases(), *list_small_cases()], ids=lambda case: case.name)
def test_every_case_is_a_question_about_one_dtype_and_one_batch(case):
    request = parse_query(case.query)
    assert (len(request.dtypes), len(request.batches)) == (1, 1)


def test_names_are_unique_and_good_for_files():
    for kind in ("cuda", "cpu"):
        names = [case.name for case in cases_for(kind)]
        assert len(set(names)) == len(names)
        assert all(name.replace("-", "").replace("_", "").replace(".", "").isalnum() for name in names)


def test_the_suite_covers_what_it_promises():
    requests = [parse_query(case.query) for case in list_cases()]
    assert 55 <= len(requests) <= 65
    assert {request.dtypes[0] for request in requests} >= {"float32", "bfloat16", "amp-bfloat16", "amp-float16"}
    assert {request.mode for request in requests} == {mode.key for mode in MODES.values() if not mode.serves}
    assert {request.weights for request in requests} == {"checkpoint", "nf4", "nf4-dq", "int8"}
    assert {request.cache for request in requests} == {"dynamic", "static", "offloaded"}
    assert {"adamw-8bit", "paged-adamw-8bit"} <= {request.optimizer for request in requests}
    assert sum(request.train == "adapter" for request in requests) >= 6
    assert {request.optimizer for request in requests} >= {"sgd", "sgd-momentum", "adamw", "adafactor", "rmsprop"}
    assert {request.optimizer_impl for request in requests} >= {None, "fused", "loop"}
    assert {request.attention for request in requests} == {"sdpa", "eager"}
    assert any(request.checkpointing for request in requests)
    assert {request.parallel for request in requests} == {"none", "ddp", "zero1", "fsdp"}
    assert {family_of(request) for request in requests} == {"transformer", "CNN", "other"}


def test_cases_are_chosen_by_a_part_of_their_name():
    assert [case.name for case in choose_cases("cpu", "t5")] == ["t5-small-b2-float32-adafactor"]
    assert choose_cases("cuda", "") == list_cases()
    with pytest.raises(RequestError, match="no case of the suite has this in its name: given 'nothing such'"):
        choose_cases("cuda", "nothing such")


# -------------------------------------------------------------------------------------------------------- the command line


def test_the_command_lists_its_cases(capsys):
    assert main(["suite", "--list", "--device", "cpu", "--only", "convnext"]) == 0
    name, query = capsys.readouterr().out.split()
    assert (name, parse_query(query).name) == ("convnext_tiny-b2-bfloat16-sgd", "convnext_tiny")


def test_the_command_leaves_out_by_name_what_needs_more_devices(tmp_path, capsys, monkeypatch):
    given: list[tuple[str, ...]] = []

    def measured(cases, *others, **options):
        given.append(tuple(case.name for case in cases))
        return ()

    inventory = Inventory(devices=(H200,), missing=(), versions={"torch": "2.15.0"}, line="")
    monkeypatch.setattr(command, "find_device", lambda name: (inventory, H200))
    monkeypatch.setattr(command, "run_suite", measured)
    for gpus in (1, 2):
        monkeypatch.setattr(command, "count_places", lambda kind, gpus=gpus: gpus)
        assert main(["suite", "--only", "resnet50-b32-float32", "--out", str(tmp_path)]) == 0
    first, second = given
    assert set(second) - set(first) == {"resnet50-b32-float32-ddp-2"}
    said = capsys.readouterr().out.splitlines()
    assert [line.split() for line in said if "left out" in line] == [
        ["resnet50-b32-float32-ddp-2", "left", "out:", "it", "needs", "2", "GPUs"]
    ]


def test_of_ranks_the_one_that_needs_most_is_kept_and_no_kernels(tmp_path, monkeypatch):
    ranks = [slow_device.run(make_tape([("w", size)], marks=[(1, "load")]), [1]) for size in (512, 2048, 1024)]
    started: list[tuple[str, str]] = []

    class Done:
        def result(self):
            return tuple(ranks)

        def cancel(self):
            started.append(("cancelled", ""))

    def start_ranks(query, device, **options):
        started.append((parse_query(query).parallel, device))
        return Done()

    monkeypatch.setattr(suite, "start_ranks", start_ranks)
    case = Case(name="ranks", query=f"{slow_device.QUERY}&parallel=ddp&ranks=3")
    assert Runner(device="cuda:0", record=True).measure(case, 10) == ranks[1]
    assert started == [("ddp", "cuda"), ("cancelled", "")]
    bench = ScriptedBench()
    run_suite([case], H200, tmp_path, bench, record=True, seconds=540, say=str)
    assert done(bench) == [("measure", "ranks")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--minutes", "0"], "'0' is not a number of minutes between 0 and a day"),
        (["--minutes", "long"], "'long' is not a number of minutes"),
        (["--list", "--only", "nothing such"], "no case of the suite has this in its name"),
    ],
)
def test_the_command_refuses_by_name(arguments, words, capsys):
    assert main(["suite", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_command_measures_and_records_on_the_cpu(tmp_path, capsys):
    assert main(["suite", "--device", "cpu", "--only", "mobilenet_v2", "--record", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4  # the device, the measurement, the kernels, and what is left
    assert f": 1 case, to {tmp_path}" in said[0]
    assert said[-1] == "nothing is left"
    (case,) = read_measured(tmp_path)
    assert case.measured.measurement.failure is None
    assert [reading.phase for reading in case.measured.measurement.phases] == ["load", "forward", "step2"]
    # 52 convolutions, forward and second step
    convolutions = [row for row in case.kernels.rows if row.op == "aten.convolution.default"]
    assert sum(row.calls for row in convolutions) == 2 * 52
    assert disagreements(case) == []

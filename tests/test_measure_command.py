"""The commands `measure` and `ledger`: one real measurement, and the rest with devices and services that tests made up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sizer.__main__ import main
from sizer.allocator.timeline import running_bytes
from sizer.base.config_json import encode_config
from sizer.base.errors import DeviceError, RequestError, TraceError
from sizer.commands import measurements as command
from sizer.device.comparison.comparison import Comparison, compare
from sizer.device.comparison.counterpart import gpu_of
from sizer.device.ledger.ledger import Ledger
from sizer.device.record.measurement import DeviceOutOfMemory, Spread, Timing, Transfer
from sizer.device.record.recording import Measured, write_measured
from sizer.query.text import format_query, parse_query
from sizer.service.client import JobClient
from sizer.service.settings import Settings
from tests.device.tapes import CPU, CUDA, measured_from, report_of, tape_of, training

QUERY = "arch=torchvision:resnet18&dtype=float32&batch=2"
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 2}
GPT2 |= {"vocab_size": 64, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
EXTRA = ("+", "k", 300_000, "aten::clone", "two.norm", "activation")
FAILED = DeviceOutOfMemory(
    phase="backward", requested_bytes=2**30, free_bytes=2**20, allocated_bytes=2**21, reserved_bytes=2**22, message="no"
)


class Done:
    """A job that has ended: with a value, or with an error."""

    progress = "done"

    def __init__(self, value: object):
        self.value, self.cancelled = value, False

    def result(self, timeout: float | None = None) -> object:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value

    def cancel(self) -> None:
        self.cancelled = True


class Service:
    """Compares here what a job's child would compare; `failure` is what it says instead."""

    def __init__(self, failure: Exception | None = None):
        self.failure = failure

    def submit_comparison(self, measured: Measured) -> Done:
        if self.failure is not None:
            return Done(self.failure)
        tape = tape_of(training())
        dtype = measured.measurement.dtype
        return Done(compare(report_of(tape, gpu_of(measured.measurement.device), dtype=dtype), measured, tape))

    def close(self) -> None:
        pass


@pytest.fixture
def ledger(tmp_path, monkeypatch) -> Ledger:
    monkeypatch.setenv("SIZER_LEDGER", str(tmp_path / "ledger.sqlite3"))
    return Ledger()


@pytest.fixture
def device(monkeypatch):
    """Puts a device in the place of the real ones: it does what its steps say. The jobs that were asked for, in their order."""
    jobs: list[tuple[str, str, dict]] = []

    def put(steps: list | None = None, facts=CPU, **changes) -> list[tuple[str, str, dict]]:
        def start(query: str, device: str, **options: object) -> Done:
            jobs.append((query, device, options))
            if "error" in changes:
                raise changes["error"]
            request = parse_query(query)
            values = {"query": query, "dtype": request.dtypes[0]} | changes
            return Done(measured_from(tape_of(steps or training(sides="device")), facts, **values))

        monkeypatch.setattr(command, "start", start)
        return jobs

    return put


@pytest.fixture
def ranks(monkeypatch):
    """Puts ranks in the place of real ones, each of which does what its steps say. The jobs that were asked for."""
    jobs: list[tuple[str, str, dict]] = []

    def put(*steps: list, **changes: list) -> list[tuple[str, str, dict]]:
        def start_ranks(query: str, device: str, **options: object) -> Done:
            jobs.append((query, device, options))
            request = parse_query(query)
            queries = (format_query(replace(request, rank=rank), complete=True) for rank in range(len(steps)))
            each = ({name: values[rank] for name, values in changes.items()} for rank in range(len(steps)))
            return Done(
                tuple(
                    measured_from(tape_of(one), CPU, query=query, dtype="float32", **change)
                    for one, query, change in zip(steps, queries, each, strict=True)
                )
            )

        monkeypatch.setattr(command, "start_ranks", start_ranks)
        return jobs

    return put


@pytest.fixture
def run(capsys, ledger):
    """Runs a command; (exit status, stdout, stderr)."""

    def run(*arguments: str, failure: Exception | None = None) -> tuple[int, str, str]:
        status = main(arguments, make_client=lambda: Service(failure))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


# ---------------------------------------------------------------------------------------------------------- for real


def test_a_model_is_measured_on_this_cpu_and_held_against_its_estimate(capsys, ledger):
    query = f"arch=config:{encode_config(json.dumps(GPT2))}&seq=16&dtype=float32&batch=2"
    settings = Settings(max_jobs=1)
    status = main(
        ["measure", query, "--device", "cpu", "--json", "--no-timing"], make_client=lambda: JobClient(settings)
    )
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    printed = json.loads(captured.out)
    assert printed["schema"] == 1
    assert printed["measurement"]["device"]["device"] == "cpu"
    comparison = Comparison.from_dict(printed["comparison"])
    assert comparison.measurement.to_dict() == printed["measurement"]
    assert (comparison.architecture, comparison.family) == ("gpt2", "transformer")
    assert comparison.wrong == ()
    # embeddings (64 + 32)·32; a block: two norms 4·32, attention 32·96+96 + 32·32+32, mlp 32·128+128 + 128·32+32; last norm 2·32
    # 3,072 + 2·(128 + 3,168 + 1,056 + 4,224 + 4,128) + 64 = 28,544 parameters of 4 bytes
    assert comparison.find("weights_bytes").measured_bytes == 4 * 28_544
    exact = [row for row in comparison.rows if row.tolerance == 0]
    assert len(exact) >= 10
    assert all(abs(row.difference_bytes) <= row.allowance_bytes <= 200 for row in exact)
    assert abs(comparison.find("peak_allocated_bytes").error) < 0.01
    assert comparison.measured_curve
    assert [row.architecture for row in ledger.rows()] == ["gpt2"]


# ------------------------------------------------------------------------------------------------------------- measure


def test_measure_prints_both_sides_and_keeps_them(run, device, ledger):
    jobs = device()
    status, out, err = run("measure", QUERY, "--device", "cpu")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "tiny (Tiny), training in float32 at batch 2"
    assert lines[1].startswith(
        "measured on cpu: A processor with 16.00 GiB, torch 2.15.0, at 2026-11-21T10:00:00+00:00"
    )
    assert lines[3] == "All 17 figures hold; the peak of allocated memory is exact (3.82 MiB)."
    table = {line[:26].strip(): line.split() for line in lines if " KiB " in line or " MiB " in line}
    assert table["optimizer state"][2:] == ["1.91", "MiB", "1.91", "MiB", "0", "B", "exact", "exact"]
    assert table["forward: allocated"][2:] == ["1,000.00", "KiB", "1,000.00", "KiB", "0", "B", "exact", "exact"]
    assert any(line.startswith("Note: the CPU's allocator keeps no cache") for line in lines)
    assert jobs == [(ledger.rows()[0].query, "cpu", {"timing": True, "seconds": 600.0})]
    assert len(ledger.rows()) == 1


def test_of_several_ranks_the_worst_is_shown_whole(run, ranks, ledger):
    jobs = ranks(training(sides="device"), training(forward=[EXTRA], sides="device"))
    status, out, err = run("measure", f"{QUERY}&parallel=ddp&ranks=2", "--device", "cpu")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "Peak allocated on each of 2 ranks, and rank 1 whole:"
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert [line.split()[-1] for line in lines[2:4]] == ["exact", "WRONG"]
    assert lines[5] == "tiny (Tiny), training in float32 at batch 2, rank 1 of 2 by DDP"
    assert "the device holds 292.97 KiB by aten::clone" in out
    assert [(parse_query(query).world, device) for query, device, _ in jobs] == [(2, "cpu")]
    assert {row.place for row in ledger.rows()} == {"0 of 2", "1 of 2"}
    rows = run("ledger")[1].splitlines()[1:3]
    assert {" ".join(row.split()[6:9]) for row in rows} == {"0 of 2", "1 of 2"}


def test_a_rank_that_ran_out_of_memory_is_shown(run, ranks):
    steps = training(sides="device")
    ranks(steps, steps[: steps.index("=forward") + 1], out_of_memory=[None, FAILED])
    status, out, _ = run("measure", f"{QUERY}&parallel=ddp&ranks=2", "--device", "cpu")
    assert status == 0
    assert out.splitlines()[3].split()[-4:] == ["not", "to", "its", "end"]
    assert "The device ran out of memory in backward" in out


def test_ranks_as_json_are_one_object_a_line(run, ranks):
    ranks(training(sides="device"), training(sides="device"))
    status, out, _ = run("measure", f"{QUERY}&parallel=ddp&ranks=2", "--device", "cpu", "--json", "--no-ledger")
    printed = [json.loads(line)["measurement"]["query"] for line in out.splitlines()]
    assert (status, [parse_query(query).rank for query in printed]) == (0, [0, 1])


def test_measure_says_what_is_wrong_and_where_both_part(run, device):
    device([*training(forward=[EXTRA], sides="device")])
    status, out, _ = run("measure", QUERY, "--device", "cpu", "--no-ledger")
    assert status == 0  # the estimate is wrong, not the command
    line = next(line for line in out.splitlines() if line.startswith("forward: allocated"))
    assert line.split()[-2:] == ["exact", "WRONG"]
    assert "-292.97 KiB" in line
    assert "At the end of forward: the device holds 292.97 KiB by aten::clone in two.norm" in out
    assert "The two first diverge in forward: the device allocates 292.97 KiB in aten::clone in two.norm" in out


def test_measure_as_json_is_one_object_a_line_for_each_cell(run, device, ledger):
    jobs = device()
    query = "arch=torchvision:resnet18&dtype=float32,bfloat16&batch=2"
    status, out, err = run("measure", query, "--device", "cpu", "--json", "--no-timing", "--minutes", "2")
    assert (status, err) == (0, "")
    printed = [json.loads(line) for line in out.splitlines()]
    assert [one["measurement"]["dtype"] for one in printed] == ["float32", "bfloat16"]
    assert [one["comparison"]["estimate"]["dtype"] for one in printed] == ["float32", "bfloat16"]
    assert [options for _, _, options in jobs] == [{"timing": False, "seconds": 120.0}] * 2
    assert [parse_query(query).dtypes for query, _, _ in jobs] == [("float32",), ("bfloat16",)]
    assert len(ledger.rows()) == 2


def test_what_the_query_leaves_open_is_chosen_aloud(run, device):
    jobs = device()
    status, _, err = run("measure", "arch=torchvision:resnet18&batch=2", "--device", "cpu")
    assert status == 0
    assert err == "sizer: measured is dtype=float32, since the query names none\n"
    run("measure", "arch=torchvision:resnet18", "--device", "cpu")
    assert [(r.dtypes, r.batches) for r in (parse_query(query) for query, _, _ in jobs)] == [
        (("float32",), (2,)),
        (("float32",), (1,)),
    ]


def test_no_ledger_keeps_nothing(run, device, ledger):
    device()
    run("measure", QUERY, "--device", "cpu", "--no-ledger")
    assert ledger.rows() == ()


def test_a_config_file_stands_in_the_place_of_arch(run, device, tmp_path):
    jobs = device()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GPT2))
    assert run("measure", "seq=16&dtype=float32&batch=2", "--config", str(file), "--device", "cpu")[0] == 0
    assert json.loads(parse_query(jobs[0][0]).config) == GPT2


def test_out_of_memory_is_a_result(run, device, ledger):
    steps = training(sides="device")
    device(steps[: steps.index("=forward") + 1], CUDA, out_of_memory=FAILED)
    status, out, err = run("measure", QUERY, "--device", "cuda:0")
    assert (status, err) == (0, "")
    assert (
        "The device ran out of memory in backward, requesting 1.00 GiB with 1.00 MiB free; the estimate predicted" in out
    )
    assert ledger.rows()[0].measured_peak_allocated_bytes is None


def test_a_device_that_is_not_there(run, device):
    device(error=DeviceError("there is no such device", given="'cuda:7'", allowed="cpu"))
    status, out, err = run("measure", QUERY, "--device", "cuda:7")
    assert (status, out) == (4, "")
    assert err == "sizer: there is no such device: given 'cuda:7', allowed cpu\n"


def test_what_is_measured_is_the_installed_pytorch(run, device):
    status, out, err = run("measure", f"{QUERY}&torch=2.12", "--device", "cpu")
    assert (status, out) == (2, "")
    assert err.startswith("sizer: torch with measure: given '2.12', allowed the installed one, 2.1")


def test_a_bad_query_is_refused_before_anything_runs(run, device):
    jobs = device()
    status, _, err = run("measure", "arch=torchvision:resnet18&dtype=int8", "--device", "cpu")
    assert status == 2
    assert "dtype: given 'int8'" in err
    status, _, err = run("measure", QUERY)
    assert (status, jobs) == (2, [])
    assert "--device" in err


def test_a_step_that_cannot_be_traced_leaves_the_measurement(run, device, ledger):
    device()
    status, out, err = run("measure", QUERY, "--device", "cpu", failure=TraceError("the step cannot be traced"))
    assert status == 3
    assert err == "sizer: the step cannot be traced\n"
    assert out.startswith("measured on cpu: A processor")
    assert "forward" in out
    status, out, _ = run("measure", QUERY, "--device", "cpu", "--json", failure=TraceError("no way"))
    printed = json.loads(out)
    assert (status, printed["comparison"], printed["error"]) == (3, None, "no way")
    assert ledger.rows() == ()


def test_a_device_that_was_lost_is_told_and_is_no_success(run, device, ledger):
    steps = training(sides="device")
    device(steps[: steps.index("=forward") + 1], CUDA, failure="CUDA error: unspecified launch failure")
    status, out, err = run("measure", QUERY, "--device", "cuda:0")
    assert status == 1
    assert "The device did not complete the work (CUDA error: unspecified launch failure)" in out
    assert "the device did not complete the work: given 'CUDA error" in err


def test_times_are_told_with_and_without_waiting(run, device):
    step = Spread(median_seconds=0.0125, low_seconds=0.012, high_seconds=0.25, runs=10)
    issued = Spread(median_seconds=0.0000125, low_seconds=0.00001, high_seconds=0.00002, runs=10)
    transfer = Transfer(pinned=True, non_blocking=True, bytes=2**20, issued=issued, done=step)
    timing = Timing(clock="CUDA events", warm_up=3, step=step, unsynchronized=issued, transfers=(transfer,))
    device(None, CUDA, timing=timing)
    _, out, _ = run("measure", QUERY, "--device", "cuda:0")
    assert "A step takes 12.50 ms (12.00 ms to 250 ms, 10 runs) (CUDA events, after 3 steps of warm-up)." in out
    assert "Without waiting for the device one would have read 12.50 µs" in out
    assert "1.00 MiB from pinned memory, non_blocking take 12.50 ms" in out


# -------------------------------------------------------------------------------------------------------------- ledger


def test_an_empty_ledger_says_how_to_fill_it(run, ledger):
    status, out, _ = run("ledger")
    assert status == 0
    assert out.startswith(f"The ledger is empty ({ledger.path})")
    assert run("ledger", "--path")[1] == f"{ledger.path}\n"
    assert json.loads(run("ledger", "--json")[1]) == {"schema": 1, "comparisons": [], "left_out": []}


def test_the_ledger_is_printed_with_its_errors(run, device):
    device([*training(forward=[EXTRA], sides="device")])
    run("measure", QUERY, "--device", "cpu")
    _, out, _ = run("ledger")
    lines = out.splitlines()
    # estimated 4,004,000, measured 300,000 more: -300,000 / 4,304,000
    row = ["1", "2026-11-21", "tiny", "training", "float32", "2", "A", "processor", "2.15.0", "-6.97%", "WRONG"]
    assert lines[1].split() == row
    assert lines[4].split() == ["peak", "allocated", "A", "processor", "CNN", "1", "-6.97%", "-6.97%", "-6.97%"]
    _, out, _ = run("ledger", "--csv")
    assert out.count("\n") == 2
    assert "\r" not in out


def test_what_another_machine_measured_is_taken_in(run, device, ledger, tmp_path):
    device()
    _, out, _ = run("measure", QUERY, "--device", "cpu", "--json", "--no-ledger")
    file = tmp_path / "there.json"
    file.write_text(out)
    assert run("ledger", "--import", str(file)) == (0, "1 added, 0 known already, 0 not taken\n", "")
    assert run("ledger", "--import", str(file))[1] == "0 added, 1 known already, 0 not taken\n"
    measurement = ledger.comparison(1).measurement
    alone = replace(measurement, measured_at="2026-11-22T00:00:00+00:00")
    file.write_text(json.dumps(alone.to_dict()))
    status, out, _ = run("ledger", "--import", str(file), "--json")
    assert (status, json.loads(out)) == (0, {"added": [2], "known": 0, "refused": []})
    assert ledger.comparison(2).measurement == alone


def test_a_folder_of_the_suite_is_taken_in_with_its_recordings(run, ledger, tmp_path):
    write_measured(tmp_path, "one", measured_from(tape_of(training(sides="device"))))
    assert run("ledger", "--import", str(tmp_path))[:2] == (0, "1 added, 0 known already, 0 not taken\n")
    assert ledger.comparison(1).measured_curve
    (tmp_path / "two.json").write_text("{}")
    status, _, err = run("ledger", "--import", str(tmp_path))
    assert status == 2
    assert "the folder is not one of the suite" in err


def test_what_is_not_taken_is_told(run, tmp_path):
    file = tmp_path / "there.json"
    file.write_text('{"measurement": {}}')
    status, out, err = run("ledger", "--import", str(file))
    assert (status, out) == (2, "0 added, 0 known already, 1 not taken\n")
    assert err.startswith("sizer: not taken, number 1: measurement was")
    status, _, err = run("ledger", "--import", str(tmp_path / "nowhere.json"))
    assert status == 2
    assert "the file cannot be read" in err


def test_a_config_of_the_hub_is_needed_to_compare():
    measured = measured_from(tape_of(training()), query="arch=hub:org/name&dtype=float32&batch=2")
    client = JobClient(Settings(preload=()))
    with pytest.raises(RequestError, match="holds the config that it was made with"):
        client.submit_comparison(measured)
    with pytest.raises(RequestError, match="names its one dtype and batch"):
        client.submit_comparison(measured_from(tape_of(training()), query="arch=torchvision:resnet18&batch=2"))
    client.close()


# ------------------------------------------------------------------------------------------------ what a job does with it


def test_a_cell_is_estimated_for_the_device_that_was_measured():
    from sizer.estimating.estimator import estimate_cell

    query = f"arch=config:{encode_config(json.dumps(GPT2))}&seq=16&dtype=float32&batch=2"
    report, tape = estimate_cell(parse_query(query), gpu=gpu_of(CPU))
    (estimate,) = report.estimates
    assert (report.gpu, estimate.dtype, estimate.batch, tape.batch) == (gpu_of(CPU), "float32", 2, 2)
    levels = running_bytes(tape.order, tape.sizes)
    assert {use.phase: use.allocated_bytes for use in estimate.phases} == {
        phase: levels[end] for end, phase in tape.marks
    }


@pytest.mark.parametrize("text", ["{}", "[", '{"measurement": {"schema": 1}}', "null"])
def test_a_job_refuses_what_is_no_measurement(text: str):
    from sizer.service import tasks

    job = {"task": "compare", "query": None, "config_text": None, "measured": text}
    with pytest.raises(RequestError, match="this is not a measurement"):
        tasks.run(job, lambda progress: None)

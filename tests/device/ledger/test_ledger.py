from __future__ import annotations

import csv
import io
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from sizer.base.errors import JobError, RequestError, TraceError
from sizer.device.comparison.comparison import Comparison, compare
from sizer.device.comparison.counterpart import gpu_of
from sizer.device.ledger import ledger as ledgers
from sizer.device.ledger.ledger import Ledger, ledger_path
from sizer.device.ledger.rows import MIGRATIONS, Filter
from sizer.device.record.measurement import DeviceOutOfMemory
from sizer.device.record.recording import Measured
from sizer.processes.environment import PROJECT
from tests.device.tapes import CPU, CUDA, measured_from, report_of, tape_of, training
from tests.report.reports import CENSUS

EXTRA = ("+", "k", 30_000, "aten::clone", "two.norm", "activation")


def comparison_of(facts=CPU, *, name: str = "tiny", device: list | None = None, **changes) -> Comparison:
    """A comparison of a model of that name; what is measured can be changed."""
    tape = tape_of(training())
    measured = measured_from(tape_of(device or training(sides="device")), facts, **changes)
    return compare(report_of(tape, gpu_of(facts), census=replace(CENSUS, name=name)), measured, tape)


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    return Ledger(tmp_path / "folder" / "ledger.sqlite3")


def day(number: int) -> str:
    return f"2026-11-{number:02}T08:30:00+00:00"


# -------------------------------------------------------------------------------------------------------- add and look


def test_a_ledger_that_is_not_there_is_empty_and_stays_away(ledger):
    assert ledger.rows() == ()
    assert ledger.choices()["dtype"] == ()
    assert ledger.comparison(1) is None
    assert ledger.delete(1) is False
    assert ledger.statistics() == ()
    assert not ledger.path.parent.exists()


def test_a_comparison_comes_back_whole(ledger):
    comparison = comparison_of(CUDA)
    number = ledger.add(comparison)
    assert ledger.comparison(number) == comparison
    (row,) = ledger.rows()
    assert (row.id, row.architecture, row.class_name, row.family) == (number, "tiny", "Tiny", "CNN")
    assert (row.mode, row.dtype, row.batch, row.torch) == ("training", "float32", 2, "2.15.0")
    assert (row.device_name, row.device_kind) == ("NVIDIA H200", "cuda")
    assert row.holds is True
    assert row.verdict == comparison.verdict
    assert row.estimated_peak_allocated_bytes == comparison.estimate.peak_allocated_bytes
    assert row.measured_process_bytes == comparison.measurement.process_bytes


def test_figures_that_a_device_does_not_have_are_none(ledger):
    ledger.add(comparison_of(CPU))
    (row,) = ledger.rows()
    assert (row.measured_peak_reserved_bytes, row.measured_process_bytes) == (None, None)
    assert row.measured_peak_allocated_bytes == 4_004_000


def test_a_measurement_that_ran_out_of_memory_has_no_peaks(ledger):
    failed = DeviceOutOfMemory(
        phase="forward", requested_bytes=1, free_bytes=0, allocated_bytes=1, reserved_bytes=1, message="no"
    )
    ledger.add(comparison_of(CUDA, device=training(sides="device")[:3], out_of_memory=failed))
    (row,) = ledger.rows()
    assert row.measured_peak_allocated_bytes is None
    assert row.holds is False


def test_the_same_measurement_twice_is_one_row_with_the_newer_comparison(ledger):
    first = ledger.add(comparison_of())
    again = replace(comparison_of(), verdict="said once more")
    assert ledger.add(again) == first
    assert [row.verdict for row in ledger.rows()] == ["said once more"]
    assert ledger.comparison(first) == again
    assert ledger.add(comparison_of(measured_at=day(2))) != first


def test_deleted_rows_take_their_figures_along(ledger):
    number = ledger.add(comparison_of(CUDA))
    assert ledger.delete(number) is True
    assert ledger.delete(number) is False
    assert ledger.rows() == ()
    assert ledger.statistics() == ()


def test_the_newest_measurement_comes_first(ledger):
    for number in (3, 20, 11):
        ledger.add(comparison_of(measured_at=day(number)))
    assert [row.measured_at for row in ledger.rows()] == [day(20), day(11), day(3)]


# ------------------------------------------------------------------------------------------------------------- filters


@pytest.fixture
def filled(ledger) -> Ledger:
    ledger.add(comparison_of(CPU, name="ResNet-18", measured_at=day(1)))
    ledger.add(comparison_of(CUDA, name="resnet50", measured_at=day(2)))
    ledger.add(
        comparison_of(
            CUDA, name="vit_b_16", measured_at=day(3), query="arch=torchvision:vit_b_16&dtype=float32&batch=2"
        )
    )
    ledger.add(
        comparison_of(CPU, name="100%_off", measured_at=day(4), device=training(forward=[EXTRA], sides="device"))
    )
    return ledger


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (Filter(), ["100%_off", "vit_b_16", "resnet50", "ResNet-18"]),
        (Filter(architecture="resnet"), ["resnet50", "ResNet-18"]),
        (Filter(architecture="%"), ["100%_off"]),
        (Filter(device_kind="cuda"), ["vit_b_16", "resnet50"]),
        (Filter(device_kind="cuda", family="transformer"), ["vit_b_16"]),
        (Filter(device_name="A processor"), ["100%_off", "ResNet-18"]),
        (Filter(holds=False), ["100%_off"]),
        (Filter(since="2026-11-02", until="2026-11-03"), ["vit_b_16", "resnet50"]),
        (
            Filter(batch=2, dtype="float32", mode="training", torch="2.15.0"),
            ["100%_off", "vit_b_16", "resnet50", "ResNet-18"],
        ),
        (Filter(dtype="bfloat16"), []),
        (Filter(architecture="x' OR 1=1 --"), []),
    ],
)
def test_filters(filled, wanted: Filter, names: list[str]):
    assert [row.architecture for row in filled.rows(wanted)] == names


def test_choices_are_what_is_there(filled):
    choices = filled.choices()
    assert choices["device_kind"] == ("cpu", "cuda")
    assert choices["family"] == ("CNN", "transformer")
    assert choices["batch"] == (2,)
    assert "holds" not in choices


def test_statistics_are_signed_and_per_device(filled):
    rows = {(row.quantity, row.device, row.family): row for row in filled.statistics()}
    off = rows["activations_bytes", "A processor", "CNN"]
    # two on the CPU: one exact, one with 50,000 bytes measured for 20,000 estimated
    assert (off.count, off.worst, off.bias, off.median) == (
        2,
        pytest.approx(-0.6),
        pytest.approx(-0.3),
        pytest.approx(-0.3),
    )
    assert rows["peak_reserved_bytes", "NVIDIA H200", "transformer"].count == 1
    together = {(row.quantity, row.device): row for row in filled.statistics(by_family=False)}
    assert together["peak_reserved_bytes", "NVIDIA H200"].count == 2
    assert {row.device for row in filled.statistics(Filter(device_kind="cuda"))} == {"NVIDIA H200"}


# -------------------------------------------------------------------------------------------------- export and import


def test_csv_has_every_quantity_and_no_formula(ledger):
    ledger.add(comparison_of(CUDA, name="=HYPERLINK(1)"))
    (row,) = csv.DictReader(io.StringIO(ledger.export_csv()))
    assert row["architecture"] == "'=HYPERLINK(1)"
    assert row["weights_bytes.estimated"] == row["weights_bytes.measured"] == "1000000"
    assert float(row["weights_bytes.error"]) == 0
    assert int(row["process_bytes.measured"]) - int(row["process_bytes.estimated"]) == 20 * 2**20


def test_a_ledger_travels_as_json(filled, tmp_path):
    elsewhere = Ledger(tmp_path / "other.sqlite3")
    done = elsewhere.import_json("".join(filled.export_json()))
    assert (len(done.added), done.known, done.refused) == (4, 0, ())
    assert [row.architecture for row in elsewhere.rows()] == [row.architecture for row in filled.rows()]
    assert list(elsewhere.comparisons()) == list(filled.comparisons())
    again = elsewhere.import_json("".join(filled.export_json()))
    assert (again.added, again.known) == ((), 4)


def test_an_export_leaves_out_what_is_not_json_and_names_it(filled, tmp_path):
    number = filled.rows()[1].id
    with closing(sqlite3.connect(filled.path, isolation_level=None)) as database:
        database.execute("UPDATE comparisons SET data = substr(data, 1, 40) WHERE id = ?", (number,))
    text = "".join(filled.export_json())
    (reason,) = json.loads(text)["left_out"]
    assert reason.startswith(f"comparison {number} cannot be read")
    assert len(Ledger(tmp_path / "other.sqlite3").import_json(text).added) == 3


def test_an_export_is_written_row_by_row(filled):
    parts = filled.export_json()
    assert [next(parts).count('"measurement"') for _ in range(3)] == [0, 1, 1]


def test_a_full_ledger_takes_nothing_more(filled, monkeypatch):
    monkeypatch.setattr(ledgers, "LIMIT_BYTES", filled.path.stat().st_size + 2**18)
    kept = len(filled.rows())
    with pytest.raises(JobError, match=r"the ledger is full: given .* KiB, allowed .* KiB; delete comparisons"):
        for number in range(10, 29):
            filled.add(comparison_of(measured_at=day(number), name="x" * 2**16))
    assert len(filled.rows()) > kept


def printed(comparison: Comparison) -> str:
    return json.dumps(
        {"schema": 1, "measurement": comparison.measurement.to_dict(), "comparison": comparison.to_dict()}
    )


def test_what_measure_prints_can_be_imported_one_a_line(ledger):
    text = "\n".join(printed(comparison_of(measured_at=day(number))) for number in (1, 2))
    assert len(ledger.import_json(text).added) == 2


def test_a_measurement_alone_is_compared_here(ledger):
    comparison = comparison_of()
    seen: list[Measured] = []

    def compare_here(measured: Measured) -> Comparison:
        seen.append(measured)
        return comparison

    recording = tape_of(training(sides="device"))
    measured = Measured(measurement=comparison.measurement, recording=recording)
    done = ledger.import_json(json.dumps(measured.to_dict()), compare=compare_here)
    assert [ledger.comparison(number) for number in done.added] == [comparison]
    assert seen == [measured]
    # known now, so it is not compared once more; the suite writes the measurement alone
    done = ledger.import_json(json.dumps(comparison.measurement.to_dict()), compare=compare_here)
    assert (done.known, len(seen)) == (1, 1)


def test_what_cannot_be_compared_is_refused_and_the_rest_taken(ledger):
    def refuse(measured: Measured) -> Comparison:
        raise TraceError("cannot be traced")

    alone = json.dumps(comparison_of(measured_at=day(1)).measurement.to_dict())
    broken = json.dumps({"measurement": {"schema": 1}})
    text = "\n".join([alone, broken, "7", printed(comparison_of(measured_at=day(2)))])
    done = ledger.import_json(text, compare=refuse)
    assert len(done.added) == 1
    assert done.refused[0] == "number 1: cannot be traced"
    assert done.refused[1].startswith("number 2: measurement was 'nothing'; allowed is the keys")
    assert done.refused[2].startswith("number 3: 7 is not the output of")
    done = ledger.import_json(alone)
    assert done.refused == ("number 1: it holds no comparison; import it where Sizer can make estimates",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is not JSON"),
        ("{", "the file is not JSON"),
        ("{}\n{", "the file is not JSON"),
        ('{"a": NaN}', "the file is not JSON"),
        ("[" * 100_000, "the file is not JSON"),
        ("[]", "the file holds no measurement"),
        ('{"schema": 1, "comparisons": []}', "the file holds no measurement"),
    ],
)
def test_what_is_no_json_of_ours_is_refused(ledger, text: str, message: str):
    with pytest.raises(RequestError, match=message):
        ledger.import_json(text)


def test_an_import_is_checked_strictly(ledger):
    data = json.loads(printed(comparison_of()))
    data["comparison"]["rows"][0]["estimated_bytes"] = -5
    done = ledger.import_json(json.dumps(data))
    assert done.added == ()
    assert "comparison.rows[0].estimated_bytes was '-5'" in done.refused[0]


# ------------------------------------------------------------------------------------------------------------ the file


def test_its_place_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("SIZER_LEDGER", str(tmp_path / "mine.db"))
    assert ledger_path() == Ledger().path == tmp_path / "mine.db"
    monkeypatch.delenv("SIZER_LEDGER")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert ledger_path() == tmp_path / "sizer" / "ledger.sqlite3"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert ledger_path() == Path.home() / "Library" / "Application Support" / "sizer" / "ledger.sqlite3"
    assert not ledger_path().is_relative_to(PROJECT)


def test_its_version_is_in_the_file_and_a_newer_one_is_refused(ledger):
    ledger.add(comparison_of())
    with sqlite3.connect(ledger.path) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(JobError, match="it is of version 99, this Sizer knows up to 2"):
        ledger.rows()


def test_a_file_of_the_first_version_is_brought_up(ledger):
    ledger.path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(ledger.path)) as database:
        for statement in MIGRATIONS[0]:
            database.execute(statement)
        database.execute("PRAGMA user_version = 1")
    number = ledger.add(comparison_of())
    (row,) = ledger.rows()
    assert (row.id, row.ranks, row.rank, row.place) == (number, 1, None, "")


def test_a_file_that_is_no_ledger_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but my notes" * 100)
    with pytest.raises(JobError, match=r"the ledger cannot be used .* set SIZER_LEDGER to another file"):
        Ledger(path).add(comparison_of())
    assert path.read_text() == "not a database, but my notes" * 100


def test_a_row_of_another_form_is_told(ledger):
    number = ledger.add(comparison_of())
    with sqlite3.connect(ledger.path) as database:
        database.execute("UPDATE comparisons SET data = '{}'")
    database.close()
    with pytest.raises(JobError, match=f"comparison {number} cannot be read by this version"):
        ledger.comparison(number)


WRITE = """
import json, sys
from sizer.device.comparison.comparison import Comparison
from sizer.device.ledger.ledger import Ledger
from contextlib import closing
from dataclasses import replace
path, text, name = sys.argv[1:]
comparison = Comparison.from_dict(json.loads(text))
ledger = Ledger(path)
for number in range(15):
    ledger.add(replace(comparison, measurement=replace(comparison.measurement, measured_at=f"{name} {number:02}")))
"""


def test_several_processes_write_at_once(ledger):
    text = json.dumps(comparison_of().to_dict())
    arguments = [sys.executable, "-c", WRITE, str(ledger.path), text]
    writers = [subprocess.Popen([*arguments, name], cwd=PROJECT) for name in ("one", "two", "three")]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    assert len(ledger.rows()) == 3 * 15

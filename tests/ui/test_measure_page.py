"""The page that measures: what it offers, what it runs, what it shows of it, and what it refuses."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from sizer.base.errors import BuildError, DeviceError, JobError
from sizer.base.units import format_bytes
from sizer.device.ledger.ledger import Ledger
from sizer.query.text import parse_query
from sizer.service.settings import PUBLIC_VARIABLE
from sizer.ui import comparison_view, measure, measuring
from sizer.ui import measuring as here
from tests.ui.clients import ScriptedJob
from tests.ui.comparisons import CELL, CPU, CUDA, comparison_of, measured_on, out_of_memory
from tests.ui.conftest import markup, texts
from tests.ui.machines import ComparingClient, ScriptedMachine, install_machine
from tests.ui.reports import MIB, report_for

SMALL = {"arch": "torchvision:resnet18", "dtype": "float32,bfloat16", "batch": "1,2", "focus": "float32:2"}
HOSTILE = "**bold** [link](http://x.example) ![i](http://x.example/i.png) :red[x] `y`"
Open = Callable[..., AppTest]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite3")


@pytest.fixture
def open_measure(open_page: Open) -> Open:
    """A function that opens the page at a query given as keywords."""
    return functools.partial(open_page, "measure")


def press(page: AppTest) -> AppTest:
    return page.button(key="measure").click().run()


def visit(page: AppTest, name: str) -> AppTest:
    """Another page by its link. AppTest forgets the form on the straight way, a browser does not: tests/browser."""
    page.query_params.clear()  # what the browser does on its way to another page
    page.switch_page("pages/numbers.py").run()
    return page.switch_page(f"pages/{name}.py").run()


def chosen(page: AppTest, label: str):
    return next(control for control in page.segmented_control if control.label == label)


def choose_cell(page: AppTest, dtype: str, batch: int) -> AppTest:
    return page.selectbox(key="cell").set_value((dtype, batch)).run()


def headline(page: AppTest) -> str:
    return page.main.header[0].value


def command(page: AppTest) -> str:
    return next(code.value for code in page.code if "sizer measure" in code.value)


# -------------------------------------------------------------------------------------------------------- before the run


def test_says_what_it_will_take(monkeypatch, ledger, open_measure):
    install_machine(monkeypatch, ScriptedMachine(), ledger)
    page = open_measure(**SMALL)
    estimate = report_for(replace(CELL, gpu="cpu")).estimates[0]
    peak, process = (format_bytes(size) for size in (estimate.peak_allocated_bytes, estimate.process_bytes + 500 * MIB))
    assert (
        "Training resnet18 at batch 2 in float32, two whole steps on cpu (A processor, 12.00 GiB free). "
        f"The estimate: {peak} allocated at the peak, about {process} for the whole process."
    ) in texts(page)
    assert not page.button(key="measure").disabled
    assert not page.main.header, "nothing is shown as measured before anything was"


def test_no_accelerator_is_said_with_the_way_out(monkeypatch, ledger, open_measure):
    install_machine(monkeypatch, ScriptedMachine(), ledger)
    page = open_measure(**SMALL)
    assert "finds no accelerator on this machine" in page.info[0].value
    assert chosen(page, "Measure on").options == ["cpu"]
    assert command(page) == (
        "python -m sizer measure 'arch=torchvision:resnet18&dtype=float32&batch=2' --device cuda:0 --json > measured.json"
    )


def test_ranks_are_measured_by_a_command(monkeypatch, ledger, open_measure):
    install_machine(monkeypatch, ScriptedMachine(), ledger)
    page = open_measure(**SMALL, parallel="zero1", ranks="2")
    assert not page.exception and not page.error
    assert page.info[0].value == measure.RANKS
    assert command(page) == (
        "python -m sizer measure 'arch=torchvision:resnet18&dtype=float32&batch=2&parallel=zero1&ranks=2' --device cuda"
        " --json > measured.json"
    )
    assert not [button for button in page.button if button.key == "measure"]


def test_accelerator_comes_first(monkeypatch, ledger, open_measure):
    machine = ScriptedMachine(CPU, CUDA)
    install_machine(monkeypatch, machine, ledger)
    page = open_measure(**SMALL)
    assert not page.info
    assert chosen(page, "Measure on").value == "cuda:0"
    chosen(page, "Measure on").set_value("cpu").run()
    press(page)
    assert [device for _, device in machine.measured] == ["cpu"]


def test_the_cell_is_the_one_that_the_estimate_page_looks_at(monkeypatch, ledger, open_page):
    machine = ScriptedMachine()
    install_machine(monkeypatch, machine, ledger)
    page = open_page(**SMALL)
    page.session_state["focus"] = ("bfloat16", 1)  # as the table's cell does
    page.run()
    visit(page, "measure")
    press(page)
    cell, _ = machine.measured[0]
    assert (cell.name, cell.dtypes, cell.batches) == ("resnet18", ("bfloat16",), (1,))
    assert page.text_input(key="batch").value == "1, 2", "the question itself stays as it was"
    visit(page, "estimate")
    assert page.main.title[0].value.startswith("Training resnet18 at batch 1 in bfloat16")


def test_link_opens_its_question_and_keeps_the_device_planned_for(monkeypatch, ledger, open_measure):
    machine = ScriptedMachine()
    install_machine(monkeypatch, machine, ledger)
    page = open_measure(**SMALL, gpu="t4", mode="inference")
    assert not any(box.label == "Device" for box in page.selectbox)
    press(page)
    cell, device = machine.measured[0]
    assert (cell.mode, cell.gpu, device) == ("inference", "t4", "cpu")
    visit(page, "estimate")
    assert page.selectbox(key="gpu").value == "t4"


def test_work_that_would_take_the_host_down_is_refused(monkeypatch, ledger, open_measure):
    machine = ScriptedMachine(replace(CPU, free_bytes=600 * MIB))
    install_machine(monkeypatch, machine, ledger)
    page = open_measure(**SMALL)
    assert "are free: it is not run here" in page.warning[0].value
    assert page.button(key="measure").disabled
    page.session_state["measure_requested"] = ("arch=torchvision:resnet18&dtype=float32&batch=2", "cpu")
    page.run()  # the press of a browser that was not told yet
    assert not machine.measured


def test_work_too_large_for_an_accelerator_may_run_out_of_memory(monkeypatch, ledger, open_measure):
    machine = ScriptedMachine(CPU, replace(CUDA, free_bytes=100 * MIB))
    install_machine(monkeypatch, machine, ledger)
    page = open_measure(**SMALL)
    assert "expect it to run out of memory" in page.warning[0].value
    press(page)
    assert len(machine.measured) == 1


def test_measuring_is_switched_off_by_the_environment(monkeypatch, ledger, open_measure):
    machine = ScriptedMachine()
    install_machine(monkeypatch, machine, ledger)
    monkeypatch.setenv(here.MEASURING_VARIABLE, "off")
    page = open_measure(**SMALL)
    assert "disabled in this deployment" in page.info[0].value
    assert not any(button.key == "measure" for button in page.button)
    assert "sizer measure" in command(page)
    assert page.get("file_uploader")


@pytest.mark.parametrize("value", ["1", "0.0", "what"])
def test_strangers_neither_measure_nor_import(monkeypatch, ledger, open_measure, value):
    machine = ScriptedMachine()
    install_machine(monkeypatch, machine, ledger)
    monkeypatch.setenv(PUBLIC_VARIABLE, value)
    page = open_measure(**SMALL)
    told = [info.value for info in page.info]
    assert {measure.SWITCHED_OFF, measuring.SWITCHED_OFF} <= {*told}
    assert not any(button.key == "measure" for button in page.button)
    assert not page.get("file_uploader")
    assert "sizer measure" in command(page)


@pytest.mark.parametrize(
    ("value", "may"), [("", True), ("on", True), ("1", True), ("off", False), ("0", False), ("what", False)]
)
def test_unknown_value_of_a_switch_means_the_safe_side(monkeypatch, value, may):
    monkeypatch.delenv(PUBLIC_VARIABLE, raising=False)
    monkeypatch.setenv(here.MEASURING_VARIABLE, value)
    assert here.may_measure() is may
    monkeypatch.setenv(PUBLIC_VARIABLE, "what")
    assert not here.may_measure()
    assert not here.may_import()


def test_step_that_cannot_be_traced_is_not_measured(monkeypatch, ledger, open_measure):
    why = "aten.nonzero.default has a size that depends on values"
    client = ComparingClient(lambda request: report_for(request, failures=dict.fromkeys(request.dtypes, why)))
    install_machine(monkeypatch, ScriptedMachine(), ledger, client)
    page = open_measure(**SMALL)
    assert any(why in line for line in texts(page))
    assert measure.NO_ESTIMATE in [info.value for info in page.info]
    assert not any(button.key == "measure" for button in page.button)


# --------------------------------------------------------------------------------------------------------- and after it


def test_measured_and_estimated_side_by_side(monkeypatch, ledger, open_measure):
    machine = ScriptedMachine(progress=["building", "forward"])
    install_machine(monkeypatch, machine, ledger)
    page = press(open_measure(**SMALL))
    estimate = report_for(replace(CELL, gpu="cpu")).estimates[0]
    peak = format_bytes(estimate.peak_allocated_bytes)
    assert headline(page) == f"Measured on cpu: peak {peak}, the estimate said {peak}: exact"
    assert "Training of resnet18, float32, batch 2. A processor, torch 2.15.0, 2026-11-21 10:00:00 UTC." in texts(page)
    whole, phases = page.table[0].value, page.table[1].value
    assert list(whole.index) == ["peak allocated", "weights"]
    assert list(phases.index)[:2] == ["load: allocated at its end", "load: peak"]
    assert list(whole.columns) == ["Estimated", "Measured", "Difference, bytes", "Error"]
    assert whole.loc["weights", "Error"] == "✓\N{NO-BREAK SPACE}exact"
    assert not page.status
    assert not machine.jobs[0].cancelled
    (row,) = ledger.rows()
    assert ledger.comparison(row.id) == comparison_of(measured_on(CPU, replace(CELL, gpu="a100-80gb")))


def test_a_row_that_misses_its_tolerance_is_marked_and_explained(monkeypatch, ledger, open_measure):
    machine = ScriptedMachine(measure=lambda facts, cell: measured_on(facts, cell, more_bytes=90 * MIB))
    install_machine(monkeypatch, machine, ledger)
    page = press(open_measure(**SMALL))
    estimated = report_for(replace(CELL, gpu="cpu")).estimates[0].peak_allocated_bytes
    # the sign: the estimate is 90 MiB too low
    percent = f"−{100 * 90 * MIB / (estimated + 90 * MIB):.1f}\N{NO-BREAK SPACE}%"
    assert headline(page).endswith(f"the estimate said {format_bytes(estimated)}: {percent}")
    row = page.table[0].value.loc["peak allocated"]
    assert (row["Difference, bytes"], row["Error"]) == (f"−{90 * MIB:,}", f"✕\N{NO-BREAK SPACE}{percent}")
    shown = texts(page)
    assert f"✕ peak_allocated_bytes is off by {-90 * MIB} bytes" in shown
    assert any(line.startswith("forward: the device allocates 3.00 MiB in aten::mkldnn_convolution") for line in shown)


def test_timelines_are_drawn_over_each_other(monkeypatch, ledger, open_measure):
    install_machine(monkeypatch, ScriptedMachine(), ledger)
    page = press(open_measure(**SMALL))
    (chart,) = (json.loads(chart.proto.spec) for chart in page.get("vega_lite_chart"))
    assert chart["description"] == "Memory measured and estimated through one step, in MiB"
    assert [layer["mark"]["type"] for layer in chart["layer"]][:2] == ["area", "line"]


def test_time_and_transfers_on_an_accelerator(monkeypatch, ledger, open_measure):
    install_machine(monkeypatch, ScriptedMachine(CPU, CUDA), ledger)
    page = press(open_measure(**SMALL))
    time, transfers = page.table[2].value, page.table[3].value
    assert list(time["Median"]) == ["12.50 ms", "400.0 µs"]
    assert time.loc["One step, synchronized", "Quartiles"] == "12.00 ms to 14.00 ms"
    # 2 * 150528 * 4 bytes = 1,204,224 bytes in 12.5 ms are 0.0963 GB/s
    assert transfers.loc["pinned memory, non_blocking"].tolist() == ["1.15 MiB", "400.0 µs", "12.50 ms", "0.1 GB/s"]
    assert any("does not wait for it" in caption.value for caption in page.caption)
    assert [metric.label for metric in page.metric] == [
        "Peak allocated",
        "Peak reserved",
        "Process",
        "One step",
        "Retries",
    ]
    assert any("is inside the estimate's range" in caption.value for caption in page.caption)


def test_doubts_and_retries_are_said(monkeypatch, ledger, open_measure):
    def doubtful(facts, cell):
        measured = measured_on(facts, cell)
        doubts = ("the allocator released cached memory 3 times",)
        return replace(measured, measurement=replace(measured.measurement, retries=3, doubts=doubts))

    install_machine(monkeypatch, ScriptedMachine(CPU, CUDA, measure=doubtful), ledger)
    page = press(open_measure(**SMALL))
    assert "may be unreliable" in page.warning[0].value
    assert "the allocator released cached memory 3 times" in texts(page)
    assert page.metric[-1].value == "3"


def test_out_of_memory_is_a_result(monkeypatch, ledger, open_measure):
    client = ComparingClient(compare=lambda measured: out_of_memory(comparison_of(measured)))
    install_machine(monkeypatch, ScriptedMachine(CPU, CUDA), ledger, client)
    page = press(open_measure(**SMALL))
    assert headline(page) == "Measured on cuda:0: out of memory in the backward pass, the estimate said that it fits"
    shown = texts(page)
    assert (
        "In the backward pass: 2.00 GiB asked for, 1.00 GiB free on the device then, 70.00 GiB allocated then, "
        "72.00 GiB reserved then."
    ) in shown
    assert "CUDA out of memory." in shown
    assert any(line.startswith("The estimate had said: a peak of ") for line in shown)
    assert len(ledger.rows()) == 1


def test_without_a_recording_the_readings_are_dots(monkeypatch, ledger, open_measure):
    client = ComparingClient(compare=lambda measured: comparison_of(measured, recorded=False))
    install_machine(monkeypatch, ScriptedMachine(), ledger, client)
    page = press(open_measure(**SMALL))
    (chart,) = (json.loads(chart.proto.spec) for chart in page.get("vega_lite_chart"))
    assert chart["layer"][0]["mark"]["type"] == "point"
    assert comparison_view.DOTS in [caption.value for caption in page.caption]


def test_another_cell_has_no_result_yet(monkeypatch, ledger, open_measure):
    install_machine(monkeypatch, ScriptedMachine(), ledger)
    page = press(open_measure(**SMALL))
    choose_cell(page, "float32", 1)
    assert not page.main.header
    choose_cell(page, "float32", 2)
    assert page.main.header, "the last result belongs to its question"


def test_result_offers_its_file_and_command(monkeypatch, ledger, open_measure):
    install_machine(monkeypatch, ScriptedMachine(), ledger)
    page = press(open_measure(**SMALL))
    page.session_state["comparison_details"] = "Downloads"
    page.run()
    (button,) = page.get("download_button")
    assert button.proto.label == "Comparison (JSON)"
    assert button.proto.ignore_rerun
    commands = [code.value for code in page.code if "--device cpu" in code.value]
    assert len(commands) == 1
    assert parse_query(commands[0].split("'")[1]).batches == (2,)


# ------------------------------------------------------------------------------------------------------ what may go wrong


@pytest.mark.parametrize(
    ("error", "title"),
    [
        (DeviceError("the device is lost", given="'cpu'", allowed="a", todo="b"), "This device cannot be used."),
        (JobError("the device is lost", given="'cpu'", allowed="a", todo="b"), "The measurement was not finished."),
        (
            BuildError("the device is lost", given="'cpu'", allowed="a", todo="b"),
            "The architecture could not be built.",
        ),
    ],
)
def test_errors_of_a_measurement_say_what_to_do(monkeypatch, ledger, open_measure, error, title):
    machine = ScriptedMachine(failure=error, progress=["building"])
    install_machine(monkeypatch, machine, ledger)
    page = press(open_measure(**SMALL))
    assert page.error[0].value == title
    assert texts(page)[-4:] == ["the device is lost", "Given: 'cpu'", "Allowed: a", "What to do: b"]
    assert not page.status
    assert not ledger.rows()
    machine.failure = None
    page.run()
    assert not page.error
    assert press(page).main.header


def test_a_result_that_cannot_be_kept_is_shown_all_the_same(monkeypatch, ledger, open_measure):
    install_machine(monkeypatch, ScriptedMachine(), ledger)
    page = open_measure(**SMALL)
    ledger.path.write_bytes(b"not a database at all" * 100)
    press(page)
    assert page.error[0].value == "The measurement is below, but could not be kept."
    assert headline(page).startswith("Measured on cpu: peak ")


def test_a_measurement_that_nobody_waits_for_is_cancelled(monkeypatch):
    class Abandoned(BaseException):
        """What a rerun or a closed tab does to a page that waits."""

    def abandon(timeout: float) -> None:
        raise Abandoned

    job = ScriptedJob(lambda: None)
    monkeypatch.setattr(job, "result", abandon)
    with pytest.raises(Abandoned):
        measuring.wait_for(job, None)
    assert job.cancelled


def test_a_measurement_begins_once(monkeypatch, ledger, open_measure):
    machine = ScriptedMachine()
    install_machine(monkeypatch, machine, ledger)
    page = press(open_measure(**SMALL))
    page.run()
    page.run()
    assert len(machine.measured) == 1


def test_a_request_for_another_target_is_not_run_later(monkeypatch, ledger, open_measure):
    machine = ScriptedMachine()
    install_machine(monkeypatch, machine, ledger)
    page = open_measure(**SMALL)
    page.session_state["measure_requested"] = ("arch=torchvision:alexnet", "cpu")
    page.run()
    assert "measure_requested" not in page.session_state
    assert not machine.measured


# ------------------------------------------------------------------------------------------------- from another machine


def upload(page: AppTest, content: bytes) -> AppTest:
    edition = page.session_state["import_edition_measure"]
    return page.file_uploader(key=f"import_measure_{edition}").upload("measured.json", content).run()


def test_result_of_another_machine_is_shown_just_the_same(monkeypatch, ledger, open_measure):
    client = install_machine(monkeypatch, ScriptedMachine(), ledger)
    comparison = comparison_of(measured_on(CUDA))
    page = upload(open_measure(**SMALL), json.dumps(comparison.to_dict()).encode())
    assert headline(page).startswith("Measured on cuda:0: peak ")
    assert page.success[0].value == "1 comparison was added to the ledger, 0 known already."
    assert [ledger.comparison(row.id) for row in ledger.rows()] == [comparison]
    assert not client.compared
    page = upload(page, json.dumps(comparison.to_dict()).encode())
    assert page.success[0].value == "0 comparisons were added to the ledger, 1 known already."


def test_measurement_without_a_comparison_is_compared_here(monkeypatch, ledger, open_measure):
    client = install_machine(monkeypatch, ScriptedMachine(), ledger)
    measured = measured_on(CUDA)
    page = upload(open_measure(**SMALL), json.dumps(measured.to_dict()).encode())
    assert client.compared == [measured]
    assert headline(page).startswith("Measured on cuda:0: peak ")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[1, 2]", b'{"schema": 1}', b"[" * 100_000])
def test_files_that_are_something_else_are_refused(monkeypatch, ledger, open_measure, content):
    install_machine(monkeypatch, ScriptedMachine(), ledger)
    page = upload(open_measure(**SMALL), content)
    assert page.error or page.warning
    assert not page.main.header
    assert not ledger.rows()


def test_file_that_is_too_large_is_refused(monkeypatch, ledger, open_measure):
    monkeypatch.setattr(measuring, "LIMIT_MIB", 1)
    install_machine(monkeypatch, ScriptedMachine(), ledger)
    page = open_measure(**SMALL)
    monkeypatch.setattr(measuring, "MIB", 1000)  # what a browser that knows no limit would send
    page = upload(page, b" " * 1001)
    assert page.error[0].value == "This file was not imported."
    assert "Given: 1,001 bytes" in texts(page)


def test_names_from_strangers_are_never_markup(monkeypatch, ledger, open_measure):
    install_machine(monkeypatch, ScriptedMachine(), ledger)
    facts = replace(CUDA, device=HOSTILE, name=HOSTILE, versions={HOSTILE: HOSTILE})
    comparison = comparison_of(measured_on(CUDA, more_bytes=90 * MIB))
    measurement = replace(comparison.measurement, device=facts, query=HOSTILE, source=HOSTILE, doubts=(HOSTILE,))
    timing = replace(measurement.timing, clock=HOSTILE, transfers=measurement.timing.transfers * 2)
    measurement = replace(measurement, timing=timing)
    rows = (*comparison.rows, replace(comparison.rows[0], quantity=HOSTILE, allowance=HOSTILE, phase=HOSTILE))
    comparison = replace(
        comparison,
        architecture=HOSTILE,
        class_name=HOSTILE,
        mode=HOSTILE,
        measurement=measurement,
        rows=rows,
        verdict=HOSTILE,
        wrong=(HOSTILE,),
        notes=(HOSTILE,),
        first_divergence=replace(comparison.first_divergence, op=HOSTILE, module=HOSTILE, device_op=HOSTILE),
    )
    page = open_measure(**SMALL)
    page.session_state["measure_result"] = (("arch=torchvision:resnet18&dtype=float32&batch=2", "cpu"), comparison)
    page.run()
    assert headline(page).startswith("Measured on a device: peak ")
    assert sum(HOSTILE in line for line in texts(page)) > 5
    assert HOSTILE not in markup(page)
    assert "x.example" not in markup(page)
    tables = "\n".join(table.value.to_csv() for table in page.table)
    assert "x.example" not in tables
    assert not any("x.example" in code.value for code in page.code)

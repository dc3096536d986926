"""The ledger, a part of the page that measures: what it lists, how far estimates were off, and each comparison whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from sizer.device.ledger.ledger import Ledger
from sizer.device.ledger.rows import Filter
from sizer.service.settings import PUBLIC_VARIABLE
from sizer.ui import measuring as here
from sizer.ui.ledger_view import LEDGER, NOTHING_YET, PART, rows_frame, statistics_frame
from sizer.ui.published import FIGURES, errors_chart, points_of
from tests.ui.comparisons import CELL, CPU, CUDA, comparison_of, measured_on, out_of_memory
from tests.ui.conftest import markup, texts
from tests.ui.machines import ScriptedMachine, install_machine
from tests.ui.reports import MIB
from tests.ui.specs import rows_with

HOSTILE = "**bold** [link](http://x.example) ![i](http://x.example/i.png) :red[x] `y`"
Open = Callable[..., AppTest]


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """An empty ledger, which the page finds."""
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    install_machine(monkeypatch, ScriptedMachine(), ledger)
    return ledger


@pytest.fixture
def filled(ledger: Ledger) -> Ledger:
    """resnet18 on a CPU, exact; then vit_b_16 in bfloat16 on a CUDA device, whose peak was 90 MiB more than estimated."""
    ledger.add(comparison_of(measured_on(CPU, at="2026-11-20T10:00:00Z")))
    cell = replace(CELL, name="vit_b_16", mode="inference", dtypes=("bfloat16",))
    measured = measured_on(CUDA, cell, more_bytes=90 * MIB, at="2026-11-21T10:00:00Z")
    ledger.add(comparison_of(measured, architecture="vit_b_16"))
    return ledger


@pytest.fixture
def open_ledger(open_page: Open) -> Open:
    """A function that opens the page that measures, at one comparison or with its part that lists them all chosen."""

    def open_at(**query: str) -> AppTest:
        page = open_page("measure", **query)
        return page if query else page.segmented_control(key=PART).set_value(LEDGER).run()

    return open_at


def listed(page: AppTest) -> list[str]:
    return page.dataframe[0].value["Architecture"].tolist()


def pick(page: AppTest, label: str, value: str) -> AppTest:
    return next(box for box in page.selectbox if box.label == label).set_value(value).run()


def link(page: AppTest, **query: str) -> AppTest:
    for key, value in query.items():
        page.query_params[key] = value
    return page.run()


# -------------------------------------------------------------------------------------------------------------- the list


def test_empty_ledger_says_how_to_fill_it(ledger, open_ledger):
    page = open_ledger()
    assert page.info[0].value == NOTHING_YET
    assert any("python -m sizer measure 'arch=" in code.value for code in page.code)
    assert page.get("file_uploader")
    assert not ledger.path.exists(), "looking makes no file"


def test_lists_every_comparison_the_newest_first(filled, open_ledger):
    page = open_ledger()
    assert listed(page) == ["vit_b_16", "resnet18"]
    frame = page.dataframe[0].value
    assert frame["Within tolerance"].tolist() == ["✕", "✓"]
    assert frame["Measured"].tolist() == ["2026-11-21 10:00:00 UTC", "2026-11-20 10:00:00 UTC"]
    assert frame["Device"].tolist() == ["NVIDIA A100-SXM4-80GB", "A processor"]
    assert "**2 comparisons**, 1 within tolerance" in markup(page)


def test_errors_are_signed_and_missing_where_nothing_was_measured(filled):
    frame = rows_frame(filled.rows())
    row = filled.rows()[0]
    low = 100 * -90 * MIB / row.measured_peak_allocated_bytes  # the estimate was 90 MiB too low
    assert frame["Allocated"].tolist() == pytest.approx([low, 0.0])
    assert frame["Process"].isna().tolist() == [False, True], "no driver speaks for a CPU"
    assert frame["Peak, GiB"][0] * 2**30 == pytest.approx(row.measured_peak_allocated_bytes)


@pytest.mark.parametrize(
    ("label", "value", "left"),
    [
        ("Device", "A processor", ["resnet18"]),
        ("Task", "inference", ["vit_b_16"]),
        ("Dtype", "float32", ["resnet18"]),
        ("Source", "torchvision", ["vit_b_16", "resnet18"]),
        ("Within tolerance?", "yes", ["resnet18"]),
        ("Within tolerance?", "no", ["vit_b_16"]),
    ],
)
def test_filters(filled, open_ledger, label, value, left):
    page = pick(open_ledger(), label, value)
    assert listed(page) == left
    rows, statistics = (frame.value for frame in page.dataframe[:2])
    assert set(statistics["Device"]) == set(rows["Device"]), "the statistics follow the filter"
    assert listed(pick(page, label, "all")) == ["vit_b_16", "resnet18"]


def test_filter_by_a_part_of_the_name(filled, open_ledger):
    page = open_ledger()
    page.text_input(key="ledger_architecture").set_value("ViT").run()
    assert listed(page) == ["vit_b_16"]
    page.text_input(key="ledger_architecture").set_value("gpt").run()
    assert "No comparison matches these filters" in page.info[0].value


def test_statistics_are_signed_per_quantity_and_device(filled):
    frame = statistics_frame(filled.statistics(by_family=False))
    row = frame[(frame["Figure"] == "peak allocated") & (frame["Device"] == CUDA.name)].iloc[0]
    low = 100 * -90 * MIB / filled.rows()[0].measured_peak_allocated_bytes
    assert (row["Count"], row["Median"], row["Worst"], row["Bias"]) == (1, *[pytest.approx(low)] * 3)
    assert frame["Figure"].tolist()[0] == "peak allocated", "the peaks come first"


def test_chart_shows_each_signed_error_once(filled):
    points = rows_with(errors_chart(points_of(filled.rows())), "row")
    assert sorted((point["row"], point["work"]) for point in points) == [
        ("Allocated", "resnet18, float32, batch 2"),
        ("Allocated", "vit_b_16, bfloat16, batch 2"),
        ("Process", "vit_b_16, bfloat16, batch 2"),
        ("Reserved", "vit_b_16, bfloat16, batch 2"),
    ]


def test_chart_of_figures_that_nobody_measured(ledger):
    ledger.add(out_of_memory(comparison_of(measured_on(CUDA))))
    (row,) = ledger.rows()
    assert [figure.percent(row) for figure in FIGURES.values()] == [None, None, None]
    assert rows_with(errors_chart(points_of([row])), "row") == []


def test_downloads_are_offered(filled, open_ledger):
    page = open_ledger()
    labels = [button.proto.label for button in page.get("download_button")]
    assert labels == ["The ledger (CSV)", "The ledger (JSON)"]
    assert all(button.proto.ignore_rerun for button in page.get("download_button"))


# -------------------------------------------------------------------------------------------------------- one comparison


def test_the_address_that_the_ledger_had_leads_there(filled, open_page):
    assert listed(open_page("ledger")) == ["vit_b_16", "resnet18"]
    page = open_page("ledger", comparison=str(filled.rows()[0].id))
    assert page.main.header[0].value.startswith("Measured on cuda:0: peak ")


def test_link_shows_one_comparison_whole(filled, open_ledger):
    number = filled.rows(Filter(architecture="vit"))[0].id
    page = open_ledger(comparison=str(number))
    assert page.main.header[0].value.startswith("Measured on cuda:0: peak ")
    assert len(page.table) == 4  # figures, phases, times, transfers
    page.button(key="ledger_back").click().run()
    assert listed(page) == ["vit_b_16", "resnet18"]
    assert "comparison" not in page.query_params


@pytest.mark.parametrize("number", ["99", "-1", "x", "9" * 400, "²", "1; DROP TABLE comparisons"])
def test_comparison_that_is_not_there(filled, open_ledger, number):
    page = open_ledger(comparison=number)
    assert "no such comparison" in page.info[0].value
    assert len(filled.rows()) == 2


def test_deleting_one(filled, open_ledger):
    number = filled.rows()[0].id
    page = open_ledger(comparison=str(number))
    page.button(key="ledger_delete").click().run()
    assert listed(page) == ["resnet18"]
    assert filled.comparison(number) is None


@pytest.mark.parametrize(("variable", "value"), [(here.MEASURING_VARIABLE, "off"), (PUBLIC_VARIABLE, "1")])
def test_nothing_is_deleted_where_strangers_are(filled, open_ledger, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    page = open_ledger(comparison=str(filled.rows()[0].id))
    assert page.main.header
    assert not any(button.key == "ledger_delete" for button in page.button)
    assert "Deleting is disabled in this deployment." in [caption.value for caption in page.caption]


def test_nothing_is_imported_where_strangers_are(filled, open_ledger, monkeypatch):
    monkeypatch.setenv(PUBLIC_VARIABLE, "1")
    page = open_ledger()
    assert listed(page) == ["vit_b_16", "resnet18"]
    assert not page.get("file_uploader")
    assert here.SWITCHED_OFF in [info.value for info in page.info]


# -------------------------------------------------------------------------------------------------- from another machine


def test_import_of_another_ledger(filled, ledger, open_ledger, tmp_path):
    other = Ledger(tmp_path / "other.sqlite3")
    other.add(comparison_of(measured_on(CUDA, at="2026-11-19T10:00:00Z"), architecture="elsewhere"))
    other.add(filled.comparison(1))
    page = open_ledger()
    page.file_uploader(key="import_ledger_0").upload("ledger.json", "".join(other.export_json()).encode()).run()
    assert page.success[0].value == "1 comparison was added to the ledger, 1 known already."
    assert listed(page) == ["vit_b_16", "resnet18", "elsewhere"]


def test_import_that_is_refused_says_why(ledger, open_ledger):
    page = open_ledger()
    page.file_uploader(key="import_ledger_0").upload(
        "ledger.json", b'{"schema": 1, "comparisons": [{"schema": 1}]}'
    ).run()
    assert page.warning[0].value == "1 comparison was refused."
    assert any(line.startswith("number 1: ") for line in texts(page))
    assert page.info[0].value == NOTHING_YET


def test_ledger_that_cannot_be_read_is_said(ledger, open_ledger):
    ledger.path.write_bytes(b"not a database at all" * 100)
    page = open_ledger()
    assert page.error[0].value == "The ledger cannot be read."
    assert any("SIZER_LEDGER" in line for line in texts(page))


def test_names_from_strangers_are_never_markup(ledger, open_ledger):
    facts = replace(CUDA, name=HOSTILE)
    comparison = comparison_of(measured_on(CUDA), architecture=HOSTILE)
    comparison = replace(comparison, class_name=HOSTILE, measurement=replace(comparison.measurement, device=facts))
    number = ledger.add(comparison)
    page = open_ledger()
    assert listed(page) == [HOSTILE]
    assert "x.example" not in markup(page)
    chart = json.loads(page.get("vega_lite_chart")[0].proto.spec)
    assert HOSTILE not in chart["description"]
    page = link(page, comparison=str(number))
    assert any(HOSTILE in line for line in texts(page))
    assert "x.example" not in markup(page)

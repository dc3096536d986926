"""The published figures that ship with Sizer: each is that of its source, and the page mixes no two kinds of them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest
from streamlit.testing.v1 import AppTest

from sizer.catalogue.gpus import GPUS
from sizer.device.ledger.ledger import Ledger
from sizer.device.ledger.published_figures import read_published
from sizer.ui.ledger_view import LEDGER, PART
from sizer.ui.published import QUANTITIES, published_frame, published_points, statistics_frame
from tests.benchmarks.bench_published import by_set
from tests.benchmarks.published.errors import read_errors
from tests.benchmarks.published.rows import read_runs
from tests.benchmarks.published.shipped import work_of
from tests.ui.machines import ScriptedMachine, install_machine

FIGURES = read_published()


def key(work: str, gpu: str, quantity: str, source: str) -> tuple[str, ...]:
    return work, gpu, quantity, source


REPEATED = {key(work_of(run), run.gpu, run.quantity, run.source): run for run in read_runs() if not run.repeats}


def test_every_repeated_run_ships_with_what_was_measured():
    shipped = {key(one.work, one.gpu, one.quantity, one.source): one.measured_bytes for one in FIGURES}
    assert shipped == {found: run.figure_bytes for found, run in REPEATED.items()}
    assert all(one.source.startswith("https://") for one in FIGURES)


def test_the_estimates_are_those_of_the_benchmark():
    errors: dict[tuple[str, ...], list[float]] = {}
    for one in FIGURES:
        run = REPEATED[key(one.work, one.gpu, one.quantity, one.source)]
        errors.setdefault(by_set(run), []).append(one.error)
    written = {(row["set"], row["run"], row["quantity"]): row for row in read_errors()}
    assert errors.keys() == written.keys()
    for group, found in errors.items():
        assert f"{100 * median(found):+.2f}".replace("-0.00", "+0.00") == written[group]["median_percent"], group
        assert {one.estimated_with for one in FIGURES} == {
            f"torch {written[group]['torch']}, transformers {written[group]['transformers']}"
        }


def test_every_kind_has_a_title_and_every_gpu_is_known():
    assert {one.quantity for one in FIGURES} == set(QUANTITIES)
    assert {one.gpu for one in FIGURES} <= set(GPUS)


@pytest.fixture
def open_ledger(open_page: Callable[..., AppTest], tmp_path, monkeypatch) -> Callable[[], AppTest]:
    install_machine(monkeypatch, ScriptedMachine(), Ledger(tmp_path / "ledger.sqlite3"))
    return lambda: open_page("measure").segmented_control(key=PART).set_value(LEDGER).run()


def test_an_empty_ledger_opens_with_them(open_ledger):
    page = open_ledger()
    allocated = [one for one in FIGURES if one.quantity == "allocated"]
    table = page.dataframe[0].value
    assert table["Work"].tolist() == [one.work for one in allocated]
    assert table["Source"].tolist() == [one.source for one in allocated]
    assert table["Error"].tolist() == pytest.approx([100 * one.error for one in allocated], abs=0.005)  # none is "-0.00"


def test_one_kind_and_one_gpu_at_a_time(open_ledger):
    page = open_ledger()
    page.selectbox(key="published_quantity").set_value("process").run()
    assert set(page.dataframe[0].value["GPU"]) == {"Tesla T4 (16 GB)"}
    page.selectbox(key="published_quantity").set_value("allocated").run()
    next(box for box in page.selectbox if box.label == "GPU").set_value("L40S (48 GB)").run()
    assert set(page.dataframe[0].value["GPU"]) == {"L40S (48 GB)"}


def test_chart_and_statistics_are_of_the_same_figures():
    chosen = [one for one in FIGURES if one.quantity == "reserved"]
    points = published_points(chosen, "Peak reserved")
    assert [point.percent for point in points] == [100 * one.error for one in chosen]
    statistics = statistics_frame(chosen)
    assert statistics["Count"].sum() == len(chosen)
    assert set(statistics["GPU"]) == {one.device for one in chosen} == {point.row for point in points}
    frame = published_frame(chosen)
    assert frame["Measured, GiB"].iloc[0] == pytest.approx(chosen[0].measured_bytes / 2**30, abs=0.001)

"""Every chart is valid Vega-Lite by the schema that Altair ships, and has the fields that it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import altair
import pytest

from sizer.allocator.timeline import Curve
from sizer.pasted.snapshot import read_snapshot
from sizer.query.text import parse_query, read_questions
from sizer.ui import charts, vega
from sizer.ui.charts import timelines_chart
from sizer.ui.compare_figures import bars_chart, growth_chart
from sizer.ui.decision_tables import budgets_chart, ranks_chart, served_devices_chart
from sizer.ui.decision_view import devices_chart
from sizer.ui.devices_view import stages_chart, stages_frame
from sizer.ui.focus import PEAK_KINDS
from sizer.ui.headline import capacity_chart
from sizer.ui.pasting import snapshot_chart
from sizer.ui.peak_view import icicle_chart
from sizer.ui.published import Point, errors_chart
from sizer.ui.server_view import budget_chart
from sizer.ui.vega import Spec
from tests.ui.comparisons import CUDA, comparison_of, measured_on
from tests.ui.decisions import GIB, budgets_for, devices_for, ranks_for, served_devices_for
from tests.ui.reports import peak_for, report_for
from tests.ui.specs import layers, sent
from tests.ui.test_devices_page import shown_on
from tests.ui.test_pasting import SNAPSHOT
from tests.ui.test_serving import served_for

QUERY = "arch=torchvision:resnet50&dtype=float32&batch=32"
SERVER = "arch=hf:qwen3-8b&mode=serve&gpu=rtx-4090&want=8x32k"
PROCESS = PEAK_KINDS["process"]
SMALL = report_for(parse_query("arch=torchvision:resnet50&dtype=float32&batch=1,256&gpu=rtx-3060-12gb"))
FITS, OVER = SMALL.estimates
RANGED = replace(FITS, process_low_bytes=FITS.process_bytes - 1, process_high_bytes=FITS.process_bytes + 1)
POINT = replace(OVER, curve=Curve.of_points([*OVER.curve][:1]))
STAGES = shown_on("cuda:0", cached=True)
REPORTS = {
    number: report_for(request) for number, request in enumerate(read_questions([QUERY, f"{QUERY}&mode=inference"]), 1)
}

CHARTS: dict[str, Callable[[], Spec]] = {
    "peaks": lambda: charts.peak_chart(SMALL.estimates, PROCESS, SMALL.gpu),
    "a peak far below the capacity": lambda: charts.peak_chart([FITS], PEAK_KINDS["allocated"], SMALL.gpu),
    "step": lambda: charts.step_chart(OVER, SMALL.gpu),
    "a step of one point": lambda: charts.step_chart(POINT, SMALL.gpu),
    "capacity": lambda: capacity_chart(OVER, SMALL.gpu),
    "capacity with a range": lambda: capacity_chart(RANGED, SMALL.gpu),
    "timelines": lambda: timelines_chart(comparison_of(measured_on(CUDA))),
    "timelines without a recording": lambda: timelines_chart(comparison_of(measured_on(CUDA), recorded=False)),
    "growth": lambda: growth_chart(REPORTS, {1: "a", 2: "b"}, PROCESS),
    "bars": lambda: bars_chart(REPORTS, PROCESS),
    "icicle": lambda: icicle_chart(peak_for(parse_query(QUERY)).modules),
    "no modules": lambda: icicle_chart([]),
    "errors": lambda: errors_chart([Point(row="a", group="b", percent=1.5, work="c")]),
    "no errors": lambda: errors_chart([]),
    "snapshot": lambda: snapshot_chart(read_snapshot(SNAPSHOT), FITS),
    "a snapshot alone": lambda: snapshot_chart(read_snapshot(SNAPSHOT), None),
    "stages": lambda: stages_chart(STAGES.device, stages_frame(STAGES)),
    "devices": lambda: devices_chart(devices_for(QUERY).rows),
    "budgets": lambda: budgets_chart(budgets_for(QUERY)),
    "ranks": lambda: ranks_chart(ranks_for(QUERY).rows, 80 * GIB),
    "servers": lambda: served_devices_chart(served_devices_for(SERVER).rows),
    "budget": lambda: budget_chart(served_for(parse_query(SERVER))),
}
EMPTY = {"no modules"}


def fields(encoding: object) -> Iterator[str]:
    """The fields of an encoding, those of tooltips and conditions too."""
    if isinstance(encoding, dict):
        if "field" in encoding:
            yield encoding["field"]
        for part in encoding.values():
            yield from fields(part)
    elif isinstance(encoding, list):
        for part in encoding:
            yield from fields(part)


@pytest.mark.parametrize("name", CHARTS)
def test_charts_are_valid_vega_lite(name: str) -> None:
    chart = sent(CHARTS[name]())
    altair.Root.validate(chart)
    assert chart["description"]


def test_charts_that_are_not_valid_are_refused() -> None:
    chart = sent(vega.layered([vega.layer(vega.rows({"a": 1}), "rule", x=vega.quantitative("a"))], "words", height=9))
    altair.Root.validate(chart)
    chart["layer"][0]["encoding"]["x"]["axes"] = None
    with pytest.raises(altair.utils.schemapi.jsonschema.ValidationError, match="'axes' was unexpected"):
        altair.Root.validate(chart)


@pytest.mark.parametrize("name", CHARTS)
def test_every_row_has_the_fields_that_are_shown(name: str) -> None:
    chart = CHARTS[name]()
    for layer, rows in zip(sent(chart)["layer"], layers(chart), strict=True):
        shown = set(fields(layer["encoding"]))
        assert shown
        assert all(shown <= row.keys() for row in rows)
    assert any(layers(chart)) or name in EMPTY


@pytest.mark.parametrize("name", CHARTS)
def test_streamlit_sends_the_rows_as_they_are(name: str) -> None:
    assert not {"data", "datasets"} & CHARTS[name]().keys(), "Streamlit converts these to Arrow"


def test_a_table_is_its_rows() -> None:
    data = vega.table({"a": (1, 2), "b": ("x", "y")}, "named")
    chart = vega.layered([vega.layer(data, "bar"), vega.layer(vega.shared(data), "line")], "words", height=9)
    assert layers(chart) == [[{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]] * 2

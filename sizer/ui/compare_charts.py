"""Questions over each other: memory over batch size as curves, what is alive at the peak as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from sizer.base.units import format_bytes
from sizer.catalogue.gpus import Gpu
from sizer.report.estimate import Estimate
from sizer.report.report import Report
from sizer.ui.charts import HEIGHT, capacity_lines, finish, in_sight, size_axis, stacked_chart, top_of
from sizer.ui.peak_kinds import PeakKind
from sizer.ui.scale import scale_for

# Okabe and Ito's colours that stand out on white and near-black; the shapes say the same without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
SHAPES = ("circle", "square", "triangle-up", "diamond")

LEGEND_HEIGHT = 22  # of each question above the chart


def focused(reports: Mapping[int, Report]) -> dict[int, Estimate]:
    """The cell in focus of each question that has one."""
    found = {
        number: None if report.focus is None else report.find(report.focus.dtype, report.focus.batch)
        for number, report in reports.items()
    }
    return {number: estimate for number, estimate in found.items() if estimate is not None}


def devices(reports: Mapping[int, Report]) -> list[Gpu]:
    """The devices of the questions, each once."""
    return list(dict.fromkeys(report.gpu for report in reports.values()))


def growth_chart(reports: Mapping[int, Report], headings: Mapping[int, str], kind: PeakKind) -> alt.LayerChart:
    """One curve per question: the peak of its dtype in focus at each batch size, under the capacity of each device."""
    rows: list[dict[str, Any]] = [
        {"question": headings[number], "batch": row.batch, "bytes": kind.of(row)}
        for number, cell in focused(reports).items()
        for row in reports[number].estimates
        if row.dtype == cell.dtype
    ]
    tallest = max(row["bytes"] for row in rows)
    scale = scale_for([tallest])
    frame = pd.DataFrame(rows)
    frame["size"] = frame["bytes"] / scale.unit_bytes
    frame["text"] = frame["bytes"].map(format_bytes)
    names = list(dict.fromkeys(frame["question"]))
    places = [list(headings.values()).index(name) for name in names]
    legend = alt.Legend(orient="top", title=None, columns=1, labelLimit=0, symbolType="stroke")
    batches = sorted(set(frame["batch"]))
    x = alt.X(
        "batch:Q",
        title="batch size",
        scale=alt.Scale(type="log", base=2, nice=False, padding=12),
        axis=alt.Axis(values=batches, grid=False, format=",d"),
    )
    colour = alt.Color(
        "question:N", scale=alt.Scale(domain=names, range=[COLOURS[place] for place in places]), legend=legend
    )
    base = alt.Chart(frame).encode(x=x, y=size_axis(scale, top_of(tallest, devices(reports))), color=colour)
    points = base.mark_point(filled=True, size=70, opacity=1).encode(
        shape=alt.Shape(
            "question:N", scale=alt.Scale(domain=names, range=[SHAPES[place] for place in places]), legend=None
        ),
        tooltip=["question:N", alt.Tooltip("batch:Q", format=","), alt.Tooltip("text:N", title=kind.title.lower())],
    )
    layers = [base.mark_line(strokeWidth=2), points, *capacity_lines(tallest, devices(reports), scale)]
    described = f"{kind.title} memory at the peak over batch size, one curve per question, in {scale.name}"
    return finish(layers, described).properties(height=HEIGHT + LEGEND_HEIGHT * len(names))


def bars_chart(reports: Mapping[int, Report], kind: PeakKind) -> alt.LayerChart:
    """One stacked bar per question: the bytes of each category at the peak of its cell in focus."""
    return stacked_chart(
        focused(reports),
        kind,
        devices(reports),
        field="question",
        title="question",
        description="Memory at the peak by category, one bar per question",
    )


def capacities(gpus: Sequence[Gpu], tallest: int) -> str:
    """What the dashed lines of a chart are, and which devices are far above it."""
    near = [f"{gpu.name} {format_bytes(gpu.total_bytes)}" for gpu in gpus if in_sight(tallest, gpu)]
    far = [f"{gpu.name} {format_bytes(gpu.total_bytes)}" for gpu in gpus if not in_sight(tallest, gpu)]
    told = [f"Dashed: what one device holds, {', '.join(near)}."] if near else []
    return " ".join([*told, *([f"Far above this chart: {', '.join(far)}."] if far else [])])

"""Tables and charts of a comparison: keys that differ, figures, memory over batch size, and the peak as bars.

Cells may hold a stranger's text: st.dataframe shows it as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pandas as pd
import streamlit as st

from sizer.base.units import format_both, format_bytes
from sizer.catalogue.gpus import Gpu
from sizer.report.estimate import Estimate
from sizer.report.report import Report
from sizer.report.side_by_side import OF_SERVER, Side, SideBySide
from sizer.serving.words import VERDICTS
from sizer.ui import vega
from sizer.ui.charts import HEIGHT, capacity_lines, finish, in_sight, size_axis, stacked_chart, top_of
from sizer.ui.focus import PeakKind
from sizer.ui.quantities import quantity_title
from sizer.ui.report_tables import TO_COME
from sizer.ui.server_view import SIGNS
from sizer.ui.styling import MARKS, format_verdict, scale_for
from sizer.ui.vega import Columns, Spec, nominal, quantitative

NONE = "–"
MINUS = "\N{MINUS SIGN}"
LONGEST = 60  # characters of a value; a config has thousands


def show_keys(found: SideBySide, numbers: Sequence[int]) -> None:
    """Show a table of the keys that differ, and one line with the equal keys."""
    if found.differ:
        _show(keys_frame(found, numbers))
    else:
        st.caption("These questions are equal except for the selected cell.")
    same = ", ".join(f"{key} {clip(value)}" for key, value in found.same.items())
    st.text(f"The same in all: {same}.")


def show_figures(found: SideBySide, numbers: Sequence[int]) -> None:
    """Show each question's cell in focus, with its differences from the first."""
    _show(figures_frame(found, numbers))


def _show(frame: pd.DataFrame) -> None:
    st.dataframe(
        frame,
        height="content",
        column_config=dict.fromkeys(frame.columns, st.column_config.TextColumn(alignment="right")),
    )


def keys_frame(found: SideBySide, numbers: Sequence[int]) -> pd.DataFrame:
    """Return a row for each key that differs, and a column for each question."""
    rows = [list(map(clip, values)) for values in found.differ.values()]
    return pd.DataFrame(rows, index=pd.Index(list(found.differ), name="Key"), columns=list(map(str, numbers)))


def clip(text: str) -> str:
    """Return the text, shortened if it is too long for a table."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def figures_frame(found: SideBySide, numbers: Sequence[int]) -> pd.DataFrame:
    """Return a row for each figure, a column for each question, and the differences from the first question."""
    first, *others = numbers
    columns = [str(first), *(title for number in others for title in (str(number), f"{number} {MINUS} {first}"))]
    rows = {
        "cell": _cells(found, _cell),
        **{
            title(name): _cells(found, partial(_figure, name=name, like=found.largest_bytes), name)
            for name in found.figures
            if name != "largest_batch"
        },
        "verdict": _cells(found, _verdict),
    }
    if "largest_batch" in found.figures:
        rows["largest batch"] = _cells(found, _largest, "largest_batch")
    return pd.DataFrame(list(rows.values()), index=pd.Index(list(rows), name="Figure"), columns=columns)


def title(name: str) -> str:
    """Return the title of a figure."""
    if name in OF_SERVER:
        return {"kv_cache_bytes": "KV cache", "kv_tokens": "KV tokens"}.get(name, name.replace("_", " "))
    return quantity_title(name) if name.endswith("_bytes") else name


def _cells(found: SideBySide, text: Callable[[Side], str], figure: str | None = None) -> list[str]:
    cells = [text(found.questions[0])]
    for side in found.questions[1:]:
        cells += [text(side), _difference(found.questions[0], side, figure, found.largest_bytes)]
    return cells


def _difference(first: Side, side: Side, figure: str | None, like: int) -> str:
    """Return a signed difference, also as a share of the first question's figure ("−1.43 GiB, −49 %"); empty if there is none.

    Bytes are written in the unit that suits `like`.
    """
    if figure not in side.differences:
        return ""
    difference, whole = side.differences[figure], getattr(first, figure)
    if not difference:
        return "0"
    size = format_bytes(int(abs(difference)), like=like) if figure.endswith("_bytes") else f"{round(abs(difference), 2):,}"
    sign = "+" if difference > 0 else MINUS
    return f"{sign}{size}, {sign}{_percent(abs(difference) / whole)}" if whole else f"{sign}{size}"


def _percent(share: float) -> str:
    """Return a share in percent, with one decimal if it is below ten."""
    return f"{100 * share:,.{1 if share < 0.1 else 0}f}\N{NO-BREAK SPACE}%"


def _cell(side: Side) -> str:
    if side.request_tokens is not None:
        return f"requests of {side.request_tokens:,} tokens"
    return _missing(side) if side.dtype is None else f"{side.dtype}, batch {side.batch:,}"


def _figure(side: Side, name: str, like: int) -> str:
    value = getattr(side, name)
    if value is None:
        return _missing(side)
    return format_both(value, like=like) if name.endswith("_bytes") else f"{value:,}"


def _verdict(side: Side) -> str:
    if side.starts is not None:
        return f"{MARKS[SIGNS[side.starts]]} {VERDICTS[side.starts]}"
    return _missing(side) if side.verdict is None else format_verdict(side.verdict)


def _largest(side: Side) -> str:
    if side.fits is None or not side.searched:
        return _missing(side)
    return str(side.interval)


def _missing(side: Side) -> str:
    return NONE if side.error else TO_COME


# --------------------------------------------------------------------------------------------------------------- charts


# Okabe and Ito's colours that are visible on white and near-black. Shapes repeat the information without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
SHAPES = ("circle", "square", "triangle-up", "diamond")

LEGEND_HEIGHT = 22  # of each question above the chart


def focused(reports: Mapping[int, Report]) -> dict[int, Estimate]:
    """Return the selected cell of each question that has one."""
    found = {
        number: None if report.focus is None else report.find(report.focus.dtype, report.focus.batch)
        for number, report in reports.items()
    }
    return {number: estimate for number, estimate in found.items() if estimate is not None}


def devices(reports: Mapping[int, Report]) -> list[Gpu]:
    """Return the devices of the questions without duplicates."""
    return list(dict.fromkeys(report.gpu for report in reports.values()))


def growth_chart(reports: Mapping[int, Report], headings: Mapping[int, str], kind: PeakKind) -> Spec:
    """Return one curve per question: the peak of its selected dtype at each batch size, with a line at each device's capacity."""
    rows = [
        (headings[number], row.batch, kind.of(row))
        for number, cell in focused(reports).items()
        for row in reports[number].estimates
        if row.dtype == cell.dtype
    ]
    tallest = max(size for *_, size in rows)
    scale = scale_for([tallest])
    columns: Columns = {
        "question": [question for question, *_ in rows],
        "batch": [batch for _, batch, _ in rows],
        "size": [scale.of(size) for *_, size in rows],
        "text": [format_bytes(size) for *_, size in rows],
    }
    data = vega.table(columns, "curves")
    names = list(dict.fromkeys(columns["question"]))
    places = [list(headings.values()).index(name) for name in names]
    colours = vega.scale_of({name: COLOURS[place] for name, place in zip(names, places, strict=True)})
    shapes = {"domain": names, "range": [SHAPES[place] for place in places]}
    legend = {"orient": "top", "title": None, "columns": 1, "labelLimit": 0, "symbolType": "stroke"}
    place = {
        "x": quantitative(
            "batch",
            title="batch size",
            scale={"type": "log", "base": 2, "nice": False, "padding": 12},
            axis={"values": sorted({*columns["batch"]}), "grid": False, "format": ",d"},
        ),
        "y": size_axis(scale, top_of(tallest, devices(reports))),
        "color": nominal("question", scale=colours, legend=legend),
    }
    points = vega.layer(
        vega.shared(data),
        {"type": "point", "filled": True, "size": 70, "opacity": 1},
        **place,
        shape=nominal("question", scale=shapes, legend=None),
        tooltip=[nominal("question"), quantitative("batch", format=","), nominal("text", title=kind.title.lower())],
    )
    lines = vega.layer(data, {"type": "line", "strokeWidth": 2}, **place)
    described = f"{kind.title} memory at the peak over batch size, one curve per question, in {scale.name}"
    layers = [lines, points, *capacity_lines(tallest, devices(reports), scale)]
    return finish(layers, described, HEIGHT + LEGEND_HEIGHT * len(names))


def bars_chart(reports: Mapping[int, Report], kind: PeakKind) -> Spec:
    """Return one stacked bar per question: bytes of each category at the peak of its selected cell."""
    return stacked_chart(
        focused(reports),
        kind,
        devices(reports),
        field="question",
        title="question",
        description="Memory at the peak by category, one bar per question",
    )


def capacities(gpus: Sequence[Gpu], tallest: int) -> str:
    """Return the caption of a chart's dashed lines, with the devices whose capacity is far above the chart."""
    near = [f"{gpu.name} {format_bytes(gpu.total_bytes)}" for gpu in gpus if in_sight(tallest, gpu)]
    far = [f"{gpu.name} {format_bytes(gpu.total_bytes)}" for gpu in gpus if not in_sight(tallest, gpu)]
    dashed = [f"Dashed: what one device holds, {', '.join(near)}."] if near else []
    return " ".join([*dashed, *([f"Far above this chart: {', '.join(far)}."] if far else [])])

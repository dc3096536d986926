"""The process against what its device holds, as one bar: context, what is allocated at the peak, cache, what is free or over."""

from __future__ import annotations

import altair as alt
import pandas as pd
import streamlit as st

from sizer.base.units import format_both, format_bytes, format_range
from sizer.catalogue.gpus import Gpu
from sizer.report.advice import describe_process
from sizer.report.estimate import Estimate, has_range
from sizer.report.report import Report
from sizer.ui.charts import draw, legend
from sizer.ui.focus import CACHE, OUTSIDE, PEAK_KINDS, parts
from sizer.ui.once import drawn_once
from sizer.ui.styling import COLOURS, FREE, INK, Scale, scale_for

RANGE_Y, BAR_TOP, BAR_BOTTOM, BOTTOM = 6, 14, 42, 46  # pixels from the chart's upper end
RANGE_END = 5  # pixels, half the height of the marks at the range's ends


def capacity_parts(estimate: Estimate, gpu: Gpu) -> dict[str, int]:
    """Bytes from left to right: outside PyTorch, each category at the peak, the allocator's cache, what is free if anything is."""
    of_process = parts(estimate, PEAK_KINDS["process"])
    ordered = {OUTSIDE: of_process.pop(OUTSIDE), **of_process}
    cache = ordered.pop(CACHE)
    free = max(gpu.total_bytes - estimate.process_bytes, 0)
    return {name: size for name, size in {**ordered, CACHE: cache, FREE: free}.items() if size}


def capacity_chart(estimate: Estimate, gpu: Gpu) -> alt.LayerChart:
    """The parts side by side against the device's memory (dashed line), with the range of the process above them."""
    end = max(gpu.total_bytes, estimate.process_high_bytes)
    scale = scale_for([end])
    frame = _segments(capacity_parts(estimate, gpu), scale)
    names = list(frame["part"])
    colours = alt.Scale(domain=names, range=[COLOURS.get(name, "transparent") for name in names])
    bars = (
        alt.Chart(frame)
        .mark_rect(stroke=INK, strokeWidth=0.5)
        .encode(
            x=alt.X("start:Q", title=scale.name, scale=alt.Scale(domain=[0, scale.of(end)], nice=False), axis=None),
            x2="end:Q",
            y=alt.value(BAR_TOP),
            y2=alt.value(BAR_BOTTOM),
            color=alt.Color("part:N", scale=colours, legend=None),
            tooltip=[alt.Tooltip("part:N"), alt.Tooltip("size:N"), alt.Tooltip("bytes:Q", format=",")],
        )
    )
    return alt.layer(
        bars,
        *_range(estimate, scale),
        _capacity(gpu, scale),
        height=BOTTOM,
        description=f"The process against the memory of {gpu.name}, in {scale.name}",
        padding={"top": 2, "left": 4, "right": 12, "bottom": 2},
        config=alt.Config(view=alt.ViewConfig(stroke=None)),
    )


def _segments(sizes: dict[str, int], scale: Scale) -> pd.DataFrame:
    rows, start = [], 0
    for name, size in sizes.items():
        ends = {"start": scale.of(start), "end": scale.of(start + size)}
        rows.append({"part": name, "size": scale.text(size), "bytes": size, **ends})
        start += size
    return pd.DataFrame(rows)


def _range(estimate: Estimate, scale: Scale) -> list[alt.Chart]:
    """From the low to the high end of the process; nothing where no range is known."""
    if not has_range(estimate):
        return []
    sizes = (estimate.process_low_bytes, estimate.process_high_bytes)
    low, high = map(scale.of, sizes)
    words = format_range(*sizes)
    frame = pd.DataFrame([{"low": low, "high": high, "process": words}])
    marks = alt.Chart(frame).mark_rule(color=INK, strokeWidth=2)
    tooltip = [alt.Tooltip("process:N", title="the process takes")]
    ends = {"y": alt.value(RANGE_Y - RANGE_END), "y2": alt.value(RANGE_Y + RANGE_END), "tooltip": tooltip}
    return [
        marks.encode(x="low:Q", x2="high:Q", y=alt.value(RANGE_Y), tooltip=tooltip),
        marks.encode(x="low:Q", **ends),
        marks.encode(x="high:Q", **ends),
    ]


def _capacity(gpu: Gpu, scale: Scale) -> alt.Chart:
    frame = pd.DataFrame([{"capacity": scale.of(gpu.total_bytes), "device": gpu.name, "bytes": gpu.total_bytes}])
    return (
        alt.Chart(frame)
        .mark_rule(color=INK, strokeDash=[6, 3], strokeWidth=2)
        .encode(
            x="capacity:Q",
            y=alt.value(0),
            y2=alt.value(BOTTOM),
            tooltip=[alt.Tooltip("device:N"), alt.Tooltip("bytes:Q", format=",")],
        )
    )


def balance(estimate: Estimate, gpu: Gpu) -> str:
    """Return a sentence: the process, its range, and its share of the device's memory."""
    needs, total = format_both(estimate.process_bytes), format_both(gpu.total_bytes)
    spread = f" Its range, the mark above the bar: {describe_process(estimate)}." if has_range(estimate) else ""
    return f"The process takes {needs}, {_percent(estimate, gpu)} of the {total} of one {gpu.name}.{spread}"


def share_of(estimate: Estimate, gpu: Gpu) -> str:
    """Return the process as a share of the device's memory ("16 % of 79.14 GiB")."""
    return f"{_percent(estimate, gpu)} of {format_bytes(gpu.total_bytes)}"


def _percent(estimate: Estimate, gpu: Gpu) -> str:
    percent = 100 * estimate.process_bytes / gpu.total_bytes
    return f"{percent:,.{0 if percent >= 1 else 1}f}\N{NO-BREAK SPACE}%"


@drawn_once
def show_capacity(report: Report, estimate: Estimate) -> None:
    """Show the bar, what its colours are with their sizes, and what is left."""
    draw(capacity_chart(estimate, report.gpu), "capacity_chart")
    parts = {name: size for name, size in capacity_parts(estimate, report.gpu).items() if name != FREE}
    scale = scale_for(parts.values())
    st.html(legend(parts, {name: scale.text(size) for name, size in parts.items()}))
    st.caption(balance(estimate, report.gpu))

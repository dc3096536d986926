"""One bar that compares the process with the device's memory: context, allocated memory at the peak, cache, free memory."""

from __future__ import annotations

import streamlit as st

from sizer.base.units import format_both, format_bytes, format_range
from sizer.catalogue.gpus import Gpu
from sizer.report.advice import describe_process
from sizer.report.estimate import Estimate, has_range
from sizer.report.report import Report
from sizer.ui import vega
from sizer.ui.charts import draw, legend
from sizer.ui.focus import CACHE, OUTSIDE, PEAK_KINDS, parts
from sizer.ui.once import drawn_once
from sizer.ui.styling import COLOURS, FREE, INK, Scale, scale_for
from sizer.ui.vega import Spec, nominal, quantitative

RANGE_Y, BAR_TOP, BAR_BOTTOM, BOTTOM = 6, 14, 42, 46  # pixels from the chart's upper end
RANGE_END = 5  # pixels, half the height of the marks at the range's ends


def capacity_parts(estimate: Estimate, gpu: Gpu) -> dict[str, int]:
    """Return bytes by part from left to right: outside PyTorch, each category at the peak, allocator cache, free memory."""
    of_process = parts(estimate, PEAK_KINDS["process"])
    ordered = {OUTSIDE: of_process.pop(OUTSIDE), **of_process}
    cache = ordered.pop(CACHE)
    free = max(gpu.total_bytes - estimate.process_bytes, 0)
    return {name: size for name, size in {**ordered, CACHE: cache, FREE: free}.items() if size}


def capacity_chart(estimate: Estimate, gpu: Gpu) -> Spec:
    """Return the chart: the parts side by side, a dashed line at the device's memory, and the range of the process above."""
    end = max(gpu.total_bytes, estimate.process_high_bytes)
    scale = scale_for([end])
    rows = _segments(capacity_parts(estimate, gpu), scale)
    colours = {row["part"]: COLOURS.get(row["part"], "transparent") for row in rows}
    across = {"domain": [0, scale.of(end)], "nice": False}
    bars = vega.layer(
        vega.rows(*rows),
        {"type": "rect", "stroke": INK, "strokeWidth": 0.5},
        x=quantitative("start", title=scale.name, scale=across, axis=None),
        x2={"field": "end"},
        y={"value": BAR_TOP},
        y2={"value": BAR_BOTTOM},
        color=nominal("part", scale=vega.scale_of(colours), legend=None),
        tooltip=[nominal("part"), nominal("size"), quantitative("bytes", format=",")],
    )
    return vega.layered(
        [bars, *_range(estimate, scale), _capacity(gpu, scale)],
        f"The process against the memory of {gpu.name}, in {scale.name}",
        height=BOTTOM,
        padding={"top": 2, "left": 4, "right": 12, "bottom": 2},
        config=vega.PLAIN,
    )


def _segments(sizes: dict[str, int], scale: Scale) -> list[Spec]:
    rows, start = [], 0
    for name, size in sizes.items():
        ends = {"start": scale.of(start), "end": scale.of(start + size)}
        rows.append({"part": name, "size": scale.text(size), "bytes": size, **ends})
        start += size
    return rows


def _range(estimate: Estimate, scale: Scale) -> list[Spec]:
    """Return the layers of the range of the process, from its low to its high end; empty if no range is known."""
    if not has_range(estimate):
        return []
    sizes = (estimate.process_low_bytes, estimate.process_high_bytes)
    low, high = map(scale.of, sizes)
    data = vega.rows({"low": low, "high": high, "process": format_range(*sizes)})
    mark = {"type": "rule", "color": INK, "strokeWidth": 2}
    tooltip = [nominal("process", title="the process takes")]
    ends = {"y": {"value": RANGE_Y - RANGE_END}, "y2": {"value": RANGE_Y + RANGE_END}, "tooltip": tooltip}
    across = {"x": quantitative("low"), "x2": {"field": "high"}, "y": {"value": RANGE_Y}, "tooltip": tooltip}
    return [
        vega.layer(data, mark, **across),
        vega.layer(data, mark, x=quantitative("low"), **ends),
        vega.layer(data, mark, x=quantitative("high"), **ends),
    ]


def _capacity(gpu: Gpu, scale: Scale) -> Spec:
    return vega.layer(
        vega.rows({"capacity": scale.of(gpu.total_bytes), "device": gpu.name, "bytes": gpu.total_bytes}),
        vega.LIMIT,
        x=quantitative("capacity"),
        y={"value": 0},
        y2={"value": BOTTOM},
        tooltip=[nominal("device"), quantitative("bytes", format=",")],
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
    """Show the bar, its legend with sizes, and the free memory."""
    draw(capacity_chart(estimate, report.gpu), "capacity_chart")
    parts = {name: size for name, size in capacity_parts(estimate, report.gpu).items() if name != FREE}
    scale = scale_for(parts.values())
    st.html(legend(parts, {name: scale.text(size) for name, size in parts.items()}))
    st.caption(balance(estimate, report.gpu))

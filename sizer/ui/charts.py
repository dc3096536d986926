"""Draw charts of memory: at the peak of each batch size, and through one step. `draw` shows any chart of the app."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise

import altair as alt
import pandas as pd
import streamlit as st

from sizer.allocator.timeline import Curve
from sizer.catalogue.gpus import Gpu
from sizer.report.estimate import Estimate
from sizer.report.phases import PHASE_TITLES
from sizer.tape.tape import CATEGORIES
from sizer.ui.focus import PeakKind, parts
from sizer.ui.styling import COLOURS, INK, Scale, scale_for

WORDS = {"light": "#565E67", "dark": "#B4BCC5"}  # Streamlit's own axis labels have 3.7 to 1 on white


def draw(chart: alt.Chart | alt.LayerChart, key: str) -> None:
    """Show a chart with its axes' labels, legends and texts in the colour for words. The chart is changed."""
    colour = WORDS.get(st.context.theme.type or "", WORDS["light"])
    named = {"labelColor": colour, "titleColor": colour}
    if chart.config is alt.Undefined:
        chart.config = alt.Config()
    # In place: each method of Altair that configures a chart copies it, and all layers of it.
    chart.config.axis, chart.config.legend = alt.AxisConfig(**named), alt.LegendConfig(**named)
    chart.config.text = alt.MarkConfig(color=colour)
    st.altair_chart(chart, key=key)


# --------------------------------------------------------------------------------------------------------------- spread


LEAST_SHARE = 0.12  # of the axis, for each phase of a generation
STRETCHED = ("prefill",)  # only curves with one of these phases are changed


def spread(curve: Curve) -> Curve:
    """Return the curve with positions at which each phase has a share of the axis that can be seen.

    Positions count allocations and releases in order. Within a phase their distances stay in proportion.
    """
    if not any(phase in STRETCHED for phase, _ in curve.phases) or len(curve) < 2:
        return curve
    whole = curve.positions[-1] - curve.positions[0]
    ends, counted = [], 0
    for _, count in curve.phases:
        counted += count
        ends.append(counted)
    starts = [0, *ends[:-1]]
    # a phase goes from its first point to the first one of the next
    edges = [curve.positions[start] for start in starts] + [curve.positions[-1]]
    least = max(round(LEAST_SHARE * whole), 1)
    widths = [(max(end - start, 1), max(end - start, least)) for start, end in pairwise(edges)]
    positions, begins = [], curve.positions[0]
    for start, end, edge, (was, now) in zip(starts, ends, edges, widths, strict=False):
        positions += [begins + round((place - edge) * now / was) for place in curve.positions[start:end]]
        begins += now
    return replace(curve, positions=tuple(positions))


# ------------------------------------------------------------------------------------------------ the peak and the step


TIME_AXIS = alt.Axis(title="allocations and releases, in order", labels=False, ticks=False, grid=False, labelPadding=14)
HEIGHT = 320
HEADROOM = 1.08  # of the tallest bar
CAPACITY_IN_SIGHT = 2.0  # the capacity line is drawn where it is at most this many times the tallest bar
LETTER = 4.5  # pixels of a letter of a phase's name, which may stand out a little; without that room it is left out
SLOTS = 8  # a bar is never wider than one of eight


def peak_chart(estimates: Sequence[Estimate], kind: PeakKind, gpu: Gpu) -> alt.LayerChart:
    """Stacked bars, one per batch size of one dtype: the bytes of each category at the peak, under the GPU's capacity."""
    bars = {estimate.batch: estimate for estimate in estimates}
    described = "Memory at the peak per batch size"
    return stacked_chart(bars, kind, [gpu], field="batch", title="batch size", description=described)


def stacked_chart(
    bars: Mapping[int, Estimate], kind: PeakKind, gpus: Sequence[Gpu], *, field: str, title: str, description: str
) -> alt.LayerChart:
    """One stacked bar per estimate, at the number that its key is: the bytes of each category at the peak, under the capacities."""
    rows = [
        {field: place, "category": name, "size": size}
        for place, estimate in bars.items()
        for name, size in parts(estimate, kind).items()
        if size
    ]
    tallest = max(map(kind.of, bars.values()), default=0)
    scale = scale_for([tallest])
    frame = pd.DataFrame(rows, columns=[field, "category", "size"])
    frame["size"] = frame["size"] / scale.unit_bytes
    frame["order"] = frame["category"].map({name: place for place, name in enumerate(COLOURS)})
    share = 0.75 * min(1, len(bars) / SLOTS)
    marks = (
        alt.Chart(frame)
        .mark_bar(clip=True, width=alt.RelativeBandSize(band=share))
        .encode(
            x=alt.X(f"{field}:O", title=title, axis=alt.Axis(labelAngle=0, ticks=False)),
            y=size_axis(scale, top_of(tallest, gpus), stack=True),
            color=_category_colours(frame["category"]),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip(f"{field}:O"),
                alt.Tooltip("category:N"),
                alt.Tooltip("size:Q", title=scale.name, format=".2f"),
            ],
        )
    )
    return finish([marks, *capacity_lines(tallest, gpus, scale)], f"{description}, in {scale.name}")


def step_chart(estimate: Estimate, gpu: Gpu) -> alt.LayerChart:
    """Stacked areas over the curve of one step, which must not be empty, with the phases named and the peak marked."""
    estimate = replace(estimate, curve=spread(estimate.curve))
    curve = estimate.curve
    totals = [sum(split) for split in zip(*curve.by_category, strict=True)]
    tallest = max(totals)
    scale = scale_for([tallest])
    columns = {name: column for name, column in zip(CATEGORIES, curve.by_category, strict=True) if any(column)}
    wide = pd.DataFrame(columns) / scale.unit_bytes
    wide.insert(0, "position", curve.positions)
    long = wide.melt("position", var_name="category", value_name="size")
    long["order"] = long["category"].map({name: place for place, name in enumerate(COLOURS)})
    areas = (
        alt.Chart(long)
        .mark_area(interpolate="step-after", clip=True)
        .encode(
            x=alt.X("position:Q", axis=TIME_AXIS, scale=alt.Scale(nice=False, zero=False)),
            y=size_axis(scale, top_of(tallest, [gpu]), stack=True),
            color=_category_colours(long["category"]),
            order=alt.Order("order:Q"),
        )
    )
    peak = _peak(curve.positions[totals.index(tallest)], tallest, scale)
    layers = [areas, *_phases(estimate), _reading(wide, estimate, scale), *capacity_lines(tallest, [gpu], scale), peak]
    return finish(layers, f"Memory through one step by category, in {scale.name}")


def legend(names: Iterable[str], sizes: Mapping[str, str] | None = None) -> str:
    """One legend for all charts as HTML that wraps at any width, with the sizes that are known; the names are ours."""
    sizes = sizes or {}
    keys = (
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:0.75em;height:0.75em;border-radius:2px;'
        f'margin-right:0.4em;background:{COLOURS[name]}"></span>{words}</span>'
        for name, words in ((name, escape(f"{name} {sizes.get(name, '')}".rstrip())) for name in names)
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:0.2em 1.2em;font-size:0.875rem">{"".join(keys)}</div>'


def size_axis(scale: Scale, top_bytes: float, **options: object) -> alt.Y:
    """The axis of sizes from 0 to `top_bytes`."""
    domain = alt.Scale(domain=[0, max(top_bytes / scale.unit_bytes, 0.01)], nice=False)
    return alt.Y("size:Q", title=scale.name, scale=domain, axis=alt.Axis(format="~r", tickCount=6), **options)


def _category_colours(present: pd.Series) -> alt.Color:
    found = set(present)
    names = [name for name in COLOURS if name in found]
    return alt.Color("category:N", scale=alt.Scale(domain=names, range=[COLOURS[name] for name in names]), legend=None)


def top_of(tallest: int, gpus: Iterable[Gpu]) -> float:
    """The top of the axis in bytes: above the tallest bar, and above the capacities that are near."""
    return HEADROOM * max([tallest, *(gpu.total_bytes for gpu in gpus if in_sight(tallest, gpu))])


def in_sight(tallest: int, gpu: Gpu) -> bool:
    """Return whether a chart whose tallest bar has `tallest` bytes shows the GPU's capacity; below that its bars would be
    slivers."""
    return gpu.total_bytes <= CAPACITY_IN_SIGHT * tallest


def capacity_lines(tallest: int, gpus: Iterable[Gpu], scale: Scale) -> list[alt.Chart]:
    """A dashed line at the capacity of each GPU that is in sight."""
    rows = [{"capacity": scale.of(gpu.total_bytes), "device": gpu.name} for gpu in gpus if in_sight(tallest, gpu)]
    if not rows:
        return []
    tooltip = [alt.Tooltip("device:N"), alt.Tooltip("capacity:Q", title=scale.name, format=".2f")]
    rule = alt.Chart(pd.DataFrame(rows)).mark_rule(color=INK, strokeDash=[6, 3], strokeWidth=2)
    return [rule.encode(y="capacity:Q", tooltip=tooltip)]


def _phases(estimate: Estimate) -> list[alt.Chart]:
    spans: list[dict] = []
    for point in estimate.curve:
        if not spans or spans[-1]["phase"] != point.phase:
            spans.append({"phase": point.phase, "start": spans[-1]["end"] if spans else point.position})
        spans[-1]["end"] = point.position
    width = max(spans[-1]["end"] - spans[0]["start"], 1)
    for span in spans:
        span["middle"] = (span["start"] + span["end"]) / 2
        span["title"] = PHASE_TITLES.get(span["phase"], span["phase"])
    frame = pd.DataFrame(spans, columns=["phase", "start", "end", "middle", "title"])
    edges = alt.Chart(frame.iloc[1:]).mark_rule(color=INK, opacity=0.6, strokeWidth=1).encode(x="start:Q")
    has_room = f"(datum.end - datum.start) / {width} * width >= {LETTER} * length(datum.title)"  # in pixels of this window
    text = alt.condition(has_room, alt.Text("title:N"), alt.value(""))
    names = alt.Chart(frame).mark_text(baseline="bottom", dy=-4).encode(x="middle:Q", y=alt.value(0), text=text)
    return [edges, names]


def _reading(wide: pd.DataFrame, estimate: Estimate, scale: Scale) -> alt.Chart:
    """A rule that follows the pointer and reads every category out."""
    used = [name for name in wide.columns if name != "position"]
    frame = wide.assign(
        phase=[PHASE_TITLES.get(p.phase, p.phase) for p in estimate.curve], total=wide[used].sum(axis=1)
    )
    pointer = alt.selection_point(nearest=True, on="pointermove", fields=["position"], empty=False, name="pointer")
    sizes = [alt.Tooltip(f"{name}:Q", format=".2f") for name in [*reversed(used), "total"]]
    return (
        alt.Chart(frame)
        .mark_rule(color=INK)
        .encode(
            x="position:Q",
            opacity=alt.condition(pointer, alt.value(0.8), alt.value(0)),
            tooltip=[alt.Tooltip("phase:N"), *sizes],
        )
        .add_params(pointer)
    )


def _peak(position: int, tallest: int, scale: Scale) -> alt.Chart:
    frame = pd.DataFrame([{"position": position, "size": scale.of(tallest)}])
    return (
        alt.Chart(frame)
        .mark_point(color=INK, filled=True, size=45, shape="triangle-down", yOffset=-6, opacity=1)
        .encode(x="position:Q", y="size:Q", tooltip=[alt.Tooltip("size:Q", title=f"peak, {scale.name}", format=".2f")])
    )


def finish(layers: list[alt.Chart], description: str) -> alt.LayerChart:
    """The layers as one chart of the usual height, with a description for who does not see it."""
    padding = {"top": 18, "left": 4, "right": 8, "bottom": 4}
    config = alt.Config(view=alt.ViewConfig(stroke=None))
    return alt.layer(*layers, height=HEIGHT, description=description, padding=padding, config=config)

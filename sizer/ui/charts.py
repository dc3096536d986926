"""Draw charts of memory: at the peak of each batch size, through one step, and of a measurement. `draw` shows any chart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise

import streamlit as st

from sizer.allocator.timeline import Curve
from sizer.catalogue.gpus import Gpu
from sizer.device.comparison.comparison import Comparison, Level
from sizer.report.estimate import Estimate
from sizer.report.phases import PHASE_TITLES
from sizer.tape.tape import CATEGORIES
from sizer.ui import vega
from sizer.ui.focus import PeakKind, parts
from sizer.ui.styling import COLOURS, INK, Scale, scale_for
from sizer.ui.vega import Columns, Spec, nominal, ordinal, quantitative

WORDS = {"light": "#565E67", "dark": "#B4BCC5"}  # Streamlit's own axis labels have 3.7 to 1 on white


def draw(chart: Spec, key: str) -> None:
    """Show a chart with its axes' labels, legends and texts in the colour for words."""
    colour = WORDS.get(st.context.theme.type or "", WORDS["light"])
    named = {"labelColor": colour, "titleColor": colour}
    config = chart.get("config", {}) | {"axis": named, "legend": named, "text": {"color": colour}}
    st.vega_lite_chart(chart | {"config": config}, key=key)


# --------------------------------------------------------------------------------------------------------------- spread


LEAST_SHARE = 0.12  # of the axis, for each phase of a generation
STRETCHED = ("prefill",)  # only curves with one of these phases are changed


def spread(curve: Curve) -> Curve:
    """Return the curve with positions that leave each phase a visible share of the axis.

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


UNLABELLED = {"labels": False, "ticks": False, "grid": False, "labelPadding": 14}  # an axis with a title alone
WITHIN = {"nice": False, "zero": False}  # the scale of an axis that ends with its values
HEIGHT = 320
HEADROOM = 1.08  # of the tallest bar
CAPACITY_IN_SIGHT = 2.0  # the capacity line is drawn where it is at most this many times the tallest bar
LETTER = 4.5  # pixels of a letter of a phase's name, which may stand out a little; without that room it is left out
SLOTS = 8  # a bar is never wider than one of eight
_PLACES = {name: place for place, name in enumerate(COLOURS)}  # from the bottom of a stack


def peak_chart(estimates: Sequence[Estimate], kind: PeakKind, gpu: Gpu) -> Spec:
    """Return stacked bars, one per batch size of a dtype: bytes of each category at the peak, with a line at the GPU's capacity."""
    bars = {estimate.batch: estimate for estimate in estimates}
    described = "Memory at the peak per batch size"
    return stacked_chart(bars, kind, [gpu], field="batch", title="batch size", description=described)


def stacked_chart(
    bars: Mapping[int, Estimate], kind: PeakKind, gpus: Sequence[Gpu], *, field: str, title: str, description: str
) -> Spec:
    """Return one stacked bar per estimate, at the position of its key: bytes of each category at the peak, and the capacities."""
    tallest = max(map(kind.of, bars.values()), default=0)
    scale = scale_for([tallest])
    cells = [
        (place, name, size)
        for place, estimate in bars.items()
        for name, size in parts(estimate, kind).items()
        if size
    ]
    columns: Columns = {
        field: [place for place, *_ in cells],
        "category": [name for _, name, _ in cells],
        "size": [scale.of(size) for *_, size in cells],
        "order": [_PLACES[name] for _, name, _ in cells],
    }
    share = 0.75 * min(1, len(bars) / SLOTS)
    marks = vega.layer(
        vega.table(columns),
        {"type": "bar", "clip": True, "width": {"band": share}},
        x=ordinal(field, title=title, axis={"labelAngle": 0, "ticks": False}),
        y=size_axis(scale, top_of(tallest, gpus), stack=True),
        color=_category_colours(columns["category"]),
        order=quantitative("order"),
        tooltip=[ordinal(field), nominal("category"), quantitative("size", title=scale.name, format=".2f")],
    )
    return finish([marks, *capacity_lines(tallest, gpus, scale)], f"{description}, in {scale.name}")


def step_chart(estimate: Estimate, gpu: Gpu) -> Spec:
    """Return stacked areas of the curve of one step, with the phases named and the peak marked. The curve must not be empty."""
    curve = spread(estimate.curve)
    totals = [sum(split) for split in zip(*curve.by_category, strict=True)]
    tallest = max(totals)
    scale = scale_for([tallest])
    sizes = {name: column for name, column in zip(CATEGORIES, curve.by_category, strict=True) if any(column)}
    columns: Columns = {
        "position": curve.positions,
        "phase": [PHASE_TITLES.get(phase, phase) for phase, count in curve.phases for _ in range(count)],
        **{name: [size / scale.unit_bytes for size in column] for name, column in (sizes | {"total": totals}).items()},
    }
    data = vega.table(columns, "curve")
    layers = [
        _areas(data, list(sizes), size_axis(scale, top_of(tallest, [gpu]), stack=True)),
        *_phases(curve),
        vega.pointed(
            vega.shared(data),
            "position",
            [nominal("phase"), *(quantitative(name, format=".2f") for name in [*reversed(sizes), "total"])],
        ),
        *capacity_lines(tallest, [gpu], scale),
        _peak(curve.positions[totals.index(tallest)], tallest, scale),
    ]
    return finish(layers, f"Memory through one step by category, in {scale.name}")


def _areas(data: Spec, names: list[str], axis: Spec) -> Spec:
    """Return the areas of a table with a column of sizes for each category."""
    time = UNLABELLED | {"title": "allocations and releases, in order"}
    order = {"calculate": f"indexof({list(_PLACES)}, datum.category)", "as": "order"}
    return vega.layer(
        data | {"transform": [*data["transform"], {"fold": names, "as": ["category", "size"]}, order]},
        {"type": "area", "interpolate": "step-after", "clip": True},
        x=quantitative("position", axis=time, scale=WITHIN),
        y=axis,
        color=_category_colours(names),
        order=quantitative("order"),
    )


def legend(names: Iterable[str], sizes: Mapping[str, str] | None = None) -> str:
    """Return one legend for all charts as HTML that wraps at any width, with the known sizes. All names are Sizer's own."""
    sizes = sizes or {}
    keys = (
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:0.75em;height:0.75em;border-radius:2px;'
        f'margin-right:0.4em;background:{COLOURS[name]}"></span>{words}</span>'
        for name, words in ((name, escape(f"{name} {sizes.get(name, '')}".rstrip())) for name in names)
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:0.2em 1.2em;font-size:0.875rem">{"".join(keys)}</div>'


def size_axis(scale: Scale, top_bytes: float, **options: object) -> Spec:
    """Return the axis of sizes from 0 to `top_bytes`."""
    domain = {"domain": [0, max(top_bytes / scale.unit_bytes, 0.01)], "nice": False}
    return quantitative("size", title=scale.name, scale=domain, axis={"format": "~r", "tickCount": 6}, **options)


def _category_colours(present: Collection[str]) -> Spec:
    used = {name: colour for name, colour in COLOURS.items() if name in present}
    return nominal("category", scale=vega.scale_of(used), legend=None)


def top_of(tallest: int, gpus: Iterable[Gpu]) -> float:
    """Return the top of the axis in bytes: above the tallest bar, and above capacities that are near it."""
    return HEADROOM * max([tallest, *(gpu.total_bytes for gpu in gpus if in_sight(tallest, gpu))])


def in_sight(tallest: int, gpu: Gpu) -> bool:
    """Return True if the chart shows the GPU's capacity: with a tallest bar of fewer bytes its bars would be slivers."""
    return gpu.total_bytes <= CAPACITY_IN_SIGHT * tallest


def capacity_lines(tallest: int, gpus: Iterable[Gpu], scale: Scale) -> list[Spec]:
    """Return a dashed line at each GPU's capacity that the chart shows."""
    rows = [{"capacity": scale.of(gpu.total_bytes), "device": gpu.name} for gpu in gpus if in_sight(tallest, gpu)]
    if not rows:
        return []
    tooltip = [nominal("device"), quantitative("capacity", title=scale.name, format=".2f")]
    return [vega.layer(vega.rows(*rows), vega.LIMIT, y=quantitative("capacity"), tooltip=tooltip)]


def _phases(curve: Curve) -> list[Spec]:
    """Return a rule at the start of each phase except the first, and the names of phases that have room."""
    spans, end, counted = [], curve.positions[0], 0
    for phase, count in curve.phases:
        counted += count
        start, end = end, curve.positions[counted - 1]
        title = PHASE_TITLES.get(phase, phase)
        spans.append({"start": start, "end": end, "middle": (start + end) / 2, "title": title})
    width = max(end - curve.positions[0], 1)
    has_room = f"(datum.end - datum.start) / {width} * width >= {LETTER} * length(datum.title)"  # in pixels of this window
    text = {"condition": nominal("title", test=has_room), "value": ""}
    return phase_names(spans, text)


def phase_names(spans: Sequence[Spec], text: Spec) -> list[Spec]:
    """Return a rule at the `start` of each span except the first, and each span's text above its `middle`."""
    return [
        vega.layer(
            vega.rows(*({"start": span["start"]} for span in spans[1:])),
            {"type": "rule", "color": INK, "opacity": 0.6, "strokeWidth": 1},
            x=quantitative("start"),
        ),
        vega.layer(
            vega.rows(*spans),
            {"type": "text", "baseline": "bottom", "dy": -4},
            x=quantitative("middle"),
            y={"value": 0},
            text=text,
        ),
    ]


def _peak(position: int, tallest: int, scale: Scale) -> Spec:
    return vega.layer(
        vega.rows({"position": position, "size": scale.of(tallest)}),
        {"type": "point", "color": INK, "filled": True, "size": 45, "shape": "triangle-down", "yOffset": -6, "opacity": 1},
        x=quantitative("position"),
        y=quantitative("size"),
        tooltip=[quantitative("size", title=f"peak, {scale.name}", format=".2f")],
    )


def finish(layers: Sequence[Spec], description: str, height: int = HEIGHT) -> Spec:
    """Return the layers as one chart of the usual height, with a description for screen readers."""
    padding = {"top": 18, "left": 4, "right": 8, "bottom": 4}
    return vega.layered(layers, description, height=height, padding=padding, config=vega.PLAIN)


MEASURED, ESTIMATED = "measured", "estimated"
SIDE_COLOURS = {MEASURED: "#56B4E9", ESTIMATED: "#D55E00"}
TIME_AXIS = UNLABELLED | {"title": "phases, each as wide as the others"}


def timelines_chart(comparison: Comparison) -> Spec:
    """Return the chart of allocated memory through the phases. Without a recording, dots show the ends of the phases."""
    levels = [level.allocated_bytes for level in (*comparison.estimated_curve, *comparison.measured_curve)]
    readings = [phase.allocated_bytes for phase in comparison.measurement.phases]
    tallest = max([*levels, *readings], default=0)
    scale = scale_for([tallest])
    axis = size_axis(scale, HEADROOM * tallest)
    line = {"type": "line", "interpolate": "step-before", "color": SIDE_COLOURS[ESTIMATED], "strokeWidth": 1.8}
    layers = [
        _measured(comparison, scale, axis),
        vega.layer(_table(comparison.estimated_curve, scale), line, x=quantitative("at"), y=axis),
        *_phase_rows(_phase_names(comparison)),
        *_reading(comparison, scale),
    ]
    return finish(layers, f"Memory measured and estimated through one step, in {scale.name}")


def timelines_legend() -> str:
    """Return the chart's legend as HTML. It holds no stranger's text."""
    marks = {MEASURED: "height:0.75em", ESTIMATED: "height:0.2em;margin-bottom:0.25em"}
    keys = (
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:0.9em;{style};border-radius:2px;'
        f'margin-right:0.4em;background:{SIDE_COLOURS[name]}"></span>{name}</span>'
        for name, style in marks.items()
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:0.2em 1.2em;font-size:0.875rem">{"".join(keys)}</div>'


def _table(levels: Iterable[Level], scale: Scale) -> Spec:
    found = [*levels]
    sizes = [scale.of(level.allocated_bytes) for level in found]
    return vega.table({"at": [level.at for level in found], "size": sizes})


def _measured(comparison: Comparison, scale: Scale, axis: Spec) -> Spec:
    encoding = {"x": quantitative("at", axis=TIME_AXIS, scale=WITHIN), "y": axis}
    if comparison.measured_curve:
        area = {"type": "area", "interpolate": "step-before", "color": SIDE_COLOURS[MEASURED], "opacity": 0.75}
        return vega.layer(_table(comparison.measured_curve, scale), area, **encoding)
    ends = [
        {"at": float(number), "size": scale.of(phase.allocated_bytes)}
        for number, phase in enumerate(comparison.measurement.phases, 1)
    ]
    dots = {"type": "point", "color": SIDE_COLOURS[MEASURED], "filled": True, "size": 90, "opacity": 1}
    return vega.layer(vega.rows(*ends), dots, **encoding)


def _phase_names(comparison: Comparison) -> list[str]:
    """Return the phases in order, of the longer curve."""
    names = (
        [level.phase for level in comparison.estimated_curve],
        [level.phase for level in comparison.measured_curve],
        [phase.phase for phase in comparison.measurement.phases],
    )
    return max((list(dict.fromkeys(some)) for some in names), key=len)


def _phase_rows(names: list[str]) -> list[Spec]:
    spans = [
        {"start": float(place), "middle": place + 0.5, "title": PHASE_TITLES.get(name, "")}
        for place, name in enumerate(names)
    ]
    return phase_names(spans, nominal("title"))


def _reading(comparison: Comparison, scale: Scale) -> list[Spec]:
    """Return a rule that follows the pointer and shows both values; empty if the curves do not share positions."""
    estimated, measured = comparison.estimated_curve, comparison.measured_curve
    if not measured or [level.at for level in estimated] != [level.at for level in measured]:
        return []
    data = vega.table(
        {
            "at": [level.at for level in estimated],
            "phase": [PHASE_TITLES.get(level.phase, "") for level in estimated],
            ESTIMATED: [scale.of(level.allocated_bytes) for level in estimated],
            MEASURED: [scale.of(level.allocated_bytes) for level in measured],
        }
    )
    sizes = [quantitative(name, format=".3f") for name in (ESTIMATED, MEASURED)]
    return [vega.pointed(data, "at", [nominal("phase"), *sizes])]

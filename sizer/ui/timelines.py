"""One chart: what was measured as an area, what was estimated as a line over it, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import altair as alt
import pandas as pd

from sizer.device.comparison.comparison import Comparison, Level
from sizer.report.phases import PHASE_TITLES
from sizer.ui.charts import HEADROOM, finish, size_axis
from sizer.ui.styling import INK, Scale, scale_for

MEASURED, ESTIMATED = "measured", "estimated"
COLOURS = {MEASURED: "#56B4E9", ESTIMATED: "#D55E00"}
TIME_AXIS = alt.Axis(title="phases, each as wide as the others", labels=False, ticks=False, grid=False, labelPadding=14)


def timelines_chart(comparison: Comparison) -> alt.LayerChart:
    """Allocated memory through the phases, measured under estimated; where nothing was recorded, dots at the phases' ends."""
    levels = [level.allocated_bytes for level in (*comparison.estimated_curve, *comparison.measured_curve)]
    readings = [phase.allocated_bytes for phase in comparison.measurement.phases]
    tallest = max([*levels, *readings], default=0)
    scale = scale_for([tallest])
    axis = size_axis(scale, HEADROOM * tallest)
    layers = [_measured(comparison, scale, axis), _line(comparison.estimated_curve, scale, axis)]
    layers += _phases(_phase_names(comparison))
    layers += _reading(comparison, scale)
    return finish(layers, f"Memory measured and estimated through one step, in {scale.name}")


def timelines_legend() -> str:
    """The chart's legend as HTML; all its words are ours."""
    marks = {MEASURED: "height:0.75em", ESTIMATED: "height:0.2em;margin-bottom:0.25em"}
    keys = (
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:0.9em;{style};border-radius:2px;'
        f'margin-right:0.4em;background:{COLOURS[name]}"></span>{name}</span>'
        for name, style in marks.items()
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:0.2em 1.2em;font-size:0.875rem">{"".join(keys)}</div>'


def _frame(levels: Iterable[Level], scale: Scale) -> pd.DataFrame:
    rows = [{"at": level.at, "size": scale.of(level.allocated_bytes)} for level in levels]
    return pd.DataFrame(rows, columns=["at", "size"])


def _measured(comparison: Comparison, scale: Scale, axis: alt.Y) -> alt.Chart:
    where = alt.X("at:Q", axis=TIME_AXIS, scale=alt.Scale(nice=False, zero=False))
    if comparison.measured_curve:
        area = alt.Chart(_frame(comparison.measured_curve, scale))
        return area.mark_area(interpolate="step-before", color=COLOURS[MEASURED], opacity=0.75).encode(x=where, y=axis)
    ends = [
        {"at": float(number), "size": scale.of(phase.allocated_bytes)}
        for number, phase in enumerate(comparison.measurement.phases, 1)
    ]
    dots = alt.Chart(pd.DataFrame(ends, columns=["at", "size"]))
    return dots.mark_point(color=COLOURS[MEASURED], filled=True, size=90, opacity=1).encode(x=where, y=axis)


def _line(levels: Sequence[Level], scale: Scale, axis: alt.Y) -> alt.Chart:
    line = alt.Chart(_frame(levels, scale))
    return line.mark_line(interpolate="step-before", color=COLOURS[ESTIMATED], strokeWidth=1.8).encode(x="at:Q", y=axis)


def _phase_names(comparison: Comparison) -> list[str]:
    """The phases in order, of the curve that went farther."""
    names = (
        [level.phase for level in comparison.estimated_curve],
        [level.phase for level in comparison.measured_curve],
        [phase.phase for phase in comparison.measurement.phases],
    )
    return max((list(dict.fromkeys(some)) for some in names), key=len)


def _phases(names: list[str]) -> list[alt.Chart]:
    spans = [
        {"start": float(place), "middle": place + 0.5, "title": PHASE_TITLES.get(name, "")}
        for place, name in enumerate(names)
    ]
    frame = pd.DataFrame(spans, columns=["start", "middle", "title"])
    edges = alt.Chart(frame.iloc[1:]).mark_rule(color=INK, opacity=0.6, strokeWidth=1).encode(x="start:Q")
    titles = alt.Chart(frame).mark_text(baseline="bottom", dy=-4)
    return [edges, titles.encode(x="middle:Q", y=alt.value(0), text="title:N")]


def _reading(comparison: Comparison, scale: Scale) -> list[alt.Chart]:
    """A rule that follows the pointer and reads both curves out; none where they do not share their places."""
    estimated, measured = comparison.estimated_curve, comparison.measured_curve
    if not measured or [level.at for level in estimated] != [level.at for level in measured]:
        return []
    frame = pd.DataFrame(
        {
            "at": [level.at for level in estimated],
            "phase": [PHASE_TITLES.get(level.phase, "") for level in estimated],
            ESTIMATED: [scale.of(level.allocated_bytes) for level in estimated],
            MEASURED: [scale.of(level.allocated_bytes) for level in measured],
        }
    )
    pointer = alt.selection_point(nearest=True, on="pointermove", fields=["at"], empty=False, name="pointer")
    rule = alt.Chart(frame).mark_rule(color=INK)
    tooltip = [alt.Tooltip("phase:N"), *(alt.Tooltip(f"{name}:Q", format=".3f") for name in (ESTIMATED, MEASURED))]
    opacity = alt.condition(pointer, alt.value(0.8), alt.value(0))
    return [rule.encode(x="at:Q", opacity=opacity, tooltip=tooltip).add_params(pointer)]

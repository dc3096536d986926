"""Chart of a measurement: measured memory as an area, estimated memory as a line, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable

from sizer.device.comparison.comparison import Comparison, Level
from sizer.report.phases import PHASE_TITLES
from sizer.ui import vega
from sizer.ui.charts import HEADROOM, UNLABELLED, WITHIN, finish, phase_names, size_axis
from sizer.ui.styling import Scale, scale_for
from sizer.ui.vega import Spec, nominal, quantitative

MEASURED, ESTIMATED = "measured", "estimated"
COLOURS = {MEASURED: "#56B4E9", ESTIMATED: "#D55E00"}
TIME_AXIS = UNLABELLED | {"title": "phases, each as wide as the others"}


def timelines_chart(comparison: Comparison) -> Spec:
    """Return the chart of allocated memory through the phases. Without a recording, dots show the ends of the phases."""
    levels = [level.allocated_bytes for level in (*comparison.estimated_curve, *comparison.measured_curve)]
    readings = [phase.allocated_bytes for phase in comparison.measurement.phases]
    tallest = max([*levels, *readings], default=0)
    scale = scale_for([tallest])
    axis = size_axis(scale, HEADROOM * tallest)
    line = {"type": "line", "interpolate": "step-before", "color": COLOURS[ESTIMATED], "strokeWidth": 1.8}
    layers = [
        _measured(comparison, scale, axis),
        vega.layer(_table(comparison.estimated_curve, scale), line, x=quantitative("at"), y=axis),
        *_phases(_phase_names(comparison)),
        *_reading(comparison, scale),
    ]
    return finish(layers, f"Memory measured and estimated through one step, in {scale.name}")


def timelines_legend() -> str:
    """Return the chart's legend as HTML. It holds no stranger's text."""
    marks = {MEASURED: "height:0.75em", ESTIMATED: "height:0.2em;margin-bottom:0.25em"}
    keys = (
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:0.9em;{style};border-radius:2px;'
        f'margin-right:0.4em;background:{COLOURS[name]}"></span>{name}</span>'
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
        area = {"type": "area", "interpolate": "step-before", "color": COLOURS[MEASURED], "opacity": 0.75}
        return vega.layer(_table(comparison.measured_curve, scale), area, **encoding)
    ends = [
        {"at": float(number), "size": scale.of(phase.allocated_bytes)}
        for number, phase in enumerate(comparison.measurement.phases, 1)
    ]
    dots = {"type": "point", "color": COLOURS[MEASURED], "filled": True, "size": 90, "opacity": 1}
    return vega.layer(vega.rows(*ends), dots, **encoding)


def _phase_names(comparison: Comparison) -> list[str]:
    """Return the phases in order, of the longer curve."""
    names = (
        [level.phase for level in comparison.estimated_curve],
        [level.phase for level in comparison.measured_curve],
        [phase.phase for phase in comparison.measurement.phases],
    )
    return max((list(dict.fromkeys(some)) for some in names), key=len)


def _phases(names: list[str]) -> list[Spec]:
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

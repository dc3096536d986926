"""One chart: how far estimates were off, and to which side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import altair as alt
import pandas as pd

from sizer.device.ledger.rows import LedgerRow
from sizer.ui.palette import INK

# Okabe and Ito's colours that stand out on white and near-black, in the order of the devices' first appearance.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
ROW_HEIGHT, LEAST_HEIGHT = 30, 40  # of each group in a row, and of a row with one group
FRAME_HEIGHT, LEGEND_HEIGHT = 60, 22  # of the axis below, and of each device above: Streamlit's height holds them too


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One of the three figures of a ledger's row, by the name of its fields."""

    name: str

    def percent(self, row: LedgerRow) -> float | None:
        """Its signed error in percent of what was measured; None where nothing was."""
        measured = getattr(row, f"measured_{self.name}")
        return 100 * (getattr(row, f"estimated_{self.name}") - measured) / measured if measured else None


FIGURES = {
    "Allocated": Figure(name="peak_allocated_bytes"),
    "Reserved": Figure(name="peak_reserved_bytes"),
    "Process": Figure(name="process_bytes"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One signed error in percent: the row that it stands in, the group whose colour it has, and what was run."""

    row: str
    group: str
    percent: float
    work: str


def points_of(rows: Sequence[LedgerRow]) -> list[Point]:
    """A point for each figure of each comparison that was measured, a row for each figure."""
    return [
        Point(
            row=title,
            group=row.device_name,
            percent=percent,
            work=f"{row.architecture}, {row.dtype}, batch {row.batch}",
        )
        for title, figure in FIGURES.items()
        for row in rows
        if (percent := figure.percent(row)) is not None
    ]


def errors_chart(points: Sequence[Point]) -> alt.LayerChart:
    """One dot per point at its signed error; right of the line is an estimate too high."""
    rows, groups = (list(dict.fromkeys(names)) for names in ([p.row for p in points], [p.group for p in points]))
    frame = pd.DataFrame([asdict(point) for point in points], columns=["row", "group", "percent", "work"])
    widest = max([1.0, *frame["percent"].abs()]) * 1.1
    colours = alt.Scale(domain=groups, range=[COLOURS[place % len(COLOURS)] for place in range(len(groups))])
    dots = (
        alt.Chart(frame)
        .mark_point(filled=True, size=60, opacity=0.75)
        .encode(
            x=alt.X(
                "percent:Q",
                title="error, % of what was measured",
                scale=alt.Scale(domain=[-widest, widest], nice=False),
            ),
            y=alt.Y("row:N", title=None, sort=rows, axis=alt.Axis(labelLimit=0)),
            yOffset=alt.YOffset("group:N", sort=groups),
            color=alt.Color(
                "group:N", scale=colours, legend=alt.Legend(orient="top", title=None, columns=1, labelLimit=0)
            ),
            tooltip=["work:N", "row:N", "group:N", alt.Tooltip("percent:Q", title="error, %", format="+.2f")],
        )
    )
    zero = alt.Chart(pd.DataFrame([{"percent": 0.0}])).mark_rule(color=INK, strokeWidth=1.5).encode(x="percent:Q")
    height = max(ROW_HEIGHT * len(groups), LEAST_HEIGHT)
    return (
        alt.layer(zero, dots)
        .properties(
            height=height * max(len(rows), 1) + FRAME_HEIGHT + LEGEND_HEIGHT * len(groups),
            description="Signed errors of the estimates, in percent of what was measured",
        )
        .configure_view(stroke=None)
    )

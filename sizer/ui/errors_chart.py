"""One chart: how far each comparison's peaks were off, to which side, by device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt
import pandas as pd

from sizer.device.ledger.row import LedgerRow
from sizer.ui.palette import INK

# Okabe and Ito's colours that stand out on white and near-black, in the order of the devices' first appearance.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
ROW_HEIGHT = 90
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


def errors_chart(rows: Sequence[LedgerRow]) -> alt.LayerChart:
    """One dot per comparison and figure, at its signed error in percent; right of the line is an estimate too high."""
    points = [
        {
            "figure": title,
            "error": percent,
            "device": row.device_name,
            "architecture": row.architecture,
            "dtype": row.dtype,
            "batch": row.batch,
        }
        for row in rows
        for title, figure in FIGURES.items()
        if (percent := figure.percent(row)) is not None
    ]
    frame = pd.DataFrame(points, columns=["figure", "error", "device", "architecture", "dtype", "batch"])
    present = [title for title in FIGURES if title in set(frame["figure"])]
    devices = list(dict.fromkeys(frame["device"]))
    widest = max([1.0, *frame["error"].abs()]) * 1.1
    colours = alt.Scale(domain=devices, range=[COLOURS[place % len(COLOURS)] for place in range(len(devices))])
    dots = (
        alt.Chart(frame)
        .mark_point(filled=True, size=60, opacity=0.75)
        .encode(
            x=alt.X(
                "error:Q", title="error, % of what was measured", scale=alt.Scale(domain=[-widest, widest], nice=False)
            ),
            y=alt.Y("figure:N", title=None, sort=present),
            yOffset=alt.YOffset("device:N", sort=devices),
            color=alt.Color(
                "device:N", scale=colours, legend=alt.Legend(orient="top", title=None, columns=1, labelLimit=0)
            ),
            tooltip=[
                "architecture:N",
                "dtype:N",
                "batch:Q",
                "device:N",
                alt.Tooltip("error:Q", title="error, %", format="+.2f"),
            ],
        )
    )
    zero = alt.Chart(pd.DataFrame([{"error": 0.0}])).mark_rule(color=INK, strokeWidth=1.5).encode(x="error:Q")
    return (
        alt.layer(zero, dots)
        .properties(
            height=ROW_HEIGHT * max(len(present), 1) + FRAME_HEIGHT + LEGEND_HEIGHT * len(devices),
            description="Signed errors of the estimated peaks, in percent of what was measured",
        )
        .configure_view(stroke=None)
    )

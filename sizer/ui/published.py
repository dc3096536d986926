"""Errors of estimates as a chart, and the published GPU measurements of others, which ship with Sizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import streamlit as st

from sizer.base.units import pluralize
from sizer.device.ledger.published_figures import Published, read_published
from sizer.device.ledger.rows import LedgerRow, SignedError, error_statistics
from sizer.ui import vega
from sizer.ui.charts import draw
from sizer.ui.focus import pick, title_formatter
from sizer.ui.styling import INK, round_figure, scale_for
from sizer.ui.vega import Spec, nominal, quantitative

# Okabe and Ito's colours that stand out on white and near-black, in the order of the devices' first appearance.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
ROW_HEIGHT, LEAST_HEIGHT = 30, 40  # pixels of each group in a row, and of a row with one group
FRAME_HEIGHT, LEGEND_HEIGHT = 60, 22  # pixels of the axis below, and of each device above: Streamlit's height includes them


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One of the three figures of a ledger's row, by the names of its fields."""

    name: str

    def percent(self, row: LedgerRow) -> float | None:
        """Return the signed error in percent of the measured figure; None without a measurement."""
        measured = getattr(row, f"measured_{self.name}")
        return 100 * (getattr(row, f"estimated_{self.name}") - measured) / measured if measured else None


FIGURES = {
    "Allocated": Figure(name="peak_allocated_bytes"),
    "Reserved": Figure(name="peak_reserved_bytes"),
    "Process": Figure(name="process_bytes"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One signed error in percent, with its row in the chart, its group (colour) and the work."""

    row: str
    group: str
    percent: float
    work: str


def points_of(rows: Sequence[LedgerRow]) -> list[Point]:
    """Return a point for each measured figure of each comparison. Each figure has a row."""
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


def errors_chart(points: Sequence[Point]) -> Spec:
    """Return one dot per point at its signed error. Dots right of the line are estimates that were too high."""
    rows, groups = (list(dict.fromkeys(names)) for names in ([p.row for p in points], [p.group for p in points]))
    widest = max([1.0, *(abs(point.percent) for point in points)]) * 1.1
    colours = {group: COLOURS[place % len(COLOURS)] for place, group in enumerate(groups)}
    legend = {"orient": "top", "title": None, "columns": 1, "labelLimit": 0}
    across = {"domain": [-widest, widest], "nice": False}
    dots = vega.layer(
        vega.table({field: [getattr(point, field) for point in points] for field in ("row", "group", "percent", "work")}),
        {"type": "point", "filled": True, "size": 60, "opacity": 0.75},
        x=quantitative("percent", title="error, % of what was measured", scale=across),
        y=nominal("row", title=None, sort=rows, axis={"labelLimit": 0}),
        yOffset=nominal("group", sort=groups),
        color=nominal("group", scale=vega.scale_of(colours), legend=legend),
        tooltip=[*map(nominal, ("work", "row", "group")), quantitative("percent", title="error, %", format="+.2f")],
    )
    rule = {"type": "rule", "color": INK, "strokeWidth": 1.5}
    zero = vega.layer(vega.rows({"percent": 0.0}), rule, x=quantitative("percent"))
    height = max(ROW_HEIGHT * len(groups), LEAST_HEIGHT)
    return vega.layered(
        [zero, dots],
        "Signed errors of the estimates, in percent of what was measured",
        height=height * max(len(rows), 1) + FRAME_HEIGHT + LEGEND_HEIGHT * len(groups),
        config=vega.PLAIN,
    )


# ----------------------------------------------------------------------------------------------------------- published


# Measured quantities. Figures of different quantities are never mixed.
QUANTITIES = {
    "allocated": "Peak allocated",
    "reserved": "Peak reserved",
    "process": "Process",
    "load": "Allocated once the model is loaded",
    "beyond_load": "Reserved beyond the load",
    "growth": "Process, its growth with the batch",
    "device": "All memory in use on the device",
}
WITHIN = 0.01  # of what was measured
ABOUT = (
    "Each run is repeated on meta tensors as in its source, with the rules of its PyTorch version, but with today's model code. "
    "Estimates that are more than a few percent too low mostly miss memory that newer libraries no longer use."
)


def show_published() -> None:
    """Show the published figures of one kind: the errors of the estimates, and each figure with its source."""
    figures = read_published()
    st.header("Measured by others on GPUs, and published", anchor=False)
    st.caption(f"{ABOUT} Estimated with {figures[0].estimated_with}.")
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        quantity = st.selectbox(
            "What was read", list(QUANTITIES), format_func=title_formatter(QUANTITIES), key="published_quantity", width=300
        )
        of_quantity = [one for one in figures if one.quantity == quantity]
        gpu = pick("GPU", sorted({one.device for one in of_quantity}), "published_gpu")
    chosen = [one for one in of_quantity if gpu in (None, one.device)]
    near = sum(abs(one.error) <= WITHIN for one in chosen)
    st.markdown(f"**{pluralize(len(chosen), 'figure')}**, {near:,} within {WITHIN:.0%}")
    _show_table(chosen)
    left, right = st.columns(2, gap="medium")
    with left:
        st.markdown("**Signed errors**")
        draw(errors_chart(published_points(chosen, QUANTITIES[quantity])), "published_chart")
    with right:
        st.markdown("**Errors by GPU**")
        percent = st.column_config.NumberColumn(format="%+.2f %%")
        st.dataframe(
            statistics_frame(chosen), hide_index=True, column_config=dict.fromkeys(("Median", "Worst", "Bias"), percent)
        )


def published_points(figures: Sequence[Published], title: str) -> list[Point]:
    """Return a point for each figure. Each GPU has a row."""
    return [Point(row=one.device, group=title, percent=100 * one.error, work=one.work) for one in figures]


def _show_table(figures: Sequence[Published]) -> None:
    st.dataframe(
        published_frame(figures),
        hide_index=True,
        height=min(36 * (len(figures) + 1), 420),
        column_config={
            "Work": st.column_config.TextColumn(width="large"),
            "Error": st.column_config.NumberColumn(format="%+.2f %%"),
            "Source": st.column_config.LinkColumn(),
        },
    )


def published_frame(figures: Sequence[Published]) -> pd.DataFrame:
    """Return the figures as a table: sizes in one unit, errors in percent."""
    scale = scale_for([one.measured_bytes for one in figures])
    return pd.DataFrame(
        {
            "Work": [one.work for one in figures],
            "GPU": [one.device for one in figures],
            f"Measured, {scale.name}": [round(scale.of(one.measured_bytes), 3) for one in figures],
            f"Estimate, {scale.name}": [round(scale.of(one.estimated_bytes), 3) for one in figures],
            "Error": [round_figure(100 * one.error) for one in figures],
            "PyTorch": [one.torch for one in figures],
            "Source": [one.source for one in figures],
        }
    )


def statistics_frame(figures: Sequence[Published]) -> pd.DataFrame:
    """Return signed errors in percent, one row for each GPU."""
    errors = (SignedError(quantity=one.quantity, device=one.device, family="all", error=one.error) for one in figures)
    rows = error_statistics(errors, by_family=False)
    return pd.DataFrame(
        {
            "GPU": [row.device for row in rows],
            "Count": [row.count for row in rows],
            "Median": [round_figure(100 * row.median) for row in rows],
            "Worst": [round_figure(100 * row.worst) for row in rows],
            "Bias": [round_figure(100 * row.bias) for row in rows],
        }
    )

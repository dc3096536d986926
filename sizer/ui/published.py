"""The measurements that ship with Sizer: what others measured on GPUs and published, beside its estimate."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from sizer.base.units import counted
from sizer.device.ledger.published_figures import Published, read_published
from sizer.device.ledger.rows import SignedError, error_statistics
from sizer.ui.charts import draw
from sizer.ui.errors_chart import Point, errors_chart
from sizer.ui.focus import pick
from sizer.ui.scale import scale_for

# What was read, the figures of one never beside those of another.
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
    "Each run is repeated on meta tensors as its source does it, by the rules of its PyTorch. The code of the models is today's: "
    "most of what is too low by more than a few percent is memory that their libraries no longer take."
)


def show_published() -> None:
    """Show the published figures of one kind: how far off the estimates are, and each of them with its source."""
    figures = read_published()
    st.subheader("Measured by others on GPUs, and published", anchor=False)
    st.caption(f"{ABOUT} Estimated with {figures[0].estimated_with}.")
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        quantity = st.selectbox(
            "What was read", list(QUANTITIES), format_func=QUANTITIES.get, key="published_quantity", width=300
        )
        of_quantity = [one for one in figures if one.quantity == quantity]
        gpu = pick("GPU", sorted({one.device for one in of_quantity}), "published_gpu")
    chosen = [one for one in of_quantity if gpu in (None, one.device)]
    near = sum(abs(one.error) <= WITHIN for one in chosen)
    st.markdown(f"**{counted(len(chosen), 'figure')}**, {near:,} within {WITHIN:.0%}")
    _show_table(chosen)
    left, right = st.columns(2, gap="medium")
    with left:
        st.markdown("**Signed errors**")
        draw(errors_chart(points_of(chosen, QUANTITIES[quantity])), "published_chart")
    with right:
        st.markdown("**Errors by GPU**")
        percent = st.column_config.NumberColumn(format="%+.2f %%")
        st.dataframe(
            statistics_frame(chosen), hide_index=True, column_config=dict.fromkeys(("Median", "Worst", "Bias"), percent)
        )


def points_of(figures: Sequence[Published], title: str) -> list[Point]:
    """A point for each figure, a row for each GPU."""
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
    """The figures as the page's table: sizes in one unit, the error in percent."""
    scale = scale_for([one.measured_bytes for one in figures])
    return pd.DataFrame(
        {
            "Work": [one.work for one in figures],
            "GPU": [one.device for one in figures],
            f"Measured, {scale.name}": [round(scale.of(one.measured_bytes), 3) for one in figures],
            f"Estimate, {scale.name}": [round(scale.of(one.estimated_bytes), 3) for one in figures],
            "Error": [100 * one.error for one in figures],
            "PyTorch": [one.torch for one in figures],
            "Source": [one.source for one in figures],
        }
    )


def statistics_frame(figures: Sequence[Published]) -> pd.DataFrame:
    """Signed errors in percent, a row for each GPU."""
    errors = (SignedError(quantity=one.quantity, device=one.device, family="all", error=one.error) for one in figures)
    rows = error_statistics(errors, by_family=False)
    return pd.DataFrame(
        {
            "GPU": [row.device for row in rows],
            "Count": [row.count for row in rows],
            "Median": [100 * row.median for row in rows],
            "Worst": [100 * row.worst for row in rows],
            "Bias": [100 * row.bias for row in rows],
        }
    )

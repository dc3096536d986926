"""The compiled training step in focus over its activation memory budget, beside the eager step and checkpointing."""

from __future__ import annotations

import altair as alt
import pandas as pd
import streamlit as st

from sizer.query.request import Request
from sizer.report.decision import BudgetReport, describe_budgets
from sizer.ui.charts import finish
from sizer.ui.exports import offer_download
from sizer.ui.palette import COLOURS, INK
from sizer.ui.question import file_stem
from sizer.ui.row_links import LINK, LINK_COLUMN, frame_csv, link_of
from sizer.ui.scale import GIBIBYTES


def show_budgets(found: BudgetReport, request: Request) -> None:
    """Show the peak at each budget as a chart and as a table with what is computed again."""
    if told := describe_budgets(found):
        st.markdown(f"**{told}**")
    if any(point.peak_allocated_bytes is not None for point in found.points):
        st.altair_chart(budgets_chart(found), key="budgets_chart")
    frame = budgets_frame(found)
    size = st.column_config.NumberColumn(format="%.2f GiB")
    columns = {
        "Allocated": size,
        "Reserved": size,
        "Computed again": st.column_config.NumberColumn(format="percent"),
        LINK: LINK_COLUMN,
    }
    st.dataframe(frame, key="budgets_table", hide_index=True, column_config=columns)
    offer_download("CSV", lambda: frame_csv(frame), f"{file_stem(request)}-budgets.csv", "text/csv")
    st.caption(
        "Allocated and reserved are peaks, each row by its own trace. Computed again: in the backward pass, as a share of the "
        "forward FLOPs of compiled regions. A smaller budget does not always need less memory."
    )


def budgets_frame(found: BudgetReport) -> pd.DataFrame:
    """Return a row for each step; sizes are in GiB."""
    eager = [("eager", found.eager, ""), ("eager, checkpointing", found.checkpointing, found.reason)]
    rows = [
        {
            "Step": title,
            "Allocated": None if cell is None else GIBIBYTES.of(cell.peak_allocated_bytes),
            "Reserved": None if cell is None else GIBIBYTES.of(cell.peak_reserved_bytes),
            "Computed again": None,
            "Operators": reason,
            LINK: "",
        }
        for title, cell, reason in eager
    ]
    rows += [
        {
            "Step": f"compiled, budget {point.budget:g}",
            "Allocated": None if point.peak_allocated_bytes is None else GIBIBYTES.of(point.peak_allocated_bytes),
            "Reserved": None if point.peak_reserved_bytes is None else GIBIBYTES.of(point.peak_reserved_bytes),
            "Computed again": point.recomputed_flops_share,
            "Operators": point.reason or ", ".join(point.recomputed),
            LINK: link_of(point.query),
        }
        for point in found.points
    ]
    frame = pd.DataFrame(rows)
    numbers = ["Allocated", "Reserved", "Computed again"]
    return frame.astype(dict.fromkeys(numbers, "Float64"))


def budgets_chart(found: BudgetReport) -> alt.LayerChart:
    """Return the peak of allocated memory over the budget, with a rule each for the eager step and for checkpointing."""
    points = [
        {"budget": point.budget, "peak": GIBIBYTES.of(point.peak_allocated_bytes)}
        for point in found.points
        if point.peak_allocated_bytes is not None
    ]
    frame = pd.DataFrame(points, columns=["budget", "peak"])
    line = (
        alt.Chart(frame)
        .mark_line(point=alt.OverlayMarkDef(color=COLOURS["activation"]), color=COLOURS["activation"])
        .encode(
            x=alt.X("budget:Q", title="activation memory budget", scale=alt.Scale(domain=[0, 1])),
            y=alt.Y("peak:Q", title="peak allocated, GiB", scale=alt.Scale(zero=False)),
            tooltip=["budget:Q", alt.Tooltip("peak:Q", format=".2f")],
        )
    )
    cells = {"eager": found.eager, "checkpointing": found.checkpointing}
    rules = pd.DataFrame(
        [{"step": name, "peak": GIBIBYTES.of(cell.peak_allocated_bytes)} for name, cell in cells.items() if cell is not None]
    )
    rule = alt.Chart(rules).mark_rule(strokeDash=[4, 4], color=INK).encode(y="peak:Q")
    label = (
        alt.Chart(rules)
        .mark_text(align="left", dx=4, dy=-6, color=INK)
        .encode(x=alt.value(0), y="peak:Q", text="step:N")
    )
    return finish([line, rule, label], "Peak of allocated memory by budget, in GiB")

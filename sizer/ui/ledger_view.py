"""Ledger on the page Measure: measurements, errors of the estimates, and each comparison on a click.

Names may come from a stranger's file: they go through st.dataframe and st.text, which show text as text.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from sizer.base.errors import JobError
from sizer.base.units import GIB, pluralize
from sizer.device.ledger.ledger import Ledger
from sizer.device.ledger.rows import ErrorStatistics, Filter, LedgerRow
from sizer.ui import measuring, remarks
from sizer.ui.charts import draw
from sizer.ui.comparison_view import SIGNS, format_moment, show_comparison
from sizer.ui.exports import offer_download
from sizer.ui.focus import pick
from sizer.ui.links import show_estimate_link
from sizer.ui.measuring import ask_import
from sizer.ui.published import FIGURES, errors_chart, points_of, show_published
from sizer.ui.quantities import PEAKS, TENSORS, quantity_title
from sizer.ui.styling import round_figure

TITLES = remarks.TITLES | {JobError: "The ledger cannot be read"}
PART = "measure_part"  # key of the control for the part of the page
RUN, LEDGER = "Run it on a device", "What was measured"
OPEN = "comparison"  # key of the address: the comparison to show
EDITION = "ledger_edition"  # session state: how often a row was opened; the table then has a new key, without a selected row
NOTHING_YET = "This machine has no measurements yet. Measurements of others follow."
HOLDS = {"yes": True, "no": False}
EXAMPLE = "python -m sizer measure 'arch=torchvision:resnet18&image=64&dtype=float32&batch=2' --device cpu --json > measured.json"


def ask_part() -> str:
    """Ask for the part of the page to show: a run on a device, or the measurements so far."""
    st.session_state.setdefault(PART, RUN)
    return st.segmented_control("Part", [RUN, LEDGER], required=True, key=PART, label_visibility="collapsed")


def show_ledger() -> None:
    """Show all comparisons of this machine's ledger, and the measurements in the package. Raises SizerError."""
    st.title("Every measurement beside its estimate", anchor=False)
    ledger = measuring.get_ledger()
    place = st.container()
    _show_import(ledger)
    with place:
        if ledger.rows():
            _show_rows(ledger)
        else:
            st.info(NOTHING_YET)
        show_published()


# ---------------------------------------------------------------------------------------------------------- one of them


def open_comparison() -> int | None:
    """Return the number of the comparison in the address: -1 for an unknown one, None without one."""
    number = st.query_params.get(OPEN, "")
    if not number:
        return None
    return int(number) if number.isdecimal() and len(number) < 16 else -1


def show_one(number: int) -> None:
    """Show one comparison of the ledger. Raises SizerError."""
    ledger = measuring.get_ledger()
    row = next((row for row in ledger.rows() if row.id == number), None)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button("Back to the ledger", icon=":material/arrow_back:", on_click=_close, key="ledger_back")
        if row and measuring.may_measure():
            _offer_delete(number)
        if row:
            show_estimate_link(row.query)
    if row and not measuring.may_measure():
        st.caption("Deleting is disabled in this deployment.")
    comparison = ledger.comparison(number) if row else None
    if comparison is None:
        st.info("The ledger has no such comparison; it may have been deleted.")
    else:
        show_comparison(comparison)


def _offer_delete(number: int) -> None:
    with st.popover("Delete", icon=":material/delete:"):
        st.markdown("This removes the comparison from the ledger and from its statistics.")
        st.button("Delete this comparison", on_click=_delete, args=(number,), key="ledger_delete")


def _open(rows: Sequence[LedgerRow], key: str) -> None:
    if chosen := st.session_state[key]["selection"]["rows"]:
        st.query_params.from_dict({OPEN: str(rows[chosen[0]].id)})
        st.session_state[EDITION] += 1


def _close() -> None:
    st.query_params.pop(OPEN, None)
    go_to_ledger()


def go_to_ledger() -> None:
    """Choose the ledger among the parts of the page that measures."""
    st.session_state[PART] = LEDGER


def _delete(number: int) -> None:
    measuring.get_ledger().delete(number)
    _close()


# ---------------------------------------------------------------------------------------------------------- all of them


def _show_import(ledger: Ledger) -> None:
    with st.expander("Import measurements from another machine, or export these", expanded=not ledger.rows()):
        ask_import("ledger")
        st.markdown("To make such a file on another machine with Sizer and its requirements, run")
        st.code(EXAMPLE, language=None, wrap_lines=True)
        if ledger.rows():
            with st.container(horizontal=True):
                offer_download("The ledger (CSV)", ledger.export_csv, "sizer-ledger.csv", "text/csv")
                offer_download(
                    "The ledger (JSON)", lambda: "".join(ledger.export_json()), "sizer-ledger.json", "application/json"
                )


def _show_rows(ledger: Ledger) -> None:
    wanted = _ask_filter(ledger)
    rows = ledger.rows(wanted)
    if not rows:
        st.info("No comparison matches these filters.")
        return
    held = sum(row.holds for row in rows)
    st.markdown(f"**{pluralize(len(rows), 'comparison')}**, {held:,} within tolerance")
    _show_table(rows)
    left, right = st.columns(2, gap="medium")
    with left:
        st.markdown("**Signed errors of the peaks**")
        draw(errors_chart(points_of(rows)), "errors_chart")
    with right:
        st.markdown("**Errors by quantity and device**")
        _show_statistics(ledger.statistics(wanted, by_family=False))
    st.caption(SIGNS)


def _ask_filter(ledger: Ledger) -> Filter:
    """Show the controls of the filter, and return it."""
    choices = ledger.choices()
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        text = st.text_input("Architecture", key="ledger_architecture", placeholder="a part of its name", width=220)
        return Filter(
            architecture=text.strip() or None,
            device_name=pick("Device", choices["device_name"], "ledger_device"),
            mode=pick("Task", choices["mode"], "ledger_mode"),
            dtype=pick("Dtype", choices["dtype"], "ledger_dtype"),
            source=pick("Source", sorted({_source(row) for row in ledger.rows()}), "ledger_source"),
            holds=HOLDS.get(pick("Within tolerance?", list(HOLDS), "ledger_holds") or ""),
        )


def _source(row: LedgerRow) -> str:
    """Return the source of the architecture ("torchvision", "hf", ...), as the query says."""
    items = dict(item.partition("=")[::2] for item in row.query.split("&"))
    return items.get("arch", "").partition(":")[0] or "other"


def _show_table(rows: Sequence[LedgerRow]) -> None:
    key = f"ledger_table_{st.session_state.setdefault(EDITION, 0)}"
    number = st.column_config.NumberColumn(format="%.3f")
    st.dataframe(
        rows_frame(rows),
        key=key,
        hide_index=True,
        height=min(36 * (len(rows) + 1), 420),
        on_select=lambda: _open(rows, key),
        selection_mode="single-row",
        column_config={
            "Architecture": st.column_config.TextColumn(pinned=True),
            "Peak, GiB": number,
            "Estimate, GiB": number,
            **{title: st.column_config.NumberColumn(format="%+.1f %%") for title in FIGURES},
        },
    )
    st.caption("Select a row (its first column) to see the whole comparison.")


def rows_frame(rows: Sequence[LedgerRow]) -> pd.DataFrame:
    """Return the ledger's rows as a table: sizes in GiB, errors in percent. Figures without a counter on the device are missing."""
    frame = {
        "Architecture": [row.architecture for row in rows],
        "Within tolerance": ["✓" if row.holds else "✕" for row in rows],
        "Task": [row.mode for row in rows],
        "Dtype": [row.dtype for row in rows],
        "Batch": [row.batch for row in rows],
        **({"Rank": [row.place for row in rows]} if any(row.place for row in rows) else {}),
        "Device": [row.device_name for row in rows],
        "Peak, GiB": [_gib(row.measured_peak_allocated_bytes) for row in rows],
        "Estimate, GiB": [_gib(row.estimated_peak_allocated_bytes) for row in rows],
    }
    frame |= {title: [round_figure(figure.percent(row), 1) for row in rows] for title, figure in FIGURES.items()}
    frame |= {"torch": [row.torch for row in rows], "Measured": [format_moment(row.measured_at) for row in rows]}
    return pd.DataFrame(frame)


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / GIB


def _show_statistics(statistics: Sequence[ErrorStatistics]) -> None:
    percent = st.column_config.NumberColumn(format="%+.2f %%")
    frame = statistics_frame(statistics)
    st.dataframe(frame, hide_index=True, column_config=dict.fromkeys(("Median", "Worst", "Bias"), percent))


def statistics_frame(statistics: Sequence[ErrorStatistics]) -> pd.DataFrame:
    """Return signed errors in percent, one row per quantity and device, peaks first."""
    order = [*PEAKS, *TENSORS]
    known = [row for row in statistics if row.quantity in order]
    rows = [row for row in statistics if row.quantity not in order]
    rows = sorted(known, key=lambda row: (row.device, order.index(row.quantity))) + rows
    return pd.DataFrame(
        {
            "Figure": [quantity_title(row.quantity) for row in rows],
            "Device": [row.device for row in rows],
            "Count": [row.count for row in rows],
            "Median": [round_figure(100 * row.median) for row in rows],
            "Worst": [round_figure(100 * row.worst) for row in rows],
            "Bias": [round_figure(100 * row.bias) for row in rows],
        }
    )

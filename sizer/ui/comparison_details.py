"""What stands in the tabs below a comparison: time, memory inside kernels, notes, downloads. Its texts may be a stranger's."""

from __future__ import annotations

import json
from functools import partial

import pandas as pd
import streamlit as st
from pandas.io.formats.style import Styler

from sizer.base.errors import RequestError
from sizer.base.units import counted, format_bytes
from sizer.device.comparison.comparison import Comparison
from sizer.device.record.measurement import Spread, Timing, Transfer
from sizer.query.text import parse_query
from sizer.report.phases import PHASE_TITLES
from sizer.ui import remarks
from sizer.ui.exports import offer_download
from sizer.ui.links import measure_command
from sizer.ui.quantities import device_title
from sizer.ui.tabs import show_tabs

DETAILS = "comparison_details"  # key of the tabs, which holds the name of the open one
HEADINGS = [
    {"selector": "th.col_heading", "props": "text-align: right !important"},
    {"selector": "th.row_heading", "props": "white-space: nowrap"},
]
LAUNCHED = (
    "A device works through its queue while the program runs on. A clock that does not wait for it reads how long it took to "
    "hand the work over, not how long the work took."
)


def show_details(comparison: Comparison) -> None:
    """Show the tabs below a comparison."""
    show_tabs({name: partial(show, comparison) for name, show in _DETAILS.items()}, key=DETAILS)


def _show_time(comparison: Comparison) -> None:
    timing = comparison.measurement.timing
    if timing is None:
        st.caption("Time was not measured.")
        return
    rows = [("One step, synchronized", timing.step), ("One step, not synchronized", timing.unsynchronized)]
    st.table(_spread_table(rows))
    st.text(f"Clock: {timing.clock}. After {counted(timing.warm_up, 'step')} to warm up.")
    if comparison.measurement.device.kind != "cpu":
        st.caption(LAUNCHED)
    _show_transfers(timing)


def _show_transfers(timing: Timing) -> None:
    if not timing.transfers:
        return
    st.markdown("**Copying the batch to the device**")
    rows = {_transfer_title(one): _transfer_cells(one) for one in timing.transfers}
    columns = ["Bytes", "Not synchronized", "Synchronized", "Rate"]
    st.table(pd.DataFrame.from_dict(rows, orient="index", columns=columns).style.pipe(_to_the_right))


def _transfer_title(one: Transfer) -> str:
    return f"{'pinned' if one.pinned else 'pageable'} memory{', non_blocking' if one.non_blocking else ''}"


def _transfer_cells(one: Transfer) -> tuple[str, ...]:
    issued, done = one.issued.median_seconds, one.done.median_seconds
    rate = f"{one.bytes / done / 1e9:,.1f} GB/s" if done > 0 else "–"
    return (format_bytes(one.bytes), format_seconds(issued), format_seconds(done), rate)


def _spread_table(rows: list[tuple[str, Spread]]) -> Styler:
    return pd.DataFrame(
        [
            (
                format_seconds(one.median_seconds),
                f"{format_seconds(one.low_seconds)} to {format_seconds(one.high_seconds)}",
                f"{one.runs:,}",
            )
            for _, one in rows
        ],
        index=[title for title, _ in rows],
        columns=["Median", "Quartiles", "Runs"],
    ).style.pipe(_to_the_right)


def _to_the_right(styler: Styler) -> Styler:
    return styler.set_properties(**{"text-align": "right !important", "white-space": "nowrap"}).set_table_styles(
        HEADINGS
    )


def format_seconds(seconds: float) -> str:
    """Seconds as text, in the unit that leaves a number above 1."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:,.2f} {unit}"
    return f"{seconds * 1e6:,.1f} µs"


def _show_scratch(comparison: Comparison) -> None:
    if not comparison.scratch:
        st.caption("No kernel held other memory inside than the estimate says, or none was recorded.")
        return
    whole = st.column_config.NumberColumn(format="localized")
    st.dataframe(
        pd.DataFrame(
            {
                "Operator": [one.op for one in comparison.scratch],
                "Module": [one.module or "(root)" for one in comparison.scratch],
                "Phase": [PHASE_TITLES.get(one.phase, one.phase) for one in comparison.scratch],
                "On the device, bytes": [one.most_bytes for one in comparison.scratch],
                "In the estimate, bytes": [one.estimated_bytes for one in comparison.scratch],
                "Calls": [one.times for one in comparison.scratch],
            }
        ),
        hide_index=True,
        column_config=dict.fromkeys(("On the device, bytes", "In the estimate, bytes"), whole),
    )
    st.caption("Allocated and released within one operator: the call that differs most, and how many calls differ.")


def _show_notes(comparison: Comparison) -> None:
    measurement, facts = comparison.measurement, comparison.measurement.device
    beneath = [f"{name} {version}" for name, version in facts.versions.items()]
    memory = [] if facts.total_bytes is None else [format_bytes(facts.total_bytes)]
    for title, lines in (
        ("Summary", [comparison.verdict]),
        ("About this comparison", comparison.notes),
        ("Where the measured bytes come from", [measurement.source]),
        ("Device", [", ".join([facts.device, facts.name, *memory, *beneath])]),
        ("Measured with", [", ".join(f"{name} {version}" for name, version in measurement.versions.items())]),
        ("Estimated with", [", ".join(f"{name} {version}" for name, version in comparison.versions.items())]),
    ):
        if lines:
            st.markdown(f"**{title}**")
            remarks.show_lines(lines)


def _show_downloads(comparison: Comparison) -> None:
    st.markdown("Measurement, estimate and comparison as one file; another ledger can import it:")
    offer_download(
        "Comparison (JSON)",
        lambda: json.dumps(comparison.to_dict(), allow_nan=False, indent=1),
        "sizer-comparison.json",
        "application/json",
    )
    _show_command(comparison)


def _show_command(comparison: Comparison) -> None:
    """Show the command that measures the same again; nothing where a stranger's file names no query or no device of ours."""
    device = device_title(comparison.measurement.device)
    try:
        cell = parse_query(comparison.measurement.query)
    except RequestError:
        return
    if device == comparison.measurement.device.device:
        st.markdown("The same measurement without the page:")
        st.code(measure_command(cell, device), language=None, wrap_lines=True)


_DETAILS = {
    "Time": _show_time,
    "Kernel scratch memory": _show_scratch,
    "Notes": _show_notes,
    "Downloads": _show_downloads,
}

"""View of a comparison: headline, figures side by side, two timelines, time, kernels, notes and downloads.

The comparison may come from a stranger's file.
"""

from __future__ import annotations

import json
from functools import partial

import pandas as pd
import streamlit as st
from pandas.io.formats.style import Styler

from sizer.base.errors import RequestError
from sizer.base.units import format_bytes, format_range, pluralize
from sizer.device.comparison.comparison import Comparison
from sizer.device.comparison.row import Row
from sizer.device.record.measurement import DeviceOutOfMemory, Spread, Timing, Transfer
from sizer.query.text import parse_query
from sizer.report.advice import PHRASES
from sizer.report.phases import PHASE_TITLES, inside
from sizer.ui import remarks
from sizer.ui.charts import draw, timelines_chart, timelines_legend
from sizer.ui.exports import offer_download
from sizer.ui.frame import show_tabs
from sizer.ui.links import measure_command
from sizer.ui.quantities import (
    PEAKS,
    TENSORS,
    device_title,
    format_difference,
    format_error,
    marked_error,
    quantity_title,
)
from sizer.ui.styling import FIGURE_VERDICTS, TINTS, scale_for

SIGNS = "Differences are estimated − measured: a positive one is an estimate that was too high."
DOTS = "No allocations were recorded: the dots are the counters at the end of each phase."
LEGEND = "✓ within the stated tolerance, ✕ outside it; no mark without a tolerance."


def show_comparison(comparison: Comparison) -> None:
    """Show a comparison, the most important parts first."""
    st.header(headline(comparison), anchor=False)
    _show_work(comparison)
    _show_metrics(comparison)
    _show_out_of_memory(comparison)
    _show_wrong(comparison)
    _show_rows(comparison)
    _show_timelines(comparison)
    show_details(comparison)


def headline(comparison: Comparison) -> str:
    """Return the comparison in one sentence, without a stranger's text."""
    measurement, row = comparison.measurement, comparison.find("peak_allocated_bytes")
    where = device_title(measurement.device)
    if measurement.out_of_memory is not None:
        phase = measurement.out_of_memory.phase
        where_in = inside(phase) if phase in PHASE_TITLES else "a step"
        said = PHRASES[comparison.estimate.verdict]
        return f"Measured on {where}: out of memory in {where_in}, the estimate said that it {said}"
    if measurement.failure is not None:
        return f"Measured on {where}: the steps ended early"
    if row is None:
        return f"Measured on {where}: the device has no counter for the peak"
    measured, estimated = format_bytes(row.measured_bytes), format_bytes(row.estimated_bytes)
    return f"Measured on {where}: peak {measured}, the estimate said {estimated}: {_error(row)}"


def _show_work(comparison: Comparison) -> None:
    """Show the work, the machine and the time of a measurement. The texts may be a stranger's."""
    measurement = comparison.measurement
    work = f"{comparison.task} of {comparison.architecture}, {measurement.dtype}, batch {measurement.batch}"
    place = f"{measurement.device.name}, torch {measurement.versions.get('torch', 'unknown')}"
    st.text(f"{work[0].upper()}{work[1:]}. {place}, {format_moment(measurement.measured_at)}.")


def format_moment(moment: str) -> str:
    """Return a moment in ISO 8601 (UTC) in the usual notation of dates."""
    return f"{moment.replace('T', ' ').removesuffix('Z').removesuffix('+00:00')} UTC"


def _show_metrics(comparison: Comparison) -> None:
    with st.container(horizontal=True, gap="medium"):
        for quantity, title in PEAKS.items():
            if row := comparison.find(quantity):
                _metric(title.split(",")[0].capitalize(), format_bytes(row.measured_bytes), f"estimate {_error(row)}")
        if timing := comparison.measurement.timing:
            _metric("One step", format_seconds(timing.step.median_seconds), "with synchronization")
        if (retries := comparison.measurement.retries) is not None:
            _metric(
                "Retries", f"{retries:,}", "of the allocator", "Allocations that first had to return cached memory to the device."
            )


def _metric(label: str, value: str, below: str, help_text: str | None = None) -> None:
    st.metric(label, value, below, delta_color="off", delta_arrow="off", help=help_text)


def _error(row: Row) -> str:
    return "exact" if row.error == 0 else format_error(row.error)


def _show_out_of_memory(comparison: Comparison) -> None:
    measurement = comparison.measurement
    if measurement.failure is not None:
        with st.container(border=True):
            st.warning("The steps ended with an error other than out of memory. The phases before it were measured.")
            st.text(measurement.failure)
    if (ended := measurement.out_of_memory) is not None:
        with st.container(border=True):
            st.warning("The device ran out of memory. The phases before the error were measured.")
            remarks.show_lines([*_out_of_memory_lines(ended), *_said_lines(comparison)])


def _out_of_memory_lines(ended: DeviceOutOfMemory) -> list[str]:
    figures = {
        "asked for": ended.requested_bytes,
        "free on the device then": ended.free_bytes,
        "allocated then": ended.allocated_bytes,
        "reserved then": ended.reserved_bytes,
    }
    known = [f"{format_bytes(size)} {words}" for words, size in figures.items() if size is not None]
    return [
        f"In {inside(ended.phase)}: {', '.join(known) or 'the device did not report the requested size'}.",
        ended.message,
    ]


def _said_lines(comparison: Comparison) -> list[str]:
    estimate = comparison.estimate
    needs = f"The estimate had said: a peak of {format_bytes(estimate.peak_allocated_bytes)} allocated, in "
    lines = [needs + f"{inside(estimate.peak_phase)}, by {estimate.peak_op}."]
    if (end := estimate.out_of_memory) is not None:
        asked, phase = format_bytes(end.requested_bytes), inside(end.phase)
        lines.append(f"The estimate had foreseen it: {asked} for {end.op} in {phase}, module {end.module or '(root)'}.")
    return lines


def _show_wrong(comparison: Comparison) -> None:
    """Show the reasons why figures may be unreliable, and the figures outside their tolerance."""
    if doubts := comparison.measurement.doubts:
        with st.container(border=True):
            st.warning("These figures may be unreliable.")
            remarks.show_lines(doubts)
    if comparison.wrong:
        with st.container(border=True):
            st.markdown("**Figures outside their tolerance**")
            remarks.show_lines(f"✕ {line}" for line in comparison.wrong)


def _show_rows(comparison: Comparison) -> None:
    rows = {row.quantity: row for row in comparison.rows}
    whole = [rows[quantity] for quantity in (*PEAKS, *TENSORS) if quantity in rows]
    of_phases = [row for row in comparison.rows if row.quantity not in PEAKS and row.quantity not in TENSORS]
    for title, some in (("The peaks, and the tensors by category", whole), ("Phase by phase", of_phases)):
        if some:
            st.markdown(f"**{title}**")
            st.table(style_rows(some))
    st.caption(f"{SIGNS} {LEGEND}")
    if allowances := dict.fromkeys(row.allowance for row in comparison.rows if row.allowance and row.difference_bytes):
        remarks.show_lines(f"Allowed for: {allowance}" for allowance in allowances)
    if range_holds := _process_range(comparison):
        st.caption(range_holds)


def style_rows(rows: list[Row]) -> Styler:
    """Return a comparison's rows as a table; rows outside their tolerance are tinted and marked.

    Sizes have one unit; differences are in bytes.
    """
    scale = scale_for(size for row in rows for size in (row.estimated_bytes, row.measured_bytes))
    frame = pd.DataFrame(
        [
            (
                scale.text(row.estimated_bytes),
                scale.text(row.measured_bytes),
                format_difference(row.difference_bytes),
                marked_error(row),
            )
            for row in rows
        ],
        index=pd.Index([_row_title(rows, place) for place in range(len(rows))], name="Figure"),
        columns=["Estimated", "Measured", "Difference, bytes", "Error"],
    )
    tints = pd.DataFrame("text-align: right !important; white-space: nowrap", index=frame.index, columns=frame.columns)
    for title, row in zip(frame.index, rows, strict=True):
        if row.holds is not None:
            tints.loc[title] += f"; background-color: {TINTS[FIGURE_VERDICTS[row.holds]]}"
    return frame.style.apply(lambda _: tints, axis=None).set_table_styles(HEADINGS)


def _row_title(rows: list[Row], place: int) -> str:
    """Return a row's title, numbered if an earlier row has the same one. A table needs unique titles."""
    titles = [quantity_title(row.quantity) for row in rows[: place + 1]]
    earlier = titles[:-1].count(titles[-1])
    return f"{titles[-1]} ({earlier + 1})" if earlier else titles[-1]


def _process_range(comparison: Comparison) -> str:
    if (inside := comparison.process_in_range) is None:
        return ""
    ends = format_range(comparison.estimate.process_low_bytes, comparison.estimate.process_high_bytes)
    return f"The driver's figure for the process is {'inside' if inside else 'outside'} the estimate's range, {ends}."


def _show_timelines(comparison: Comparison) -> None:
    st.markdown("**Estimated and measured timelines**, allocated")
    draw(timelines_chart(comparison), "timelines_chart")
    st.html(timelines_legend())
    if not comparison.measured_curve:
        st.caption(DOTS)
    if comparison.first_divergence is not None:
        st.markdown("**First divergence**")
        st.text(comparison.first_divergence.describe())
        others = [one for one in comparison.largest_divergences if one != comparison.first_divergence]
        if others:
            st.markdown("**Largest divergences**")
            remarks.show_lines(one.describe() for one in others)
    elif comparison.measured_curve:
        st.caption("Estimate and recording allocate and free the same blocks. They differ only inside kernels.")


# ----------------------------------------------------------------------------------------------------------------- tabs


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
    st.text(f"Clock: {timing.clock}. After {pluralize(timing.warm_up, 'step')} to warm up.")
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
        index=pd.Index([title for title, _ in rows], name="What"),
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

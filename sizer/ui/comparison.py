"""A comparison as a page shows it: the sentence, the figures side by side, the two timelines, time, and what went wrong.

Texts that come with it may be a stranger's (an imported file): they are shown as plain text, never as markdown.
"""

from __future__ import annotations

import pandas as pd
import streamlit as st
from pandas.io.formats.style import Styler

from sizer.base.units import format_bytes
from sizer.device.comparison.comparison import Comparison
from sizer.device.comparison.row import Row
from sizer.device.record.measurement import DeviceOutOfMemory
from sizer.report.advice import PHRASES
from sizer.report.phases import PHASE_TITLES, inside
from sizer.ui import remarks
from sizer.ui.comparison_details import HEADINGS, format_seconds, show_details
from sizer.ui.drawing import draw
from sizer.ui.palette import HELD, TINTS
from sizer.ui.quantities import (
    PEAKS,
    TENSORS,
    device_title,
    format_difference,
    format_error,
    marked_error,
    quantity_title,
)
from sizer.ui.timelines import timelines_chart, timelines_legend

SIGNS = "Differences are estimated less measured: + is an estimate that was too high."
LEGEND = "✓ within tolerance (exact, or as far off as the estimate states), ✕ not; no mark where none is stated."


def show_comparison(comparison: Comparison) -> None:
    """Show one comparison whole, the most important first."""
    st.header(headline(comparison), anchor=False)
    _show_work(comparison)
    _show_metrics(comparison)
    _show_out_of_memory(comparison)
    _show_wrong(comparison)
    _show_rows(comparison)
    _show_timelines(comparison)
    show_details(comparison)


def headline(comparison: Comparison) -> str:
    """The comparison in one sentence of our own words."""
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
    """Show what was measured, where and when, in words that may be a stranger's."""
    measurement = comparison.measurement
    work = f"{comparison.task} of {comparison.architecture}, {measurement.dtype}, batch {measurement.batch}"
    place = f"{measurement.device.name}, torch {measurement.versions.get('torch', 'unknown')}"
    st.text(f"{work[0].upper()}{work[1:]}. {place}, {format_moment(measurement.measured_at)}.")


def format_moment(moment: str) -> str:
    """A moment in ISO 8601, UTC, as people write it."""
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
                "Retries", f"{retries:,}", "of the allocator", "How often cached memory had to be given back first."
            )


def _metric(label: str, value: str, below: str, help_text: str | None = None) -> None:
    st.metric(label, value, below, delta_color="off", delta_arrow="off", help=help_text)


def _error(row: Row) -> str:
    return "exact" if row.error == 0 else format_error(row.error)


def _show_out_of_memory(comparison: Comparison) -> None:
    measurement = comparison.measurement
    if measurement.failure is not None:
        with st.container(border=True):
            st.warning("The steps ended for another reason than a lack of memory. The phases before it were measured.")
            st.text(measurement.failure)
    if (ended := measurement.out_of_memory) is not None:
        with st.container(border=True):
            st.warning("The device ran out of memory. That is a result too: the phases before it were measured.")
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
        f"In {inside(ended.phase)}: {', '.join(known) or 'the device did not say how much was asked for'}.",
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
    """Show why the figures may be unreliable, and which of them are outside their tolerance."""
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
    """Rows of a comparison as a table in words and signed numbers, those that miss their tolerance tinted and marked."""
    frame = pd.DataFrame(
        [
            (
                format_bytes(row.estimated_bytes),
                format_bytes(row.measured_bytes),
                format_difference(row.difference_bytes),
                marked_error(row),
            )
            for row in rows
        ],
        index=pd.Index([_row_title(rows, place) for place in range(len(rows))]),
        columns=["Estimated", "Measured", "Difference, bytes", "Error"],
    )
    tints = pd.DataFrame("text-align: right !important; white-space: nowrap", index=frame.index, columns=frame.columns)
    for title, row in zip(frame.index, rows, strict=True):
        if row.holds is not None:
            tints.loc[title] += f"; background-color: {TINTS[HELD[row.holds]]}"
    return frame.style.apply(lambda _: tints, axis=None).set_table_styles(HEADINGS)


def _row_title(rows: list[Row], place: int) -> str:
    """A row's title, with its number where another one before has the same; a table needs them all different."""
    titles = [quantity_title(row.quantity) for row in rows[: place + 1]]
    earlier = titles[:-1].count(titles[-1])
    return f"{titles[-1]} ({earlier + 1})" if earlier else titles[-1]


def _process_range(comparison: Comparison) -> str:
    if (inside := comparison.process_in_range) is None:
        return ""
    low, high = (
        format_bytes(size) for size in (comparison.estimate.process_low_bytes, comparison.estimate.process_high_bytes)
    )
    return f"The driver's figure for the process is {'inside' if inside else 'outside'} the estimate's range, {low} to {high}."


def _show_timelines(comparison: Comparison) -> None:
    st.markdown("**Estimated and measured timelines**, allocated")
    draw(timelines_chart(comparison), "timelines_chart")
    st.html(timelines_legend())
    if not comparison.measured_curve:
        st.caption("Nothing was recorded between the phases' ends: the dots are what was read there.")
    if comparison.first_divergence is not None:
        st.markdown("**First divergence**")
        st.text(comparison.first_divergence.describe())
        others = [one for one in comparison.largest_divergences if one != comparison.first_divergence]
        if others:
            st.markdown("**Largest divergences**")
            remarks.show_lines(one.describe() for one in others)
    elif comparison.measured_curve:
        st.caption("Estimate and recording allocate and free the same blocks: they differ only inside kernels.")

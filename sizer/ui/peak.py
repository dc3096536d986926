"""What is alive at the peak of the cell in focus: in one sentence, by module, by tensor, and as files to take along."""

from __future__ import annotations

import re
from dataclasses import replace

import pandas as pd
import streamlit as st

from sizer.base.errors import SizerError
from sizer.base.units import format_bytes
from sizer.catalogue.modes import MODES
from sizer.catalogue.sources import SOURCES
from sizer.query.request import Request
from sizer.query.text import format_query
from sizer.report.estimate import Estimate
from sizer.report.peak import PeakReport, with_children
from sizer.report.report import Report
from sizer.ui import service
from sizer.ui.charts import legend
from sizer.ui.exports import offer_download
from sizer.ui.headline import sample_size, verdict
from sizer.ui.icicle import icicle_chart
from sizer.ui.once import drawn_once
from sizer.ui.picture import Summary, alt_text
from sizer.ui.scale import scale_for
from sizer.ui.turns import result_of

ASKED = "peak_asked"  # key of the switch, which stays on for the next cell in focus


def show_peak(request: Request, report: Report, estimate: Estimate) -> None:
    """Show what is alive at the peak of one estimate of a report, once the reader has asked for that trace."""
    if not st.toggle("Trace every tensor that is alive at the peak", key=ASKED, persist_state="session"):
        return
    if report.pending:
        st.caption("Known once the estimate is whole.")
        return
    cell = replace(request, dtypes=(estimate.dtype,), batches=(estimate.batch,), focus=None)
    with st.container():  # there with progress or without
        found = _ask(cell)
    if isinstance(found, PeakReport):
        _show_found(found)
        _offer_files(cell, report, estimate)
    else:
        st.text(f"It could not be traced: {found}")


def _ask(cell: Request) -> PeakReport | SizerError:
    """The answer, with progress in a line meanwhile; leaves the job where Streamlit ends this run for a newer one."""
    job, line = service.get_client().submit_peak(format_query(cell)), st.empty()
    try:
        with service.held(job):
            while (found := result_of(job, service.POLL_SECONDS)) is None:
                line.text(job.progress or "waiting")
    except SizerError as error:
        return error
    line.empty()
    return found


@drawn_once
def _show_found(found: PeakReport) -> None:
    st.text(found.sentence)
    if found.remedy:
        st.text(found.remedy)
    st.markdown("**By module**, children under their parents; the strip below each name is what it holds, by category")
    st.altair_chart(icicle_chart(found.modules), key="icicle")
    st.html(legend([category for category, size in found.at_peak.items() if size]))
    _show_table(modules_frame(found), height=260)
    st.markdown("**By tensor**, alike ones in one row, the largest first")
    _show_table(tensors_frame(found), height=320)
    if found.rest_count:
        st.caption(f"And {found.rest_count:,} smaller ones, {format_bytes(found.rest_bytes)} together.")


def _show_table(frame: pd.DataFrame, *, height: int) -> None:
    number = st.column_config.NumberColumn(format="%.3f")
    sizes = dict.fromkeys(frame.select_dtypes("float").columns, number)
    st.dataframe(frame, hide_index=True, height=height, column_config=sizes)


def tensors_frame(found: PeakReport) -> pd.DataFrame:
    """A row for each group of tensors that are alike."""
    scale = scale_for([found.allocated_bytes])
    return pd.DataFrame(
        {
            "Tensor": [group.tensor for group in found.tensors],
            "Count": [group.count for group in found.tensors],
            scale.name: [scale.of(group.bytes) for group in found.tensors],
            "What": [group.category for group in found.tensors],
            "Operator": [group.op for group in found.tensors],
            "Module": [group.module or "the model itself" for group in found.tensors],
            "Made in": [group.phase for group in found.tensors],
        }
    )


def modules_frame(found: PeakReport) -> pd.DataFrame:
    """A row for each module: what its own work holds, what it holds with its children, and that by category."""
    scale = scale_for([found.allocated_bytes])
    own = {row.path: sum(row.by_category.values()) for row in found.modules}
    totals = with_children(found.modules)
    paths = sorted(totals, key=lambda path: -sum(totals[path].values()))
    columns = {
        "Module": [path or "(root)" for path in paths],
        f"With children, {scale.name}": [scale.of(sum(totals[path].values())) for path in paths],
        f"Own, {scale.name}": [scale.of(own.get(path, 0)) for path in paths],
    }
    for category in (name for name, size in found.at_peak.items() if size):
        columns[category.capitalize()] = [scale.of(totals[path].get(category, 0)) for path in paths]
    return pd.DataFrame(columns)


def _offer_files(cell: Request, report: Report, estimate: Estimate) -> None:
    summary = summary_of(cell, report, estimate)
    stem = re.sub(r"[^\w.-]+", "-", f"sizer-{cell.name or cell.source}-{estimate.dtype}-batch-{estimate.batch}")
    if report.gpu.backend == "cuda":
        st.markdown(
            "**To take along**: the snapshot opens in PyTorch's own viewer, [pytorch.org/memory_viz](https://pytorch.org/memory_viz)"
        )
        offer_download("Memory snapshot", lambda: _snapshot(cell), f"{stem}.pickle", "application/octet-stream")
    st.caption("The picture of the row Share in words, for the text beside it:")
    st.code(alt_text(summary, estimate, report.gpu), language=None, wrap_lines=True)


def _snapshot(cell: Request) -> bytes:
    return service.get_client().submit_snapshot(format_query(cell)).result()


def summary_of(cell: Request, report: Report, estimate: Estimate) -> Summary:
    """What the picture says of one dtype and batch size; the link is cut where it holds a whole config."""
    title_of = SOURCES[cell.source].title_of
    optimizer = f" with {cell.optimizer}" if MODES[cell.mode].trains and cell.optimizer != "none" else ""
    return Summary(
        title=title_of(cell.name) if title_of else cell.name or report.model.class_name,
        work=f"{MODES[cell.mode].title}{optimizer}, {estimate.dtype}, batch {estimate.batch}{sample_size(report)}",
        verdict=verdict(cell, report, estimate),
        link=f"{(st.context.url or '').rstrip('/')}/?{format_query(cell)}",
    )

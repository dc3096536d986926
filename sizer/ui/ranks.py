"""On how many GPUs: the work in focus by every way of training on 1 to 64 of them."""

from __future__ import annotations

import functools

import altair as alt
import pandas as pd
import streamlit as st

from sizer.base.errors import SizerError
from sizer.base.units import format_bytes
from sizer.catalogue.gpu_keys import find_gpu
from sizer.query.request import Request
from sizer.query.text import format_query, parse_query
from sizer.report.decision import RankReport, RankRow, describe_fewest
from sizer.report.fit import VERDICTS
from sizer.ui import service
from sizer.ui.charts import finish
from sizer.ui.exports import offer_download
from sizer.ui.offers import offer
from sizer.ui.palette import INK, marked
from sizer.ui.question import file_stem
from sizer.ui.row_links import LINK, LINK_COLUMN, frame_csv, link_of
from sizer.ui.scale import GIBIBYTES

# Of Okabe and Ito, as the categories' are: the ways of training in the order in which they come.
COLOURS = ("#7D8792", "#D55E00", "#E69F00", "#0072B2", "#CC79A7", "#009E73", "#56B4E9", "#F0E442")


def show_ranks(found: RankReport, request: Request) -> None:
    """Show what each GPU holds by how many there are, and the fewest that do."""
    if not found.rows:
        return
    for line in describe_fewest(found):
        st.text(line)
    for row in found.rows:
        if row.searched and row.cell is not None and row.cell.fits is True and row.gpus > 1:
            offer(f"Ask for {row.words} on {row.gpus} GPUs", row.query, request, f"ranks_{row.words}_{row.gpus}")
    _offer_scripts(found, request)
    st.altair_chart(ranks_chart(found.rows, find_gpu(request.gpu).total_bytes), key="ranks_chart")
    number = st.column_config.NumberColumn(format="%.2f GiB")
    frame = ranks_frame(found.rows)
    st.dataframe(
        frame,
        key="ranks_table",
        hide_index=True,
        column_config=dict.fromkeys(("Process", "Allocated"), number) | {LINK: LINK_COLUMN},
    )
    offer_download("CSV", lambda: frame_csv(frame), f"{file_stem(request)}-gpus.csv", "text/csv")
    st.caption(
        "Every figure is of each GPU, whose batch is that of the question; a pipeline works on as many microbatches of it as it "
        "has stages. Each row is traced by itself."
    )


def _offer_scripts(found: RankReport, request: Request) -> None:
    """Offer the programs that do the work on the fewest GPUs, and on those that the question names."""
    asked = {f"{row.words} on {row.gpus} GPUs": row.query for row in found.rows if row.gpus > 1 and row.searched}
    if request.parallel != "none":
        asked = {"this question": format_query(request)} | asked
    with st.container(horizontal=True):
        for title, query in asked.items():
            make = functools.partial(_script, query)
            offer_download(f"torchrun script: {title}", make, f"{file_stem(parse_query(query))}.py", "text/x-python")


def _script(query: str) -> str:
    """The program, or why there is none."""
    try:
        return service.get_client().submit_script(query).result()
    except SizerError as error:
        return f"# There is no script: {error}\n"


def ranks_frame(rows: tuple[RankRow, ...]) -> pd.DataFrame:
    """The rows as a table, those that fit first: sizes in GiB, and the two kinds of memory that are most at the peak."""
    verdicts = [*VERDICTS, None]
    rows = tuple(sorted(rows, key=lambda row: verdicts.index(row.cell.verdict if row.cell else None)))
    return pd.DataFrame(
        {
            "GPUs": [row.gpus for row in rows],
            "By": [row.words for row in rows],
            "Verdict": [marked(row.cell.verdict) if row.cell else row.reason for row in rows],
            "Process": [GIBIBYTES.of(row.cell.process_bytes) if row.cell else None for row in rows],
            "Allocated": [GIBIBYTES.of(row.cell.peak_allocated_bytes) if row.cell else None for row in rows],
            "Most of it": [
                ", ".join(f"{kind} {format_bytes(size)}" for kind, size in list(row.at_peak.items())[:2])
                for row in rows
            ],
            "Between the GPUs in a step": [
                ", ".join(f"{told.kind} {format_bytes(told.bytes)}" for told in row.communication) for row in rows
            ],
            LINK: [link_of(row.query) for row in rows],
        }
    )


def ranks_chart(rows: tuple[RankRow, ...], total_bytes: int) -> alt.LayerChart:
    """A line for each way of training: the process of each GPU by how many there are, and the memory that a GPU has."""
    frame = pd.DataFrame(
        {
            "gpus": row.gpus,
            "by": row.title,
            "process": GIBIBYTES.of(row.cell.process_bytes),
            "verdict": row.cell.verdict,
        }
        for row in rows
        if row.cell is not None and not row.change
    )
    titles = [*dict.fromkeys(row.title for row in rows)]
    base = alt.Chart(frame).encode(
        x=alt.X("gpus:O", title="GPUs", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("process:Q", title="process of each GPU, GiB"),
        color=alt.Color("by:N", title=None, scale=alt.Scale(domain=titles, range=COLOURS[: len(titles)])),
        tooltip=["by:N", "gpus:O", alt.Tooltip("process:Q", title="GiB", format=".2f"), "verdict:N"],
    )
    points = base.mark_point(filled=True, size=60).encode(
        shape=alt.Shape("by:N", title=None, scale=alt.Scale(domain=titles))
    )
    held = alt.Chart(pd.DataFrame({"process": [GIBIBYTES.of(total_bytes)]})).mark_rule(strokeDash=[4, 4], color=INK)
    return finish(
        [base.mark_line(), points, held.encode(y="process:Q")], "Process of each GPU by how many there are, in GiB"
    )

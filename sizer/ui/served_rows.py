"""A server on every device of the catalogue and on several numbers of GPUs, as tables of the page."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import pandas as pd
import streamlit as st

from sizer.query.request import Request
from sizer.report.decision import DeviceReport, DeviceRow, RankReport, RankRow
from sizer.report.fit import Verdict
from sizer.report.served import ServedFigures, Starts
from sizer.serving.words import describe_served_devices, describe_served_ranks, verdict_words
from sizer.ui.exports import offer_download
from sizer.ui.palette import MARKS, VERDICT_COLOURS
from sizer.ui.question import file_stem
from sizer.ui.row_links import LINK, LINK_COLUMN, frame_csv, link_of
from sizer.ui.scale import GIBIBYTES

SIGNS: dict[Starts, Verdict] = {True: "fits", "uncertain": "may not fit", False: "does not fit"}  # the marks of other work
SIZES = ("Memory", "Weights", "KV cache")
REQUESTS = "Requests at once"


def show_served_devices(found: DeviceReport, request: Request) -> None:
    """Show on which devices the server holds what is wanted, and what each holds."""
    if not found.rows:
        return
    st.markdown(f"**{describe_served_devices(found)}**")
    if any(row.serve is not None for row in found.rows):
        st.altair_chart(served_devices_chart(found.rows), key="served_devices_chart")
    memory = [GIBIBYTES.of(row.total_bytes) for row in found.rows]
    frame = _frame({"Device": [row.name for row in found.rows], "Memory": memory}, found.rows)
    _show_table(frame, "served_devices_table")
    offer_download("CSV", lambda: frame_csv(frame), f"{file_stem(request)}-devices.csv", "text/csv")


def show_served_ranks(found: RankReport, request: Request) -> None:
    """Show on how many GPUs the server holds what is wanted, by each split."""
    if not found.rows:
        return
    for line in describe_served_ranks(found):
        st.text(line.strip())
    frame = _frame({"GPUs": [row.gpus for row in found.rows], "By": [row.title for row in found.rows]}, found.rows)
    _show_table(frame, "served_ranks_table")
    offer_download("CSV", lambda: frame_csv(frame), f"{file_stem(request)}-gpus.csv", "text/csv")
    st.caption("Requests are those of all GPUs; tokens those of one copy, weights and cache those of one GPU.")


def _frame(first: dict[str, list], rows: Sequence[DeviceRow] | Sequence[RankRow]) -> pd.DataFrame:
    """Return rows as a table in their order, which is that of what they hold; sizes are in GiB."""
    figures = [row.serve for row in rows]
    verdicts = [f"{MARKS[SIGNS[row.serve.fits]]} {verdict_words(row.serve)}" if row.serve else row.reason for row in rows]

    def column(name: str, kind: str = "Int64") -> pd.api.extensions.ExtensionArray:
        return pd.array([None if one is None else getattr(one, name) for one in figures], dtype=kind)

    return pd.DataFrame(
        first
        | {
            "Verdict": verdicts,
            REQUESTS: column("requests_at_once", "Float64"),
            "Tokens of each": column("length"),
            "KV tokens": column("kv_tokens"),
            "Longest request": column("longest"),
            "Weights": _gib(figures, "weights_bytes"),
            "KV cache": _gib(figures, "kv_cache_bytes"),
            LINK: [link_of(row.query) for row in rows],
        }
    )


def _gib(figures: Sequence[ServedFigures | None], name: str) -> list[float | None]:
    return [None if one is None else GIBIBYTES.of(getattr(one, name)) for one in figures]


def _show_table(frame: pd.DataFrame, key: str) -> None:
    size = st.column_config.NumberColumn(format="%.2f GiB")
    columns = {name: size for name in SIZES if name in frame} | {LINK: LINK_COLUMN}
    columns[REQUESTS] = st.column_config.NumberColumn(format="%.1f")
    st.dataframe(frame, key=key, hide_index=True, height=420, column_config=columns)


def served_devices_chart(rows: Sequence[DeviceRow]) -> alt.Chart:
    """Return a point for each device: its memory across, requests at once upwards."""
    frame = pd.DataFrame(
        {
            "device": row.name,
            "memory": GIBIBYTES.of(row.total_bytes),
            "requests": row.serve.requests_at_once,
            "verdict": SIGNS[row.serve.fits],
        }
        for row in rows
        if row.serve is not None
    )
    domain = [*SIGNS.values()]
    colours = alt.Scale(domain=domain, range=[VERDICT_COLOURS[name] for name in domain])
    return (
        alt.Chart(frame)
        .mark_point(filled=True, size=60)
        .encode(
            x=alt.X("memory:Q", title="memory of the device, GiB", scale=alt.Scale(type="log")),
            y=alt.Y("requests:Q", title="requests at once"),
            color=alt.Color("verdict:N", title=None, scale=colours),
            shape=alt.Shape("verdict:N", title=None, scale=alt.Scale(domain=domain)),
            tooltip=["device:N", "verdict:N", alt.Tooltip("memory:Q", format=".1f"), alt.Tooltip("requests:Q", format=",.1f")],
        )
        .properties(height=240, description="Requests at once of a server on each device, by the memory of the device")
    )

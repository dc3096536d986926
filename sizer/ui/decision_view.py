"""Decisions on the selected cell: what to change, how far it goes, on which GPU, on how many GPUs.

Each answer is shown while it grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from sizer.base.errors import RequestError, SizerError
from sizer.base.units import format_bytes
from sizer.catalogue.modes import MODES
from sizer.catalogue.serving import ENGINES
from sizer.query.request import Request
from sizer.query.text import format_query, parse_query
from sizer.report.decision import (
    BudgetReport,
    Cell,
    DeviceReport,
    DeviceRow,
    LeverReport,
    LeverRow,
    Limit,
    LimitReport,
    describe_fitting,
    saves,
)
from sizer.report.estimate import Estimate
from sizer.report.fit import VERDICTS
from sizer.ui import service, vega
from sizer.ui.charts import draw, finish
from sizer.ui.decision_tables import (
    device_points,
    offer,
    rerun_if_applied,
    show_budgets,
    show_ranks,
    show_served_devices,
    show_served_ranks,
)
from sizer.ui.exports import offer_download
from sizer.ui.known_batches import learn
from sizer.ui.links import LINK, LINK_COLUMN, frame_csv, link_of
from sizer.ui.question_words import file_stem
from sizer.ui.remarks import show_error
from sizer.ui.styling import GIBIBYTES, MARKS, Scale, format_verdict, round_figure, scale_for
from sizer.ui.turns import result_of
from sizer.ui.vega import Spec, quantitative

POLL_SECONDS = 0.5
SMALLEST_HEIGHT = 152  # pixels: three lines of text and the button below them
PRICE = "Price per hour"
EACH = "Per hour and sample"
ENDED = "decided"  # session state: the last answer that has ended


def show_decision(request: Request, estimate: Estimate, *, to_come: bool = False) -> None:
    """Show the decisions on the selected cell. Only the open one is computed.

    "What to change" is open if the work may not fit. Otherwise nothing is computed until the reader opens a decision. While the
    page is still filling, the decisions are `to_come`: their place is reserved, and nothing is computed.
    """
    cell = replace(request, dtypes=(estimate.dtype,), batches=(estimate.batch,), focus=None)
    client = service.get_client()
    answers: dict[str, tuple[Callable[[str], Any], Callable[..., None]]] = {
        "What to change": (client.submit_levers, _show_levers),
        "How far it goes": (client.submit_limits, _show_limits),
        "Which GPU?": (client.submit_devices, _show_devices),
    }
    if MODES[request.mode].trains:
        answers["On how many GPUs?"] = (client.submit_ranks, show_ranks)
        if _is_compiled(cell):
            answers["Compiled"] = (client.submit_budget, show_budgets)
    if to_come:
        st.segmented_control("What next?", list(answers), disabled=True, key="decision_to_come")
        return
    fits = estimate.fits is True
    asked = st.segmented_control(
        "What next?",
        list(answers),
        default=None if fits else next(iter(answers)),
        required=not fits,
        key="decision_where_it_fits" if fits else "decision",
        persist_state="session",
    )
    if asked is not None:
        submit, show = answers[asked]
        _follow(submit, cell, lambda found: show(found, request))


def show_served_decision(request: Request) -> None:
    """Show the decisions on a server: which GPU, and how many GPUs. Nothing is computed until the reader opens one."""
    client, engine = service.get_client(), ENGINES[request.engine]
    answers: dict[str, tuple[Callable[[str], Any], Callable[..., None]]] = {
        "Which GPU?": (client.submit_devices, show_served_devices)
    }
    if "tp" in engine.takes:
        answers["On how many GPUs?"] = (client.submit_ranks, show_served_ranks)
    asked = st.segmented_control("What next?", list(answers), key="decision_of_server", persist_state="session")
    if asked is not None:
        submit, show = answers[asked]
        _follow(submit, replace(request, focus=None), lambda found: show(found, request))


def _is_compiled(cell: Request) -> bool:
    """Return True if the question supports torch.compile."""
    try:
        parse_query(format_query(replace(cell, compile="default", budget=None, checkpointing=False)))
    except RequestError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Ended:
    """End of the answer called `name`: its error, if any, and `partial`, the result until then."""

    name: str
    error: SizerError | None = None
    partial: Any = None


def _follow(submit: Callable[[str], Any], cell: Request, show: Callable[[Any], None]) -> None:
    """Show an answer as it grows, in a fragment. A page that is closed or asks another question leaves the job.

    An answer that has ended with an error is asked again only on the reader's request.
    """
    query = format_query(cell)
    name = f"{submit.__name__} {query}"
    ended: _Ended | None = st.session_state.get(ENDED)
    if ended is None or ended.name != name:
        ended = None
    elif ended.error is not None:
        if ended.partial is not None:
            st.caption(f"{how_much(ended.partial)}: this is what was found.")
            show(ended.partial)
        show_error(ended.error)
        label = "Go on" if ended.partial is not None else "Try again"  # traces that are there are kept
        st.button(label, key="decide_again", on_click=lambda: st.session_state.pop(ENDED))
        return

    def run() -> None:
        rerun_if_applied()
        job = submit(query)
        try:
            found = result_of(job, 0.05)
        except SizerError as error:
            st.session_state[ENDED] = _Ended(name, error, job.partial)
            st.rerun()
        finally:
            job.leave()
        if found is not None and ended is None:
            st.session_state[ENDED] = _Ended(name)
            learn(found)
            st.rerun()  # the page again, without a clock for this answer
        # one line in either case, so that nothing below it moves at the end
        st.caption(how_much(found) if found is not None else job.progress or "waiting")
        shown = found if found is not None else job.partial
        if shown is not None:
            show(shown)

    st.fragment(run, run_every=POLL_SECONDS if ended is None else None)()


def how_much(found: Any) -> str:
    """Return the progress of an answer ("22 of 130 tried")."""
    if isinstance(found, BudgetReport):
        done = len(found.points)
    else:
        done = len(found.limits if isinstance(found, LimitReport) else found.rows)
    if isinstance(found, DeviceReport):  # devices have a row even if their largest batch is not known yet
        return f"{done:,} of {len({row.gpu for row in found.rows} | {*found.pending}):,} tried"
    return f"{done:,} of {done + len(found.pending):,} tried"


# ----------------------------------------------------------------------------------------------------------- what to change


def _show_levers(found: LeverReport, request: Request) -> None:
    """Show a row for each change, in an order that stays the same, so that no button moves under the mouse."""
    assert found.base is not None, "the work without changes is traced first"
    _show_smallest(found, request)
    for row in found.rows:
        _show_lever(row, found.base, request)
    for title in found.pending_titles:
        _show_pending(title)
    for text in found.useless:
        st.caption(text)


def _show_smallest(found: LeverReport, request: Request) -> None:
    """Show the smallest set of changes that makes the work fit, in a box of fixed height."""
    if found.base is not None and found.base.fits is True:
        return
    with st.container(horizontal=True, vertical_alignment="center", border=True, height=SMALLEST_HEIGHT):
        if found.smallest is not None:
            titles = {row.key: row.title for row in found.rows}
            changes = " and ".join(titles[key] for key in found.smallest.keys)
            process = format_bytes(found.smallest.cell.process_bytes)
            st.markdown(f"**To make it fit: {changes}.** The process then takes {process}. {found.search}", width="stretch")
            offer("Apply all", found.smallest.query, request, "apply_smallest")
        else:
            st.markdown(found.search or "Looking for the fewest changes that make it fit …", width="stretch")


def _lever_row() -> list[DeltaGenerator]:
    return st.columns([3, 1.3, 1.5, 4, 1.1, 1], vertical_alignment="center")


def _show_pending(title: str) -> None:
    """Show a pending row. It has the height of two lines, as most finished rows have, so that the rows below stay in place."""
    name, _, _, costs, _, _ = _lever_row()
    name.caption(f"{title} …")
    costs.caption("&nbsp;  \n&nbsp;")


def _show_lever(row: LeverRow, base: Cell, request: Request) -> None:
    title, saved, comes_to, costs, code, apply = _lever_row()
    if row.cell is None:
        title.caption(row.title)
        saved.caption("refused")
        costs.caption(row.reason)
        return
    useful = saves(row, base)
    (title.markdown if useful else title.caption)(f"**{row.title}**" if useful else row.title)
    scale = scale_for([base.process_bytes])  # of all rows
    comes_to.text(f"{MARKS[row.cell.verdict]} {scale.text(row.cell.process_bytes)}")
    if not useful:
        saved.caption("saves nothing")
        costs.caption(row.effect)
        return
    saved.text(scale.text(row.cell.process_bytes - base.process_bytes))
    costs.caption(f"{row.cost[0].upper()}{row.cost[1:]}. {row.effect}".strip())
    with code.popover("Code"):
        st.code(row.code, language=None, wrap_lines=True)  # no colours: those of numbers are too pale on grey
    with apply:
        offer("Apply", row.query, request, f"apply_{row.key}")


# -------------------------------------------------------------------------------------------------------------- how far


def _show_limits(found: LimitReport, request: Request) -> None:
    st.caption(
        "Each value is changed alone. The first number fits by its own trace; no value above the second can fit."
    )
    scale = scale_for(limit.cell.process_bytes for limit in found.limits if limit.cell)
    for limit in found.limits:
        _show_limit(limit, request, scale)


def _show_limit(limit: Limit, request: Request, scale: Scale) -> None:
    title, largest, comes_to, why, apply = st.columns([2, 2, 1.3, 4, 1], vertical_alignment="center")
    title.markdown(f"**{limit.title}**")
    largest.text(str(limit.interval))
    comes_to.text(scale.text(limit.cell.process_bytes) if limit.cell else "")
    why.caption(limit.reason)
    if limit.query:
        with apply:
            offer("Apply", limit.query, request, f"limit_{limit.key}")


# ------------------------------------------------------------------------------------------------------------- which GPU


def _show_devices(found: DeviceReport, request: Request) -> None:
    if not found.rows:
        return
    st.markdown(f"**{describe_fitting(found)}**")
    draw(devices_chart(found.rows), "devices_chart")
    frame = devices_frame(found.rows)
    edited_once_whole = () if found.pending else (PRICE,)  # prices belong to rows, and more rows may come
    edited = st.data_editor(
        frame,
        key="devices_table",
        hide_index=True,
        height=420,
        disabled=[name for name in frame.columns if name not in edited_once_whole],
        column_config={
            "Memory": st.column_config.NumberColumn(format="%.1f GiB"),
            "Process": st.column_config.NumberColumn(format="%.2f GiB"),
            "Left": st.column_config.NumberColumn(format="%.2f GiB"),
            LINK: LINK_COLUMN,
            PRICE: st.column_config.NumberColumn(
                min_value=0.0, help="Enter your price of a device per hour to compare. It is not sent anywhere."
            ),
        },
    )
    offer_download("CSV", lambda: frame_csv(frame.drop(columns=PRICE)), f"{file_stem(request)}-devices.csv", "text/csv")
    if found.changed:
        st.markdown(f"**{found.change[:1].upper()}{found.change[1:]}**, it fits these")
        st.dataframe(
            devices_frame(found.changed).drop(columns=[PRICE, "Largest batch"]),
            hide_index=True,
            column_config={LINK: LINK_COLUMN},
        )
    if any(row.tried for row in found.rows):
        st.caption("If batch sizes are traced one by one, the largest batch is the requested one: no other was tried.")
    costs = costs_of(edited)
    if text := cheapest(costs):
        st.text(text)
        st.dataframe(costs, hide_index=True, column_config={EACH: st.column_config.NumberColumn(format="%.4f")})


def devices_frame(rows: tuple[DeviceRow, ...]) -> pd.DataFrame:
    """Return the devices as a table, fitting ones first. Sizes are in GiB; the column of prices is empty."""
    verdicts = [*VERDICTS, None]
    rows = tuple(sorted(rows, key=lambda row: verdicts.index(row.cell.verdict if row.cell else None)))
    return pd.DataFrame(
        {
            "Device": [row.name for row in rows],
            "Verdict": [format_verdict(row.cell.verdict) if row.cell else row.reason for row in rows],
            "Memory": [GIBIBYTES.of(row.total_bytes) for row in rows],
            "Process": [GIBIBYTES.of(row.cell.process_bytes) if row.cell else None for row in rows],
            "Left": [round_figure(GIBIBYTES.of(row.total_bytes - row.cell.process_bytes)) if row.cell else None for row in rows],
            "Largest batch": pd.array([row.batch for row in rows], dtype="Int64"),
            LINK: [link_of(row.query) for row in rows],
            PRICE: pd.array([None] * len(rows), dtype="Float64"),
        }
    )


def costs_of(table: pd.DataFrame) -> pd.DataFrame:
    """Return the prices of the fitting devices, per hour and per sample of the largest batch, cheapest first."""
    priced = table[table[PRICE].notna() & table["Largest batch"].notna()]
    priced = priced[priced["Verdict"].str.startswith((MARKS["fits"], MARKS["tight"]))]
    costs = priced[["Device", "Largest batch", PRICE]].assign(
        **{EACH: priced[PRICE] / priced["Largest batch"].astype("Float64")}
    )
    return costs.sort_values([PRICE, EACH])


def cheapest(costs: pd.DataFrame) -> str:
    """Return a sentence with the cheapest device and the cheapest per sample; empty without prices."""
    if costs.empty:
        return ""
    least, best = costs.iloc[0], costs.loc[costs[EACH].idxmin()]
    return (
        f"The cheapest that fits: {least['Device']} at {least[PRICE]:,.2f} per hour. The least per hour and sample of a batch: "
        f"{best['Device']}, {best[EACH]:,.4f} at batch {best['Largest batch']:,}."
    )


def devices_chart(rows: tuple[DeviceRow, ...]) -> Spec:
    """Return a chart with a point for each device: free memory beside the process, over the device's memory."""
    found = [
        (row, row.cell.verdict, GIBIBYTES.of(row.total_bytes - row.cell.process_bytes)) for row in rows if row.cell is not None
    ]
    points = device_points(found, VERDICTS, quantitative("left", title="left beside the process, GiB"), ".2f")
    zero = vega.layer(vega.rows({"left": 0.0}), {"type": "rule", "strokeDash": [4, 4]}, y=quantitative("left"))
    return finish([points, zero], "Memory left on every device, in GiB")

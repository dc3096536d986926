"""Tables and charts of decisions: activation memory budgets, forms of parallelism, and servers on each device."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pandas as pd
import streamlit as st

from sizer.base.errors import SizerError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.query.request import Request
from sizer.query.text import format_query, parse_query
from sizer.query.values import DTYPES
from sizer.report.decision import (
    BudgetReport,
    DeviceReport,
    DeviceRow,
    RankReport,
    RankRow,
    describe_budgets,
    describe_fewest,
)
from sizer.report.fit import VERDICTS, Verdict
from sizer.report.served import ServedFigures
from sizer.serving.words import describe_served_devices, describe_served_ranks
from sizer.ui import links, service, vega
from sizer.ui.charts import draw, finish
from sizer.ui.exports import offer_download
from sizer.ui.links import LINK, LINK_COLUMN, frame_csv, link_of
from sizer.ui.question_words import file_stem
from sizer.ui.server_view import SIGNS, marked_server
from sizer.ui.styling import COLOURS, GIBIBYTES, INK, VERDICT_COLOURS, format_verdict
from sizer.ui.vega import Spec, nominal, ordinal, quantitative

DASHED = {"type": "rule", "strokeDash": [4, 4], "color": INK}
APPLIED = "applied"  # session state: a change was put into the form, and the page has not run since


def rerun_if_applied() -> None:
    """Rerun the whole page if a change was applied. A button in a fragment reruns only the fragment."""
    if st.session_state.pop(APPLIED, False):
        st.rerun()


def _apply(changed: str, request: Request) -> None:
    """Fill the form with a changed question of one cell. The form keeps its other dtypes and batch sizes."""
    asked = parse_query(changed)
    (dtype,), (batch,) = asked.dtypes, asked.batches
    dtypes = tuple(one for one in DTYPES if one in (*request.dtypes, dtype))
    batches = tuple(sorted({*request.batches, batch}))
    whole = replace(asked, dtypes=dtypes, batches=batches, focus=(dtype, batch))
    st.session_state[APPLIED] = True
    links.replace_question(format_query(whole))


def offer(label: str, changed: str, request: Request, key: str) -> None:
    """Show a button that fills the form with a changed question."""
    st.button(label, key=key, on_click=_apply, args=(changed, request), type="tertiary", icon=":material/check:")


# ----------------------------------------------------------------------------------------------------- decision tables


def show_budgets(found: BudgetReport, request: Request) -> None:
    """Show a chart and a table of the peak at each budget, with the recomputed share of the forward pass."""
    if budgets := describe_budgets(found):
        st.markdown(f"**{budgets}**")
    if any(point.peak_allocated_bytes is not None for point in found.points):
        draw(budgets_chart(found), "budgets_chart")
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
    """Return a row for each traced step; sizes are in GiB."""
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


def budgets_chart(found: BudgetReport) -> Spec:
    """Return the chart of the allocated peak over the budget, with rules at the peaks of eager code and checkpointing."""
    points = [
        {"budget": point.budget, "peak": GIBIBYTES.of(point.peak_allocated_bytes)}
        for point in found.points
        if point.peak_allocated_bytes is not None
    ]
    colour = COLOURS["activation"]
    line = vega.layer(
        vega.rows(*points),
        {"type": "line", "point": {"color": colour}, "color": colour},
        x=quantitative("budget", title="activation memory budget", scale={"domain": [0, 1]}),
        y=quantitative("peak", title="peak allocated, GiB", scale={"zero": False}),
        tooltip=[quantitative("budget"), quantitative("peak", format=".2f")],
    )
    cells = {"eager": found.eager, "checkpointing": found.checkpointing}
    rows = [
        {"step": name, "peak": GIBIBYTES.of(cell.peak_allocated_bytes)} for name, cell in cells.items() if cell is not None
    ]
    data = vega.rows(*rows)
    rule = vega.layer(data, DASHED, y=quantitative("peak"))
    text = {"type": "text", "align": "left", "dx": 4, "dy": -6, "color": INK}
    label = vega.layer(data, text, x={"value": 0}, y=quantitative("peak"), text=nominal("step"))
    return finish([line, rule, label], "Peak of allocated memory by budget, in GiB")


# --------------------------------------------------------------------------------------------------------- several GPUs


# Okabe and Ito's colours, as for the categories, in the order of the forms of parallelism.
WAY_COLOURS = ("#7D8792", "#D55E00", "#E69F00", "#0072B2", "#CC79A7", "#009E73", "#56B4E9", "#F0E442")


def show_ranks(found: RankReport, request: Request) -> None:
    """Show the process of each GPU by the number of GPUs, and the smallest number that fits."""
    if not found.rows:
        return
    for line in describe_fewest(found):
        st.text(line)
    for row in found.rows:
        if row.searched and row.cell is not None and row.cell.fits is True and row.gpus > 1:
            offer(f"Ask for {row.words} on {row.gpus} GPUs", row.query, request, f"ranks_{row.words}_{row.gpus}")
    _offer_scripts(found, request)
    draw(ranks_chart(found.rows, find_gpu(request.gpu).total_bytes), "ranks_chart")
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
    """Offer scripts for the smallest number of GPUs that fits, and for the number in the question."""
    asked = {f"{row.words} on {row.gpus} GPUs": row.query for row in found.rows if row.gpus > 1 and row.searched}
    if request.parallel != "none":
        asked = {"this question": format_query(request)} | asked
    with st.container(horizontal=True):
        for title, query in asked.items():
            make = functools.partial(_script, query)
            offer_download(f"torchrun script: {title}", make, f"{file_stem(parse_query(query))}.py", "text/x-python")


def _script(query: str) -> str:
    """Return the script, or the reason why there is none as a comment."""
    try:
        return service.get_client().submit_script(query).result()
    except SizerError as error:
        return f"# There is no script: {error}\n"


def ranks_frame(rows: tuple[RankRow, ...]) -> pd.DataFrame:
    """Return the rows as a table, fitting rows first: sizes in GiB, and the two largest categories at the peak."""
    verdicts = [*VERDICTS, None]
    rows = tuple(sorted(rows, key=lambda row: verdicts.index(row.cell.verdict if row.cell else None)))
    return pd.DataFrame(
        {
            "GPUs": [row.gpus for row in rows],
            "By": [row.words for row in rows],
            "Verdict": [format_verdict(row.cell.verdict) if row.cell else row.reason for row in rows],
            "Process": [GIBIBYTES.of(row.cell.process_bytes) if row.cell else None for row in rows],
            "Allocated": [GIBIBYTES.of(row.cell.peak_allocated_bytes) if row.cell else None for row in rows],
            "Most of it": [
                ", ".join(f"{kind} {GIBIBYTES.text(size)}" for kind, size in list(row.at_peak.items())[:2])
                for row in rows
            ],
            "Between the GPUs in a step": [
                ", ".join(f"{sent.kind} {GIBIBYTES.text(sent.bytes)}" for sent in row.communication) for row in rows
            ],
            LINK: [link_of(row.query) for row in rows],
        }
    )


def ranks_chart(rows: tuple[RankRow, ...], total_bytes: int) -> Spec:
    """Return a line for each form of parallelism: the process of each GPU by the number of GPUs, and a GPU's memory."""
    values = [
        {
            "gpus": row.gpus,
            "by": row.title,
            "process": GIBIBYTES.of(row.cell.process_bytes),
            "verdict": row.cell.verdict,
        }
        for row in rows
        if row.cell is not None and not row.change
    ]
    data = vega.rows(*values)
    titles = [*dict.fromkeys(row.title for row in rows)]
    colours = {"domain": titles, "range": WAY_COLOURS[: len(titles)]}
    encoding = {
        "x": ordinal("gpus", title="GPUs", axis={"labelAngle": 0}),
        "y": quantitative("process", title="process of each GPU, GiB"),
        "color": nominal("by", title=None, scale=colours),
        "tooltip": [
            nominal("by"),
            ordinal("gpus"),
            quantitative("process", title="GiB", format=".2f"),
            nominal("verdict"),
        ],
    }
    shape = nominal("by", title=None, scale={"domain": titles})
    layers = [
        vega.layer(data, "line", **encoding),
        vega.layer(data, {"type": "point", "filled": True, "size": 60}, **encoding, shape=shape),
        vega.layer(vega.rows({"process": GIBIBYTES.of(total_bytes)}), DASHED, y=quantitative("process")),
    ]
    return finish(layers, "Process of each GPU by the number of GPUs, in GiB")


# -------------------------------------------------------------------------------------------------------------- servers


SIZES = ("Memory", "Weights", "KV cache")
REQUESTS = "Requests at once"


def show_served_devices(found: DeviceReport, request: Request) -> None:
    """Show the server's verdict and requests on each device."""
    if not found.rows:
        return
    st.markdown(f"**{describe_served_devices(found)}**")
    if any(row.serve is not None for row in found.rows):
        draw(served_devices_chart(found.rows), "served_devices_chart")
    memory = [GIBIBYTES.of(row.total_bytes) for row in found.rows]
    frame = _frame({"Device": [row.name for row in found.rows], "Memory": memory}, found.rows)
    _show_table(frame, "served_devices_table")
    offer_download("CSV", lambda: frame_csv(frame), f"{file_stem(request)}-devices.csv", "text/csv")


def show_served_ranks(found: RankReport, request: Request) -> None:
    """Show the server's verdict and requests by number of GPUs and split."""
    if not found.rows:
        return
    for line in describe_served_ranks(found):
        st.text(line.strip())
    frame = _frame({"GPUs": [row.gpus for row in found.rows], "By": [row.title for row in found.rows]}, found.rows)
    _show_table(frame, "served_ranks_table")
    offer_download("CSV", lambda: frame_csv(frame), f"{file_stem(request)}-gpus.csv", "text/csv")
    st.caption("Requests are those of all GPUs; tokens those of one copy, weights and cache those of one GPU.")


def _frame(first: dict[str, list], rows: Sequence[DeviceRow] | Sequence[RankRow]) -> pd.DataFrame:
    """Return rows as a table in their order; sizes are in GiB."""
    figures = [row.serve for row in rows]
    verdicts = [marked_server(row.serve) if row.serve else row.reason for row in rows]

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


def served_devices_chart(rows: Sequence[DeviceRow]) -> Spec:
    """Return a chart with a point for each device: requests at once over its memory."""
    found = [(row, SIGNS[row.serve.fits], row.serve.requests_at_once) for row in rows if row.serve is not None]
    points = device_points(found, SIGNS.values(), quantitative("requests", title="requests at once"), ",.1f")
    described = "Requests at once of a server on each device, by the memory of the device"
    return vega.layered([points], described, height=240)


def device_points(
    rows: Iterable[tuple[DeviceRow, Verdict, float]], verdicts: Iterable[Verdict], upwards: Spec, number: str
) -> Spec:
    """Return a chart with a point for each device over its memory, in the colour and shape of its verdict.

    Args:
        rows: Devices with their verdicts and figures.
        verdicts: All verdicts of the legend.
        upwards: The encoding of the vertical axis.
        number: The format of a figure.
    """
    values = [
        {
            "device": row.name,
            "memory": GIBIBYTES.of(row.total_bytes),
            "verdict": verdict,
            upwards["field"]: figure,
        }
        for row, verdict, figure in rows
    ]
    colours = vega.scale_of({verdict: VERDICT_COLOURS[verdict] for verdict in verdicts})
    shown = [quantitative("memory", format=".1f"), quantitative(upwards["field"], format=number)]
    return vega.layer(
        vega.rows(*values),
        {"type": "point", "filled": True, "size": 60},
        x=quantitative("memory", title="memory of the device, GiB", scale={"type": "log"}),
        y=upwards,
        color=nominal("verdict", title=None, scale=colours),
        shape=nominal("verdict", title=None, scale={"domain": colours["domain"]}),
        tooltip=[nominal("device"), nominal("verdict"), *shown],
    )

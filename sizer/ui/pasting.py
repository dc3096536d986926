"""The box "Paste what you have": a training config becomes a question, a message a diagnosis, a memory snapshot a curve."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from sizer.base.errors import ConfigError, RequestError, SizerError
from sizer.base.units import format_bytes, pluralize
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import MODES, TASKS, task_of
from sizer.catalogue.sources import SOURCES
from sizer.pasted.out_of_memory import Diagnosis, is_message, read_message
from sizer.pasted.plain_text import MAX_BYTES
from sizer.pasted.question import Question
from sizer.pasted.reading import read_question
from sizer.pasted.snapshot import SnapshotReport
from sizer.query.text import join_query, parse_query, split_query
from sizer.report.estimate import Estimate
from sizer.report.report import Report
from sizer.serving.launch import with_command
from sizer.serving.startup import MAX_CHARACTERS, StartupLog, compare, is_startup, read_startup, refitted
from sizer.ui import defaults, links, service, vega
from sizer.ui.charts import draw, finish
from sizer.ui.remarks import show_error, show_lines
from sizer.ui.styling import COLOURS, INK, scale_for
from sizer.ui.turns import result_of
from sizer.ui.vega import Columns, Spec, nominal, quantitative

TEXT, FILE = "pasted_text", "pasted_file"  # keys of the widgets
FOUND = "pasted"  # session state: the result, or the error
SNAPSHOT = "pasted_snapshot"  # session state: the bytes of a snapshot that is not read yet
PICKLES = (".pickle", ".pkl")
MAX_LOG_BYTES = MAX_CHARACTERS
CURVES = {"allocated": COLOURS["parameter"], "reserved": COLOURS["activation"]}  # of a snapshot
TITLES = dict.fromkeys((ConfigError, RequestError), "No question was found in this text")
ACCEPTED = (
    'A question in words, such as "can I run Qwen3 32B on a 3090?"; a training config of Axolotl, LLaMA-Factory, TRL, torchtune, '
    "torchtitan, DeepSpeed or accelerate; a command or Python code with arguments of a Trainer, of ms-swift, of diffusers' "
    "training scripts or kohya's, or these as JSON; the log, error or command of a server (vLLM, SGLang, llama.cpp), or the "
    "command of Ollama; code of diffusers, transformers, torchvision, timm or vLLM; an out-of-memory message; a model's "
    "config.json or name; or a file with a memory snapshot of PyTorch."
)


def offer_box() -> None:
    """Show the box. Call `show_found` for the result."""
    with st.expander("Paste what you have, or ask in words", icon=":material/content_paste:"):
        st.caption(ACCEPTED)
        st.text_area("Question, config, command, code, log or message", key=TEXT, height=160, on_change=_take_text)
        types = ["yaml", "yml", "toml", "json", "txt", "log", "py", "sh", "pickle", "pkl"]
        st.file_uploader("or a file", type=types, key=FILE, on_change=_take_file)


def _take_text() -> None:
    _take(st.session_state[TEXT])


def _take_file() -> None:
    st.session_state.pop(SNAPSHOT, None)
    if (upload := st.session_state[FILE]) is None:
        st.session_state.pop(FOUND, None)
        return
    data = upload.getvalue()
    if upload.name.lower().endswith(PICKLES):
        st.session_state.pop(FOUND, None)
        st.session_state[SNAPSHOT] = data
        return
    log = data[: MAX_LOG_BYTES + 1].decode("utf-8-sig", "replace")
    try:
        _take(log if is_startup(log) else data[: MAX_BYTES + 1].decode("utf-8-sig"))
    except UnicodeDecodeError:
        st.session_state[FOUND] = ConfigError("this file is no text", given="bytes that are not UTF-8")


def _take(text: str) -> None:
    """Read a text. Ask its question if it is a config or a server's log."""
    st.session_state.pop(FOUND, None)
    if not text.strip():
        return
    try:
        if is_startup(text):
            log = with_command(read_startup(text), text)
            st.session_state[FOUND] = log
            links.replace_question(join_query(address_of_server(log, st.query_params.to_dict())))
            return
        if is_message(text):
            st.session_state[FOUND] = read_message(text)
            return
        question = read_question(text, st.query_params.get("gpu"))
    except SizerError as error:
        st.session_state[FOUND] = error
        return
    st.session_state[FOUND] = question
    links.replace_question(join_query(address_of(question, st.query_params.to_dict())))


def address_of(question: Question, now: dict[str, str]) -> dict[str, str]:
    """Return the address of a question: on the current device, and for the current model if the config names none."""
    kept: dict[str, str] = {key: now[key] for key in ("gpu", "torch") if key in now}
    if "arch" not in question.items:
        kept["arch"] = now.get("arch", links.DEFAULT_ARCH.partition("=")[2])
        kept |= {key: now[key] for key in ("seq", "image", "head") if key in now and key not in question.items}
    items = kept | question.items
    first = {"arch": items.pop("arch")}
    return _with_sizes(first | items)


def _with_sizes(items: dict[str, str]) -> dict[str, str]:
    """Return a question with the page's dtypes and batch sizes for the model and the task, where it names none."""
    try:
        request = parse_query(join_query(items))
        source = SOURCES[request.source]
        if MODES[request.mode].serves or source.trace is not None or request.objective != "lm":
            return items
        sizes = defaults.sizes_for(source, request.name or "", find_gpu(request.gpu), TASKS[task_of(request.mode, request.train)])
        filled = {"dtype": ",".join(sizes.dtypes), "batch": ",".join(map(str, sizes.batches))} | items
        parse_query(join_query(filled))
    except RequestError:  # the page shows what is refused, or further keys decide the sizes
        return items
    return {"arch": filled.pop("arch")} | filled


def address_of_server(log: StartupLog, now: dict[str, str]) -> dict[str, str]:
    """Return the address of a server with a log's flags and model, on the log's device if it names one."""
    arch = log.arch or now.get("arch", links.DEFAULT_ARCH.partition("=")[2])
    read = split_query(log.query())
    gpu = log.gpu or now.get("gpu")
    return {"arch": arch} | ({} if gpu is None else {"gpu": gpu}) | read


def show_found(report: Report | None) -> None:
    """Show the result of the box. `report` is the answer on the page."""
    if SNAPSHOT in st.session_state:
        _read_snapshot()
    found = st.session_state.get(FOUND)
    if found is None:
        return
    cell = None if report is None else report.focus
    focus = None if report is None or cell is None else report.find(cell.dtype, cell.batch)
    with st.container(border=True, key="pasted_found"):
        if isinstance(found, SizerError):
            show_error(found, TITLES)
        elif isinstance(found, Question):
            _show_question(found)
        elif isinstance(found, StartupLog):
            _show_startup(found, report)
        elif isinstance(found, Diagnosis):
            _show_diagnosis(found, focus, report)
        elif isinstance(found, SnapshotReport):
            _show_snapshot(found, focus)
        st.button("Close", key="pasted_close", type="tertiary", icon=":material/close:", on_click=_close)


def _close() -> None:
    st.session_state.pop(FOUND, None)


def _show_question(found: Question) -> None:
    named = found.title if found.kind in ("model", "code", "words") else f"a {found.kind} of {found.title}"
    st.markdown(f"**Read as {named}**")
    if found.kind == "words":
        show_lines(found.unmatched)
    counts = f"{pluralize(len(found.read), 'line')} read, {len(found.assumed)} assumed, {len(found.unmatched)} not counted"
    with st.expander(counts):
        for title, rows in (
            ("Read", [f"{line.given} → {line.means}" for line in found.read]),
            ("Assumed", found.assumed),
            ("Without a counterpart, not counted", found.unmatched),
        ):
            if rows:
                st.markdown(f"**{title}**")
                show_lines(rows)
        if found.irrelevant:
            st.caption(f"{pluralize(found.irrelevant, 'line')} more change no memory.")


def _show_startup(found: StartupLog, report: Report | None) -> None:
    """Show the figures of a server's log and the plan's differences, line by line, while the page plans a server."""
    st.markdown(f"**Read as a startup log of {found.title}**")
    if found.failure:
        st.text(f"The error: {found.failure}.")
    if found.arch is None:
        st.text("The log names no repository: the model of the form is kept.")
    if found.gpu is None:
        chosen = "the device is that of the form" if "gpu" in st.query_params else "choose it in the form to compare the cache"
        st.caption(f"The log does not name its device: {chosen}.")
    show_lines(found.remarks())
    if report is not None and report.serve is not None and report.serve.engine == found.engine:
        on_device = found.gpu is not None or "gpu" in st.query_params
        show_lines(compare(found, report.serve, on_device=on_device))
        constants = refitted(found, report.serve) if on_device and _asks(report.query, found) else {}
        if constants:
            st.button(
                f"Use this machine's own constants: {', '.join(f'{key} {value}' for key, value in constants.items())}",
                key="pasted_refit",
                on_click=lambda: links.replace_question(join_query(st.query_params.to_dict() | constants)),
            )


def _asks(query: str, log: StartupLog) -> bool:
    """Return True if a question is the question of a log, for its model and device."""
    address = address_of_server(log, split_query(query))
    try:
        return parse_query(query) == parse_query(join_query(address))
    except RequestError:  # such as a version without rules
        return False


def _show_diagnosis(found: Diagnosis, focus: Estimate | None, report: Report | None) -> None:
    st.markdown("**What the message says**")
    show_lines(found.lines())
    if focus is None or report is None:
        return
    st.markdown("**What the estimate of this question says**")
    allocated, reserved = format_bytes(focus.peak_allocated_bytes), format_bytes(focus.peak_reserved_bytes)
    total = format_bytes(report.gpu.total_bytes)
    show_lines(
        [
            f"{focus.dtype} at batch {focus.batch} allocates {allocated} at its peak and reserves {reserved}.",
            f"The process takes {format_bytes(focus.process_bytes)}; the {report.gpu.name} has {total}: {focus.verdict}.",
        ]
    )


def _read_snapshot() -> None:
    """Read the snapshot in a confined job, and show its progress."""
    line = st.empty()
    try:
        job = service.get_client().submit_pasted_snapshot(st.session_state[SNAPSHOT])
        with service.hold_jobs(job):
            while (found := result_of(job, service.POLL_SECONDS)) is None:
                line.text(job.progress or "waiting")
        st.session_state[FOUND] = found
    except SizerError as error:
        st.session_state[FOUND] = error
    st.session_state.pop(SNAPSHOT, None)
    line.empty()


def _show_snapshot(found: SnapshotReport, focus: Estimate | None) -> None:
    st.markdown(f"**Memory snapshot**, device {found.device}, {pluralize(found.events, 'event')}")
    draw(snapshot_chart(found, focus), "snapshot_chart")
    st.dataframe(snapshot_frame(found, focus), hide_index=True)
    if found.out_of_memory:
        st.text(f"{pluralize(found.out_of_memory, 'request')} failed for lack of memory.")
    if found.largest:
        st.markdown("**Largest blocks at the end**")
        show_lines(f"{format_bytes(size)}  {line or 'no Python line was recorded'}" for size, line in found.largest[:10])


def snapshot_frame(found: SnapshotReport, focus: Estimate | None) -> pd.DataFrame:
    """Return the peaks of a snapshot and of the selected estimate, as texts."""
    rows = {"peak allocated": found.peak_allocated_bytes, "peak reserved": found.peak_reserved_bytes}
    frame = {"Figure": [*rows], "Snapshot": [format_bytes(size) for size in rows.values()]}
    if focus is not None:
        estimated = (focus.peak_allocated_bytes, focus.peak_reserved_bytes)
        frame["Estimate of this question"] = [format_bytes(size) for size in estimated]
        frame["Estimate against snapshot"] = [
            f"{estimate / size - 1:+z.1%}" if size else "" for estimate, size in zip(estimated, rows.values(), strict=True)
        ]
    return pd.DataFrame(frame)


def snapshot_chart(found: SnapshotReport, focus: Estimate | None) -> Spec:
    """Return the curves of a snapshot over its events, with the estimate's allocated peak as a dashed line."""
    scale = scale_for([found.peak_reserved_bytes, focus.peak_allocated_bytes if focus else 0])
    kinds = {"allocated": found.allocated_bytes, "reserved": found.reserved_bytes}
    columns: Columns = {
        "event": [place for _ in kinds for place in found.positions],
        "size": [scale.of(size) for sizes in kinds.values() for size in sizes],
        "kind": [kind for kind in kinds for _ in found.positions],
    }
    curves = vega.layer(
        vega.table(columns),
        {"type": "line", "interpolate": "step-after"},
        x=quantitative("event", title="events of the allocator, in order"),
        y=quantitative("size", title=scale.name),
        color=nominal("kind", title=None, scale=vega.scale_of(CURVES)),
        tooltip=[nominal("kind"), quantitative("size", title=scale.name, format=".2f")],
    )
    layers = [curves]
    if focus is not None:
        data = vega.rows({"size": scale.of(focus.peak_allocated_bytes), "what": "the estimate's allocated peak"})
        rule = {"type": "rule", "color": INK, "strokeDash": [6, 3]}
        layers.append(vega.layer(data, rule, y=quantitative("size"), tooltip=[nominal("what")]))
    return finish(layers, f"Allocated and reserved memory of a snapshot, in {scale.name}")

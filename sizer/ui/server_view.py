"""The task Serve: fields of the form, and the answer. The figures come from sizer.report.served."""

from __future__ import annotations

from collections.abc import Iterator

import streamlit as st

from sizer.base.units import GIB, pluralize
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.serving import APIS, ENGINES, SAMPLERS, SWITCHES
from sizer.catalogue.sources import Source
from sizer.query.keys import KEYS
from sizer.query.request import Request
from sizer.query.text import format_query, join_query, parse_query, split_query
from sizer.report.fit import Verdict
from sizer.report.report import Report
from sizer.report.served import Served, ServedFigures, Starts
from sizer.serving.words import gib, graphs_line, range_line, verdict_words, want_line
from sizer.ui import links, vega
from sizer.ui.charts import draw
from sizer.ui.focus import title_formatter
from sizer.ui.form_model import KEEP
from sizer.ui.frame import show_tabs
from sizer.ui.links import offer_text, show_link
from sizer.ui.remarks import show_remarks, show_uncounted
from sizer.ui.styling import GIBIBYTES, MARKS
from sizer.ui.vega import Spec, nominal, quantitative

PREFIX = "serve_"  # of the keys of the form's widgets
COMMAND = "server_command"  # key of the container of the command
BADGES = {True: "green", "uncertain": "orange", False: "red"}  # Streamlit's names
SIGNS: dict[Starts, Verdict] = {True: "fits", "uncertain": "may not fit", False: "does not fit"}  # the marks of other work
PROFILE, COMPUTE = "profile run", "compute buffer"
BAR = {
    "weights": "#0B63A8",
    "LoRA adapters": "#66A9D9",
    "draft": "#C51B7D",
    **dict.fromkeys((PROFILE, COMPUTE), "#E08214"),
    "outside PyTorch": "#7F7F7F",
    "CUDA graphs": "#8073AC",
    "KV cache": "#1B9E77",
}
# Label, help and placeholder by key of the query: the first questions, then flags.
FIRST = {
    "want_requests": ("Requests", "Number of requests that the server must hold at once.", "as many as fit"),
    "want_tokens": ("Tokens each", "Prompt and answer together; 8k is 8,192.", "longest allowed"),
}
FLAGS = {
    "max_model_len": ("Longest request", "Tokens; auto is the longest that fits.", "the config's"),
    "util": ("Share of the memory", "gpu_memory_utilization, or SGLang's mem_fraction_static.", "the server's own"),
    "max_num_seqs": ("Requests in a step", "max_num_seqs, SGLang's max_running_requests, llama.cpp's -np.", "the server's own"),
    "max_num_batched_tokens": (
        "Tokens in a step",
        "max_num_batched_tokens, SGLang's chunked_prefill_size, llama.cpp's -ub.",
        "the server's own",
    ),
    "engine_version": ("Version", "Version of the server, such as 0.11.2 or llama.cpp's b9467.", "the newest known"),
    "used": ("Memory in use", "Device memory that other programs hold, such as 2GiB.", "nothing"),
    "outside": ("Memory outside of PyTorch", "Measured from a log of your machine, such as 0.5GiB.", "fitted"),
    "graphs": ("Memory of CUDA graphs", "Measured from a log of your machine, such as 1.2GiB.", "fitted"),
    "max_loras": ("LoRA adapters at once", "max_loras: number of slots for adapters.", "none"),
    "max_lora_rank": ("Largest rank of an adapter", "max_lora_rank, such as 16 or 64.", "none"),
    "speculative": (
        "Speculative decoding",
        "Method, head or draft model, and drafted tokens: eagle3:3, mtp:1, ngram:5; or a draft's config.json and :3.",
        "none",
    ),
    "pool": ("Flags of the pool", "SGLang's, such as swa_full_tokens_ratio:0.5,max_total_tokens:32768.", "the server's own"),
    "cpu_offload_gb": ("Weights on the host", "cpu_offload_gb: GiB of each GPU's weights, such as 8.", "none"),
    "gpu_layers": ("Layers on the device", "-ngl: counted from the last layer; the head is one.", "all"),
    "cpu_moe": ("Layers with experts on the host", "--n-cpu-moe: counted from the first layer.", "none"),
    "kv_bytes": ("Bytes of the cache", "KV cache size without a profile run, such as 8GiB.", "from the profile run"),
}
SWITCHED = {"enforce_eager": "Without CUDA graphs", "ep": "Expert parallel", "fully_sharded_loras": "Fully sharded adapters"}
RANKS_IN_A_ROW = 2  # labels of more columns wrap within the sidebar
RANKS = {
    "tp": ("Tensor parallel", "Number of GPUs that split each matrix.", "1"),
    "pp": ("Pipeline parallel", "Number of GPUs that split the layers.", "1"),
    "dp": ("Data parallel", "Number of copies of the attention layers.", "1"),
    "attn_dp": ("Attention's data parallel", "Groups of tensor-parallel GPUs whose attention has requests of its own.", "1"),
    "dcp": ("Context parallel", "Number of tensor-parallel GPUs that share a request's tokens while decoding.", "1"),
}


def fill(request: Request) -> None:
    """Set the server's fields to a request's values. Call it before `ask`."""
    texts = split_query(format_query(request))
    state = st.session_state
    for key in (*FLAGS, *RANKS):
        state[PREFIX + key] = texts.get(key, "")
    requests, _, tokens = texts.get("want", "").partition("x")
    state[f"{PREFIX}want_requests"], state[f"{PREFIX}want_tokens"] = requests, tokens
    engine = ENGINES[request.engine]
    state[f"{PREFIX}engine"], state[f"{PREFIX}kv"] = request.engine, request.kv if request.kv in engine.kv else "auto"
    layouts = ("checkpoint", "full", *engine.layouts)
    asked = request.server_weights or request.weights
    state[f"{PREFIX}weights"] = asked if asked in layouts else "checkpoint"
    state[f"{PREFIX}api"], state[f"{PREFIX}sampler"] = request.api, request.sampler
    state[f"{PREFIX}prefix_caching"] = request.prefix_caching
    state[f"{PREFIX}fa"] = request.fa
    for key in SWITCHED:
        state[PREFIX + key] = getattr(request, key)


def ask(source: Source, gpu: str) -> dict[str, str]:
    """Show the server's fields and return their values by key: requests and context, engine and GPUs, then flags."""
    values: dict[str, str] = {"mode": "serve"}
    left, right = st.columns(2, vertical_alignment="bottom")
    requests, tokens = (_text(column, key, FIRST) for column, key in zip((left, right), FIRST, strict=True))
    if requests or tokens:
        values["want"] = f"{requests or 1}x{tokens or '1k'}"
    titles = {key: row.title for key, row in ENGINES.items()}
    engine = st.segmented_control(
        "Engine", list(titles), format_func=title_formatter(titles), key=f"{PREFIX}engine", required=True, width="stretch", **KEEP
    )
    takes = ("max_model_len", "used", *ENGINES[engine].takes)
    values |= {"engine": engine, "gpu": gpu}
    shown = [key for key in RANKS if key in takes and key not in source.refuses]
    for first in range(0, len(shown), RANKS_IN_A_ROW):
        columns = st.columns(RANKS_IN_A_ROW, vertical_alignment="bottom")
        for key, column in zip(shown[first:], columns, strict=False):
            values[key] = _text(column, key, RANKS)
    if "weights" in takes:
        layouts = ("checkpoint", "full", *ENGINES[engine].layouts)
        values["weights"] = st.selectbox("Weights", layouts, key=f"{PREFIX}weights", **KEEP)
    with st.expander("Flags of the server"):
        for key in FLAGS:
            if key in takes:
                values[key] = _text(st, key, FLAGS)
        for key, label, options in (
            ("kv", "KV cache", ENGINES[engine].kv),
            ("api", "Started as", APIS),
            ("sampler", "Sampler", SAMPLERS),
            ("prefix_caching", "Prefix caching", SWITCHES),
            ("fa", "Flash attention", SWITCHES),
        ):
            if key in takes:
                values[key] = st.selectbox(label, options, key=f"{PREFIX}{key}", help=KEYS[key].allowed, **KEEP)
        for key, label in SWITCHED.items():
            if key in takes and not (key == "fully_sharded_loras" and not (values["max_loras"] or values["max_lora_rank"])):
                values[key] = "01"[st.toggle(label, key=f"{PREFIX}{key}", help=KEYS[key].allowed, **KEEP)]
    return values


def _text(place, key: str, rows: dict[str, tuple[str, str, str]]) -> str:
    label, help_text, placeholder = rows[key]
    return place.text_input(label, key=PREFIX + key, placeholder=placeholder, help=help_text, **KEEP).strip()


def facts(request: Request) -> Iterator[str]:
    """Yield the facts of a server for the one-line question."""
    yield ENGINES[request.engine].title + (f" {request.engine_version}" if request.engine_version else "")
    if request.want is not None:
        yield f"{pluralize(request.want[0], 'request')} of {request.want[1]:,} tokens"
    if request.max_model_len is not None:
        length = request.max_model_len
        yield f"up to {f'{length:,} tokens' if isinstance(length, int) else 'what fits'}"
    if (layout := request.server_weights or request.weights) != "checkpoint":
        yield f"weights {layout}"
    words = {"tp": "tensor", "pp": "pipeline", "dp": "data", "dcp": "decode context", "attn_dp": "attention data"}
    for key, word in words.items():
        if (ranks := getattr(request, key)) > 1:
            yield f"{word} parallel {ranks}"


def show(request: Request, report: Report, served: Served) -> None:
    """Show a server's answer: requests at once, tokens, the bar of the budget, and the command."""
    length = served.flags.get("max_model_len")
    card = f"{served.gpus} × {report.gpu.name}" if served.gpus > 1 else f"one {report.gpu.name}"
    at_once = f"{served.requests_at_once:,.1f} requests of {length:,} tokens"
    for row in served.contexts:
        if served.want is not None and row.context == served.want.tokens:
            at_once = f"{pluralize(row.requests, 'request')} of {row.context:,} tokens"
    answer = f"{at_once} at once on {card}"
    if served.starts is False:
        answer = f"A server for {length:,} tokens a request does not start on {card}"
    st.title(answer, anchor=False)
    st.badge(f"{marked_server(served)} · {served.kv_tokens:,} KV tokens", color=BADGES[served.fits])
    if served.want is not None:
        st.markdown(f"**{want_line(served.want)}**")
    if served.message:
        with st.container(border=True):
            st.caption("The server's message")
            st.text(served.message)
    draw(budget_chart(served), "budget_chart")
    with st.container(horizontal=True, gap="medium"):
        _metric("Budget", served.budget_bytes)
        _metric("Weights", served.weights_bytes)
        if served.offloaded_bytes:
            _metric("Weights on the host", served.offloaded_bytes)
        if served.lora_bytes:
            _metric("LoRA adapters", served.lora_bytes)
        if served.draft_bytes:
            _metric("Draft", served.draft_bytes)
        if served.profile_peak_bytes:
            _metric((COMPUTE if served.engine == "llama.cpp" else PROFILE).capitalize(), served.profile_peak_bytes)
        _metric("KV cache", served.kv_cache_bytes)
    st.caption(graphs_line(served))
    st.caption(range_line(served))
    _show_command(served.command)
    show_uncounted(report)


def _show_command(command: str) -> None:
    """Show the command that starts the server; a click selects all of it.

    `st.code` loads the highlighter of all languages, which holds a browser up for 0.7 s before it draws the answer (1.67).
    """
    with st.container(border=True, key=COMMAND):
        st.html(f"<style>.st-key-{COMMAND} [data-testid=stText] {{ font-family: monospace; user-select: all }}</style>")
        st.text(command)
        with st.container(horizontal=True, vertical_alignment="center"):
            refused = "The browser refused: a click selects the command."
            offer_text("Copy the command", "copy_command", command, ":material/content_copy:", refused)


def marked_server(served: Served | ServedFigures) -> str:
    """Return the verdict of a server, with its mark."""
    return f"{MARKS[SIGNS[served.fits]]} {verdict_words(served)}"


def show_details(request: Request, report: Report, served: Served) -> None:
    """Show the tabs below a server's answer. Only the open tab is drawn."""
    show_tabs(
        {
            "Contexts": lambda: _show_contexts(served),
            "What to change": lambda: _show_levers(request, served),
            "Flags": lambda: _show_flags(served),
            "Not counted": lambda: show_remarks(report),
            "Link and command": lambda: show_link(request),
        },
        key="details_of_server",
        default="Contexts" if served.starts is not False else "What to change",
    )


def _metric(label: str, size: int) -> None:
    st.metric(label, f"{gib(size)} GiB")


def budget_parts(served: Served) -> dict[str, int]:
    """Return the bytes of the budget's parts by name, from left to right, without those of 0 bytes."""
    parts = {
        "weights": served.weights_bytes,
        "LoRA adapters": served.lora_bytes,
        "draft": served.draft_bytes,
        COMPUTE if served.engine == "llama.cpp" else PROFILE: served.profile_peak_bytes,
        "outside PyTorch": served.outside_torch_bytes,
        "CUDA graphs": served.graphs_bytes if served.graphs_in_budget else 0,
        "KV cache": max(0, served.kv_cache_bytes),
    }
    return {name: size for name, size in parts.items() if size}


def budget_chart(served: Served) -> Spec:
    """Return the chart of the budget: its parts side by side, and a dashed line at its end."""
    parts, start, rows = budget_parts(served), 0, []
    for name, size in parts.items():
        rows.append({"part": name, "start": start / GIB, "end": (start + size) / GIB, "size": GIBIBYTES.text(size)})
        start += size
    across = {"domain": [0, max(start, served.budget_bytes) / GIB], "nice": False}
    legend = {"orient": "bottom", "title": None, "columns": 3}  # a phone has room for three
    bars = vega.layer(
        vega.rows(*rows),
        "rect",
        x=quantitative("start", title="GiB", scale=across),
        x2={"field": "end"},
        color=nominal("part", scale=vega.scale_of({name: BAR[name] for name in parts}), legend=legend),
        tooltip=[nominal("part"), nominal("size")],
    )
    end = vega.rows({"budget": served.budget_bytes / GIB})
    line = vega.layer(end, {"type": "rule", "strokeDash": [4, 3]}, x=quantitative("budget"))
    return vega.layered([bars, line], "Parts of the server's budget, in GiB", height=160)


def _show_contexts(served: Served) -> None:
    rows = [{"Tokens of each request": f"{row.context:,}", "Requests at once": row.requests} for row in served.contexts]
    st.dataframe(rows, hide_index=True, width="content")


def _show_levers(request: Request, served: Served) -> None:
    """Show each change with the changed server's figures, and a button that applies it."""
    if not served.levers:
        st.caption("No known change makes room for more requests.")
    for number, lever in enumerate(served.levers):
        text, button = st.columns([4, 1], vertical_alignment="center")
        note = f" {lever.note[:1].upper()}{lever.note[1:]}." if lever.note else ""
        text.markdown(f"`{lever.flags}` — {lever.requests_at_once:,.1f} requests at once ({lever.gained:+z,.1f}).{note}")
        button.button("Apply", key=f"{PREFIX}lever_{number}", on_click=_apply, args=(request, lever.query), type="tertiary")


def _apply(request: Request, changes: str) -> None:
    """Ask the question with changed keys."""
    links.replace_question(format_query(parse_query(join_query(split_query(format_query(request)) | split_query(changes)))))


def _show_flags(served: Served) -> None:
    rows = [{"Flag": name, "Value": "the server's own" if value is None else str(value)} for name, value in served.flags.items()]
    st.dataframe(rows, hide_index=True, width="content")


def offer_server(request: Request) -> None:
    """Say that a generation is one batch in transformers, and offer the same model on a server if the device supports one."""
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption("One batch in transformers. A server schedules requests one by one and fills the device with its KV cache.")
        if find_gpu(request.gpu).backend == "cuda":
            st.button("Plan a server", key=f"{PREFIX}offer", on_click=_open_server, args=(request,), type="tertiary")


def _open_server(request: Request) -> None:
    """Ask for the same model on a server: the batch becomes requests, prompt and new tokens their length."""
    tokens = (request.sequence_length or 0) + request.new
    arch = split_query(format_query(request))["arch"]
    want = f"{max(request.batches)}x{tokens}"
    links.replace_question(join_query({"arch": arch, "mode": "serve", "gpu": request.gpu, "want": want}))

"""Headline of a report, the bar of the device's memory, and the figures below it.

The bar compares the process with the device's memory: context, allocated memory at the peak, cache, free memory.
"""

from __future__ import annotations

import streamlit as st

from sizer.base.units import format_both, format_bytes, format_count, format_range, pluralize
from sizer.catalogue.adapters import trained_part
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import MODES
from sizer.catalogue.sources import SOURCES
from sizer.query.request import Request
from sizer.report.advice import PHRASES, caveats, describe_download, describe_process
from sizer.report.estimate import Estimate, has_range
from sizer.report.phases import inside
from sizer.report.report import Report
from sizer.ui import vega
from sizer.ui.charts import draw, legend
from sizer.ui.focus import CACHE, OUTSIDE, PEAK_KINDS, parts
from sizer.ui.known_batches import largest_batch
from sizer.ui.page_cache import drawn_once
from sizer.ui.remarks import show_lines
from sizer.ui.styling import COLOURS, FREE, INK, Scale, format_verdict, scale_for
from sizer.ui.vega import Spec, nominal, quantitative

RANGE_Y, BAR_TOP, BAR_BOTTOM, BOTTOM = 6, 14, 42, 46  # pixels from the chart's upper end
RANGE_END = 5  # pixels, half the height of the marks at the range's ends


def capacity_parts(estimate: Estimate, gpu: Gpu) -> dict[str, int]:
    """Return bytes by part from left to right: outside PyTorch, each category at the peak, allocator cache, free memory."""
    of_process = parts(estimate, PEAK_KINDS["process"])
    ordered = {OUTSIDE: of_process.pop(OUTSIDE), **of_process}
    cache = ordered.pop(CACHE)
    free = max(gpu.total_bytes - estimate.process_bytes, 0)
    return {name: size for name, size in {**ordered, CACHE: cache, FREE: free}.items() if size}


def capacity_chart(estimate: Estimate, gpu: Gpu) -> Spec:
    """Return the chart: the parts side by side, a dashed line at the device's memory, and the range of the process above."""
    end = max(gpu.total_bytes, estimate.process_high_bytes)
    scale = scale_for([end])
    rows = _segments(capacity_parts(estimate, gpu), scale)
    colours = {row["part"]: COLOURS.get(row["part"], "transparent") for row in rows}
    across = {"domain": [0, scale.of(end)], "nice": False}
    bars = vega.layer(
        vega.rows(*rows),
        {"type": "rect", "stroke": INK, "strokeWidth": 0.5},
        x=quantitative("start", title=scale.name, scale=across, axis=None),
        x2={"field": "end"},
        y={"value": BAR_TOP},
        y2={"value": BAR_BOTTOM},
        color=nominal("part", scale=vega.scale_of(colours), legend=None),
        tooltip=[nominal("part"), nominal("size"), quantitative("bytes", format=",")],
    )
    return vega.layered(
        [bars, *_range(estimate, scale), _capacity(gpu, scale)],
        f"The process against the memory of {gpu.name}, in {scale.name}",
        height=BOTTOM,
        padding={"top": 2, "left": 4, "right": 12, "bottom": 2},
        config=vega.PLAIN,
    )


def _segments(sizes: dict[str, int], scale: Scale) -> list[Spec]:
    rows, start = [], 0
    for name, size in sizes.items():
        ends = {"start": scale.of(start), "end": scale.of(start + size)}
        rows.append({"part": name, "size": scale.text(size), "bytes": size, **ends})
        start += size
    return rows


def _range(estimate: Estimate, scale: Scale) -> list[Spec]:
    """Return the layers of the range of the process, from its low to its high end; empty if no range is known."""
    if not has_range(estimate):
        return []
    sizes = (estimate.process_low_bytes, estimate.process_high_bytes)
    low, high = map(scale.of, sizes)
    data = vega.rows({"low": low, "high": high, "process": format_range(*sizes)})
    mark = {"type": "rule", "color": INK, "strokeWidth": 2}
    tooltip = [nominal("process", title="the process takes")]
    ends = {"y": {"value": RANGE_Y - RANGE_END}, "y2": {"value": RANGE_Y + RANGE_END}, "tooltip": tooltip}
    across = {"x": quantitative("low"), "x2": {"field": "high"}, "y": {"value": RANGE_Y}, "tooltip": tooltip}
    return [
        vega.layer(data, mark, **across),
        vega.layer(data, mark, x=quantitative("low"), **ends),
        vega.layer(data, mark, x=quantitative("high"), **ends),
    ]


def _capacity(gpu: Gpu, scale: Scale) -> Spec:
    return vega.layer(
        vega.rows({"capacity": scale.of(gpu.total_bytes), "device": gpu.name, "bytes": gpu.total_bytes}),
        vega.LIMIT,
        x=quantitative("capacity"),
        y={"value": 0},
        y2={"value": BOTTOM},
        tooltip=[nominal("device"), quantitative("bytes", format=",")],
    )


def balance(estimate: Estimate, gpu: Gpu) -> str:
    """Return a sentence: the process, its range, and its share of the device's memory."""
    needs, total = format_both(estimate.process_bytes), format_both(gpu.total_bytes)
    spread = f" Its range, the mark above the bar: {describe_process(estimate)}." if has_range(estimate) else ""
    return f"The process takes {needs}, {_percent(estimate, gpu)} of the {total} of one {gpu.name}.{spread}"


def share_of(estimate: Estimate, gpu: Gpu) -> str:
    """Return the process as a share of the device's memory ("16 % of 79.14 GiB")."""
    return f"{_percent(estimate, gpu)} of {format_bytes(gpu.total_bytes)}"


def _percent(estimate: Estimate, gpu: Gpu) -> str:
    percent = 100 * estimate.process_bytes / gpu.total_bytes
    return f"{percent:,.{0 if percent >= 1 else 1}f}\N{NO-BREAK SPACE}%"


@drawn_once
def show_capacity(report: Report, estimate: Estimate) -> None:
    """Show the bar, its legend with sizes, and the free memory."""
    draw(capacity_chart(estimate, report.gpu), "capacity_chart")
    parts = {name: size for name, size in capacity_parts(estimate, report.gpu).items() if name != FREE}
    scale = scale_for(parts.values())
    st.html(legend(parts, {name: scale.text(size) for name, size in parts.items()}))
    st.caption(balance(estimate, report.gpu))


BADGES = {"fits": "green", "tight": "blue", "may not fit": "orange", "does not fit": "red"}  # Streamlit's names
HOST_HELP = (
    "Peak host memory of parameters, gradients and optimizer state, for each rank. The sizes of pinned blocks are powers of two."
)


def sentence(request: Request, report: Report, estimate: Estimate) -> str:
    """Return the headline of an estimate: the work, its memory and the verdict. It holds no stranger's text."""
    by_smi = report.gpu.maker == "NVIDIA" and not report.gpu.unified
    seen = "as nvidia-smi shows it" if by_smi else "for the whole process"
    needs = f"{format_bytes(estimate.process_bytes)} {seen} ({format_bytes(estimate.peak_allocated_bytes)} allocated)"
    if request.world > 1:
        needs = f"{needs} on each of {request.world:,} GPUs"
    return f"{work(request, report, estimate)} in {estimate.dtype} needs {needs}; {verdict(request, report, estimate)}."


def work(request: Request, report: Report, estimate: Estimate) -> str:
    """Return the work: task, model, batch size and dtype."""
    mode, name = MODES[request.mode], subject(request, report)
    if mode.generates:
        prompt = report.request.get("sequence_length")
        after = f" after a prompt of {prompt:,}" if isinstance(prompt, int) else ""
        return f"{mode.headline} {pluralize(request.new, 'token')}{after} with {name} at batch {estimate.batch}"
    part = trained_part(request.train, request.adapter, request.adapter_rank)
    what = f"{part} {'on' if request.train == 'adapter' else 'of'} {name}" if part else name
    return f"{mode.headline} {what} at batch {estimate.batch}{sample_size(report)}"


def sample_size(report: Report) -> str:
    """Return the size of one sample as the model reads it; empty if it has none."""
    match report.request.get("sequence_length"), report.request.get("image_size"):
        case int(tokens), _:
            return f" of {pluralize(tokens, 'token')}"
        case _, (int(height), int(width)):
            return f" of {height} × {width} pixels"
    return ""


def subject(request: Request, report: Report) -> str:
    """Return the model's name in the headline: a known name, or the name of its class."""
    if title_of := SOURCES[request.source].title_of:
        return title_of(request.name).replace("_", r"\_")
    return f"this {report.model.class_name}" if report.model.class_name.isalnum() else "this model"


def verdict(request: Request, report: Report, estimate: Estimate) -> str:
    """Return the verdict on the report's GPU, with the interval of the largest batch."""
    what = "a rank" if "parallel" in report.request else "it"
    said = f"{what} {PHRASES[estimate.verdict]} one {report.gpu.name}"
    largest = largest_batch(request, report, estimate.dtype)
    repeated = request.is_pipeline and largest.most is None  # a pipeline's largest batch is not searched
    if not largest.is_known or repeated or estimate.dtype in report.pending:
        return said
    return f"{said}; {f'the largest batch is {largest}' if largest.most != 0 else 'no batch fits'}"


def show_headline(request: Request, report: Report, estimate: Estimate) -> None:
    """Show the headline and the facts that move its figures."""
    st.title(sentence(request, report, estimate), anchor=False)
    show_lines(f"Note: {caveat}" for caveat in caveats(report))


@drawn_once
def show_badge(report: Report, estimate: Estimate) -> None:
    """Show the verdict with its mark and colour, and the share of the device's memory."""
    st.badge(f"{format_verdict(estimate.verdict)} · {share_of(estimate, report.gpu)}", color=BADGES[estimate.verdict])


@drawn_once
def show_figures(report: Report, estimate: Estimate) -> None:
    """Show the figures of the headline."""
    cache = estimate.peak_reserved_bytes - estimate.peak_allocated_bytes
    with st.container(horizontal=True, gap="medium"):
        _metric("Process", estimate.process_bytes, describe_process(estimate), PEAK_KINDS["process"].help)
        _metric(
            "Allocated",
            estimate.peak_allocated_bytes,
            f"peak in {inside(estimate.peak_phase)}",
            PEAK_KINDS["allocated"].help,
        )
        _metric("Reserved", estimate.peak_reserved_bytes, f"{format_bytes(cache)} cache", PEAK_KINDS["reserved"].help)
        if estimate.host_bytes:
            held = "offloaded, for each rank" if "parallel" in report.request else "at most at once"
            if estimate.step_copied_bytes:
                held = f"{format_bytes(estimate.step_copied_bytes)} copied each step"
            elif estimate.copied_bytes:
                held = f"{format_bytes(estimate.copied_bytes)} copied a call"
            _metric("Host", estimate.host_bytes, held, HOST_HELP)
        _show_parameters(report, describe_download(report, estimate))


def show_counts(report: Report) -> None:
    """Show the counts of a model whose step could not be traced."""
    model = report.model
    with st.container(horizontal=True, gap="medium"):
        _show_parameters(report)
        _count("Trainable", model.trainable_parameters)
        _count("Buffers", model.buffers)
        _metric("As built", model.parameter_bytes + model.buffer_bytes, "parameters and buffers")


def _show_parameters(report: Report, download: str = "") -> None:
    model = report.model
    if report.request["train"] == "all":
        _say("Parameters", format_count(model.parameters), "; ".join(filter(None, (f"{model.parameters:,}", download))))
    else:
        share = model.trainable_parameters / model.parameters
        _say(
            "Parameters",
            format_count(model.parameters),
            f"{format_count(model.trainable_parameters)} train ({share:.2%})",
        )


def _count(label: str, count: int) -> None:
    _say(label, format_count(count), f"{count:,}")


def _metric(label: str, size_bytes: int, below: str, help_text: str | None = None) -> None:
    _say(label, format_bytes(size_bytes), below, help_text)


def _say(label: str, value: str, below: str, help_text: str | None = None) -> None:
    st.metric(label, value, below, delta_color="off", delta_arrow="off", help=help_text)

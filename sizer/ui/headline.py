"""Headline of a report, and the figures below it."""

from __future__ import annotations

import streamlit as st

from sizer.base.units import counted, format_bytes, format_count
from sizer.catalogue.adapters import trained_part
from sizer.catalogue.modes import MODES
from sizer.catalogue.sources import SOURCES
from sizer.query.request import Request
from sizer.report.advice import PHRASES, caveats, describe_download, describe_process
from sizer.report.estimate import Estimate
from sizer.report.phases import inside
from sizer.report.report import Report
from sizer.ui.capacity import share_of
from sizer.ui.focus import PEAK_KINDS
from sizer.ui.known_batches import largest_batch
from sizer.ui.once import drawn_once
from sizer.ui.remarks import show_lines
from sizer.ui.styling import marked

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
        return f"{mode.headline} {counted(request.new, 'token')}{after} with {name} at batch {estimate.batch}"
    part = trained_part(request.train, request.adapter, request.adapter_rank)
    what = f"{part} {'on' if request.train == 'adapter' else 'of'} {name}" if part else name
    return f"{mode.headline} {what} at batch {estimate.batch}{sample_size(report)}"


def sample_size(report: Report) -> str:
    """Return the size of one sample as the model reads it; empty if it has none."""
    match report.request.get("sequence_length"), report.request.get("image_size"):
        case int(tokens), _:
            return f" of {counted(tokens, 'token')}"
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
    st.badge(f"{marked(estimate.verdict)} · {share_of(estimate, report.gpu)}", color=BADGES[estimate.verdict])


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

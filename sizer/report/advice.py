"""Lines next to the headline: whether an estimate fits, caveats, and the size of the weights as hubs state it.

Changes that help are traced: see sizer.decision.
"""

from __future__ import annotations

from collections.abc import Iterator

from sizer.base.units import format_both, format_bytes, format_range, pluralize
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.recipes import OF_KERNELS
from sizer.report.estimate import Estimate, has_range
from sizer.report.fit import Verdict
from sizer.report.report import Report

# The verdict as the verb of a sentence: "it only just fits one A100 (80 GB)".
PHRASES: dict[Verdict, str] = {
    "fits": "fits",
    "tight": "only just fits",
    "may not fit": "may not fit",
    "does not fit": "does not fit",
}


def advise(report: Report, estimate: Estimate) -> tuple[str, ...]:
    """Return lines on one estimate of a report: whether it fits and by how much, or where it fails. Sizes are text."""
    return tuple(_advise(report.gpu, estimate))


def _advise(gpu: Gpu, estimate: Estimate) -> Iterator[str]:
    if estimate.verdict == "fits":
        yield f"It fits: {describe_room(estimate, gpu)} of {format_bytes(gpu.total_bytes)} stay free on the {gpu.name}."
        return
    has = f"the {gpu.name} has {format_bytes(gpu.total_bytes)}"
    if estimate.verdict == "does not fit":
        failed = estimate.out_of_memory
        stops = f"; it stops in {failed.phase} at {failed.op} ({failed.module or 'root'})" if failed else ""
        yield f"It does not fit: the process needs {describe_process(estimate)}, {has}{stops}."
        return
    would = f"the process would take {describe_process(estimate)} on a larger device, {has}"
    if estimate.verdict == "tight":
        returned = format_bytes(estimate.returned_bytes)
        yield f"It is tight: it fits only if the allocator returns up to {returned} of its cache, which is slow; {would}."
    else:
        short = estimate.process_low_bytes - gpu.total_bytes
        only = f", and the allocator has to return {format_bytes(short)} of its cache at least" if short > 0 else ""
        yield f"It may not fit: {would}{only}."
    if estimate.retries:
        yield (
            f"Already by the middle of the range the allocator returns cache and tries again "
            f"({pluralize(estimate.retries, 'time')})."
        )


def describe_process(estimate: Estimate) -> str:
    """Return the range of the process as text, one size if no range is known."""
    if not has_range(estimate):
        return format_bytes(estimate.process_bytes)
    return format_range(estimate.process_low_bytes, estimate.process_high_bytes)


def describe_room(estimate: Estimate, gpu: Gpu) -> str:
    """Return as text how much of the device work that fits leaves free, from the least to the most."""
    least, most = gpu.total_bytes - estimate.process_high_bytes, gpu.total_bytes - estimate.process_low_bytes
    return format_range(least, most) if has_range(estimate) else format_bytes(least)


def describe_download(report: Report, estimate: Estimate) -> str:
    """Return the size of an estimate's weights in both units; empty for shards and adapters.

    The estimate of a shard has a part of the weights, that of an adapter more than the weights.
    """
    request = report.request
    if request.get("parallel") not in (None, "none") or request.get("train") == "adapter" or not estimate.weights_bytes:
        return ""
    return f"{format_both(estimate.weights_bytes)} to download"


# First words of notes on facts that change the figure much, or that a reader may have assumed otherwise.
MOVES = ("The model resizes each ", "Built from scratch: every layer of the backbone trains")
UNQUANTIZED_PART = "Not quantized: "  # first words of a note on modules that a quantizer left unquantized


def caveats(report: Report) -> tuple[str, ...]:
    """Return the cautions of a report, and one line for each item that it counts differently than a reader may expect."""
    return tuple(_caveats(report))


def _caveats(report: Report) -> Iterator[str]:
    for caution in report.cautions:
        yield f"{caution}."
    for note in report.notes:
        if note.startswith((UNQUANTIZED_PART, *MOVES)):
            yield f"{note[0].lower()}{note[1:]}"
    if report.request.get("attention") == "eager":
        yield "attention is eager: it keeps the scores of all pairs of tokens. SDPA does not."
    tokens = report.request.get("sequence_length")
    if report.request.get("mode") == "inference" and tokens is not None:
        yield f"this is one forward pass over all {tokens:,} tokens; generating token by token is not counted."
    noted = report.explanation.stand_ins if report.explanation is not None else ()
    if stand_ins := [text for text in noted if not text.startswith(OF_KERNELS)]:
        yield f"{pluralize(len(stand_ins), 'value')} that the code reads had to be assumed: see Not counted."

"""A report as text for a terminal: the output of the command `estimate` without --json and --csv."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sizer.base.units import format_bytes, format_count, format_more, pluralize
from sizer.catalogue.adapters import trained_part
from sizer.catalogue.modes import MODES
from sizer.catalogue.recipes import AFTER as STEP_AFTER
from sizer.catalogue.recipes import FULL, KEEP, LM, NONE
from sizer.commands.terminal import format_table, to_printable
from sizer.report.advice import PHRASES, advise, caveats, describe_download
from sizer.report.estimate import Estimate, describe_copies
from sizer.report.explanation import sections
from sizer.report.kv_cache import SERVER_NOTE, describe_growth
from sizer.report.phases import PHASE_TITLES
from sizer.report.report import Report
from sizer.report.served import Served
from sizer.serving.words import graphs_line, headline, lever_lines, range_line, sum_line, want_line
from sizer.tape.tape import AFTER, CATEGORIES


def format_as(report: Report, form: str, width: int | None) -> str:
    """Return the text of a report as "json", "csv", "text" or "explained", the latter two for a terminal of `width` columns."""
    if form == "json":
        return f"{json.dumps(report.to_dict(), allow_nan=False)}\n"  # ASCII, for any encoding of the terminal
    if form == "csv":
        return report.to_csv().replace("\r\n", "\n")  # stdout writes the platform's own line ends
    parts = (format_report(report, width), *([format_explanation(report)] if form == "explained" else []))
    return "\n\n".join(parts) + "\n"


def format_report(report: Report, width: int | None = None) -> str:
    """Return the report as lines of text: the answer in a sentence, all dtypes and batches, the peak, the assumptions.

    If `width` is given, tables are at most that many columns wide.
    """
    if report.serve is not None:
        return to_printable("\n\n".join("\n".join(lines) for lines in _server(report, report.serve, width) if lines))
    parts = (
        _model(report),
        _headline(report),
        _advice(report),
        _estimates(report, width),
        _peaks(report, width),
        _largest(report),
        _communication(report),
        _loop(report),
        _kv_cache(report, width),
        _remarks(report),
    )
    return to_printable("\n\n".join("\n".join(lines) for part in parts if (lines := list(part))))


def _server(report: Report, served: Served, width: int | None) -> Iterator[list[str]]:
    """Yield the parts of a server's answer, each as lines."""
    said = [headline(served)]
    if served.want is not None:
        said.append(want_line(served.want))
    vocabulary = served.flags.get("vocabulary")
    yield [*said, sum_line(served, vocabulary if isinstance(vocabulary, int) else None), graphs_line(served), range_line(served)]
    if served.message:
        yield ["The server's message:", f"  {served.message}"]
    yield [*lever_lines(served)]
    rows = [(f"{row.context:,}", f"{row.requests:,}") for row in served.contexts]
    yield [*format_table(("tokens of each request", "requests at once"), rows, width=width)]
    yield [served.command]
    yield [*_model(report)][:2] + [f"Not counted: {text}" for text in report.uncounted]


def format_explanation(report: Report) -> str:
    """Format the explanation of a report as sections of lines, or as a sentence if the report has none."""
    if report.explanation is None:
        return "This report does not say how it was computed."
    parts = ("\n".join([f"{one.title}:", *(f"  {line}" for line in one.lines)]) for one in sections(report.explanation))
    return to_printable("\n\n".join(["How this was computed", *parts]))


def _model(report: Report) -> Iterator[str]:
    model = report.model
    yield f"{model.name} ({model.class_name})"
    counts = f"{model.parameters:,} parameters ({format_count(model.parameters)})"
    if MODES[str(report.request["mode"])].trains and model.trainable_parameters != model.parameters:
        counts += f", {model.trainable_parameters:,} of them trainable"
    yield f"{counts}, {model.buffers:,} buffer elements"
    if (focus := _focus(report)) and (download := describe_download(report, focus)):
        yield f"weights in {focus.dtype}: {download}"
    if model.tied_parameters:
        yield f"tied, counted once: {'; '.join(' = '.join(names) for names in model.tied_parameters[:5])}"


def _headline(report: Report) -> Iterator[str]:
    if focus := _focus(report):
        asked: Mapping[str, Any] = report.request
        mode = MODES[asked["mode"]]
        part = trained_part(asked["train"], asked["adapter"], asked["adapter_rank"])
        work = (
            f"{mode.title} of {pluralize(asked['new'], 'token')}" if mode.generates else f"{mode.title} {part}".rstrip()
        )
        allocated, process = format_bytes(focus.peak_allocated_bytes), format_bytes(focus.process_bytes)
        yield (
            f"{work} in {focus.dtype} at batch {focus.batch} needs {process} for the process ({allocated} allocated); "
            f"it {PHRASES[focus.verdict]} one {report.gpu.name} with {format_bytes(report.gpu.total_bytes)}."
        )
        if focus.host_bytes:
            ranks = ", for each rank" if report.request.get("parallel", "none") != "none" else ""
            loads = focus.phases[-1].phase == AFTER and report.request.get("offloading") == "none"
            held = "at most, while parts are loaded" if loads else f"of offloaded tensors{ranks}"
            copies = describe_copies(focus)
            yield f"The host holds {format_bytes(focus.host_bytes)} {held}{f': {copies}' if copies else ''}."
    for caveat in caveats(report):
        yield f"Note: {caveat}"
    for dtype, reason in report.failures.items():
        yield f"{dtype} could not be traced: {reason}"


def _focus(report: Report) -> Estimate | None:
    """Return the estimate in focus."""
    return None if report.focus is None else report.find(report.focus.dtype, report.focus.batch)


def _advice(report: Report) -> Iterator[str]:
    if focus := _focus(report):
        yield from advise(report, focus)


def _estimates(report: Report, width: int | None) -> Iterator[str]:
    if report.estimates:
        header = ("dtype", "batch", "process", "allocated", "reserved", "verdict")
        yield from format_table(header, map(_row, report.estimates), width=width)


def _row(row: Estimate) -> tuple[str, ...]:
    sizes = (row.process_bytes, row.peak_allocated_bytes, row.peak_reserved_bytes)
    return row.dtype, str(row.batch), *map(format_bytes, sizes), row.verdict


def _peaks(report: Report, width: int | None) -> Iterator[str]:
    """Yield the memory at the peak by category, per dtype, at the batch size in focus."""
    focus = _focus(report)
    if focus is None:
        return
    batch = focus.batch
    columns = [row for row in report.estimates if row.batch == batch]
    yield f"In memory at the peak, batch {batch}:"
    rows = [
        (category, *(format_bytes(row.at_peak.get(category, 0)) for row in columns))
        for category in CATEGORIES
        if any(row.at_peak.get(category) for row in columns)
    ]
    yield from format_table(("", *(row.dtype for row in columns)), rows, width=width)
    for place in dict.fromkeys((row.peak_phase, row.peak_op, row.peak_module) for row in columns):
        phase, op, module = place
        dtypes = [row.dtype for row in columns if (row.peak_phase, row.peak_op, row.peak_module) == place]
        yield f"peak of {', '.join(dtypes)}: {op}{f' in {module}' if module else ''} ({phase})"
    if any(report.request.get(key, usual) != usual for key, usual in _RECIPES.items()):
        yield from _phases_of_recipe(columns, width)
    if not columns or columns[0].phases[-1].phase != AFTER:
        return
    for row in columns:
        yield f"Allocated while each part works, and when it ends, {row.dtype}:"
        parts = [(use.phase, *map(format_bytes, (use.peak_allocated_bytes, use.allocated_bytes))) for use in row.phases]
        yield from format_table(("", "peak", "end"), parts, width=width)


# Keys of training recipes that move the peak from one phase to another, with their defaults.
_RECIPES = {"loss": FULL, "step": STEP_AFTER, "evaluate": NONE, "objective": LM, "activations": KEEP, "optimizer_offload": False}


def _phases_of_recipe(columns: Sequence[Estimate], width: int | None) -> Iterator[str]:
    """Yield a row for each phase of a training recipe, and mark the phase that has the peak."""
    for row in columns:
        yield f"Peak allocated in each phase, and allocated and reserved at its end, {row.dtype}:"
        phases = [
            (
                f"{PHASE_TITLES.get(use.phase, use.phase)}{' (the peak)' if use.phase == row.peak_phase else ''}",
                *map(format_bytes, (use.peak_allocated_bytes, use.allocated_bytes, use.reserved_bytes)),
            )
            for use in row.phases
        ]
        yield from format_table(("", "peak", "end", "reserved"), phases, width=width)


def _largest(report: Report) -> Iterator[str]:
    if report.estimates and report.estimates[0].phases[-1].phase == AFTER and len({row.batch for row in report.estimates}) == 1:
        yield "Each batch size of a pipeline is traced by itself: `sizer limits` searches the largest that fits."
        return
    if report.max_batch:
        yield f"Largest batch on one {report.gpu.name}:"
    for row in report.max_batch:
        why = f" ({row.reason})" if row.reason and not row.batch else ""
        yield f"  {row.dtype}: {report.largest_batch(row.dtype)}{why}"


def _communication(report: Report) -> Iterator[str]:
    """Yield the collectives of a step, at the estimate in focus."""
    focus = _focus(report)
    if focus is None or not focus.communication:
        return
    yield f"Between the ranks in a step, {focus.dtype} at batch {focus.batch}:"
    rows = ((row.kind, row.group, f"{row.calls:,}", format_bytes(row.bytes)) for row in focus.communication)
    yield from format_table(("collective", "over", "calls", "bytes"), rows, left=2)


def _loop(report: Report) -> Iterator[str]:
    """Print the bytes that other training loops would need for the estimate in focus."""
    if report.loop:
        cell = f"{report.loop[0].dtype} at batch {report.loop[0].batch}"
        yield f"Other training loops, {cell}, in reserved memory:"
        rows = ((row.decision, format_more(row.bytes), "yes" if row.in_range else "no") for row in report.loop)
        yield from format_table(("the loop", "more or less", "within the range"), rows)


def _kv_cache(report: Report, width: int | None) -> Iterator[str]:
    """Yield the bytes of a sequence's cache, in the dtype in focus."""
    for cache in report.kv_caches:
        if report.focus is None or cache.dtype != report.focus.dtype:
            continue
        yield f"KV cache in {cache.dtype}, {describe_growth(cache)}; {SERVER_NOTE}:"
        rows = ((f"{row.context:,}", format_bytes(row.sequence_bytes)) for row in cache.rows)
        yield from format_table(("context", "one sequence"), rows, width=width)


def _remarks(report: Report) -> Iterator[str]:
    notes = [text for text in report.notes if text not in report.cautions]  # those are printed with the headline
    for title, texts in (("Note", notes), ("Assumed", report.assumptions), ("Not counted", report.uncounted)):
        for text in texts:
            yield f"{title}: {text}"

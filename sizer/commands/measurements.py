"""The commands `measure` and `suite`: run work on a real device, and compare the estimate with it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sizer.base.errors import JobError, RequestError, SizerError, quote
from sizer.base.units import format_bytes, pluralize
from sizer.base.versions import format_version, installed_version
from sizer.catalogue.parallel import PARALLELS
from sizer.commands.arguments import add_query, minutes, query_of
from sizer.commands.figures import TITLES, percent
from sizer.commands.terminal import format_table, size_text, to_printable
from sizer.commands.waiting import MakeClient, wait
from sizer.device.comparison.comparison import PEAK, Comparison, rank_of, worst
from sizer.device.comparison.divergence import Scratch
from sizer.device.comparison.row import Row
from sizer.device.ledger.ledger import Ledger
from sizer.device.record.measurement import Measurement, Spread, Timing
from sizer.device.record.recording import Measured
from sizer.device.suite.suite import (
    Runner,
    choose_cases,
    delete_failures,
    find_device,
    folder_for,
    run_suite,
    split_by_places,
)
from sizer.device.trial.launch import PLACES, MeasureJob, RanksJob, count_places, start, start_ranks
from sizer.query.request import Request, check_traced
from sizer.query.text import format_query, parse_query
from sizer.query.values import DTYPES
from sizer.service.client import JobClient

SCHEMA = 1
DEVICE_HELP = "cuda:0, mps, cpu, ... (see `python -m sizer devices`); cpu or cuda for several ranks"


class Found(NamedTuple):
    """A measurement, with its comparison or the reason for having none."""

    measured: Measured
    comparison: Comparison | None
    failure: SizerError | None


def add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_query(parser, 'such as "arch=torchvision:resnet50&dtype=float32&batch=32"')
    parser.add_argument("--device", required=True, help=DEVICE_HELP)
    parser.add_argument(
        "--json", action="store_true", help="print measurement and comparison as JSON, one object a line"
    )
    parser.add_argument("--no-timing", action="store_true", help="only measure memory")
    parser.add_argument("--no-ledger", action="store_true", help="do not store the comparison")
    parser.add_argument(
        "--minutes", type=minutes, default=10.0, help="stop a measurement that takes longer; by default 10"
    )


def run_measure(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Measure every dtype and batch size of a query, and compare each with the estimate.

    Each cell runs in its own process; with several ranks, each rank runs in its own process, all at once. Errors are raised
    after all results are printed. A lack of memory is a result, not an error.

    Raises:
        TraceError: A step was measured and cannot be traced.
        JobError: A job ended early.
    """
    query, problem = query_of(options), None
    with contextlib.closing(make_client()) as client:
        for cell in _cells(query):
            found = [Found(measured, *_compare(client, measured)) for measured in _measure_cell(options, cell)]
            _print(options, found)
            for one in found:
                if one.comparison is not None and not options.no_ledger:
                    Ledger().add(one.comparison)
                problem = problem or one.failure or _ended_early(one.measured)
    if problem is not None:
        raise problem
    return 0


def _cells(query: str) -> Iterator[Request]:
    """Yield every dtype and batch size of a query; if it names none, choose one and print it on stderr."""
    request = parse_query(query)
    check_traced(request)
    if request.torch not in (None, installed := format_version(installed_version())):
        raise RequestError(
            "torch with measure",
            given=quote(request.torch),
            allowed=f"the installed one, {installed}",
            todo="leave it out",
        )
    given = {item.partition("=")[0] for item in query.removeprefix("?").split("&")}
    dtypes = request.dtypes if "dtype" in given else DTYPES[:1]
    batches = request.batches if "batch" in given else (1,)
    chosen = [f"{key}={value}" for key, value in (("dtype", dtypes[0]), ("batch", batches[0])) if key not in given]
    if chosen:
        print(f"sizer: measured is {' and '.join(chosen)}, since the query names none", file=sys.stderr)
    for dtype in dtypes:
        for batch in batches:
            yield replace(request, dtypes=(dtype,), batches=(batch,))


def _measure_cell(options: argparse.Namespace, cell: Request) -> tuple[Measured, ...]:
    """Measure a cell and return the result of each rank."""
    query, seconds = format_query(cell, complete=True), 60 * options.minutes
    several = cell.parallel != "none"
    job: RanksJob | MeasureJob
    if several:
        job = start_ranks(query, options.device, seconds=seconds)
    else:
        job = start(query, options.device, timing=not options.no_timing, seconds=seconds)
    try:
        return wait(job) if several else (wait(job),)
    finally:
        job.cancel()  # only if the waiting was interrupted: a finished job is not changed


def _compare(client: JobClient, measured: Measured) -> tuple[Comparison | None, SizerError | None]:
    """Return the comparison, or why there is none: the measurement is valid in any case."""
    try:
        return wait(client.submit_comparison(measured)), None
    except SizerError as error:
        return None, error


def _ended_early(measured: Measured) -> JobError | None:
    """Return the error that ended a measurement early. A lack of memory is a result, not an error."""
    failure = measured.measurement.failure
    return None if failure is None else JobError("the device did not complete the work", given=quote(failure, 300))


def _print(options: argparse.Namespace, found: Sequence[Found]) -> None:
    if options.json:
        for one in found:
            print(json.dumps(_json(one), allow_nan=False), flush=True)
        return
    comparisons = [one.comparison for one in found if one.comparison is not None]
    if not comparisons:
        text = format_measurement(found[0].measured.measurement)
    elif len(comparisons) > 1:
        text = format_ranks(comparisons)
    else:
        text = format_comparison(comparisons[0])
    print(text, end="\n\n", flush=True)


def _json(one: Found) -> dict:
    data = {
        "schema": SCHEMA,
        "measurement": one.measured.measurement.to_dict(),
        "comparison": one.comparison and one.comparison.to_dict(),
    }
    return data if one.failure is None else data | {"error": str(one.failure)}


# ---------------------------------------------------------------------------------------------------------------- text


SCRATCH_SHOWN = 5
_COUNTERS = ("allocated_bytes", "peak_allocated_bytes", "reserved_bytes", "peak_reserved_bytes", "driver_bytes")


def format_comparison(comparison: Comparison) -> str:
    """Return a measurement and its comparison with the estimate as text: verdict, figures, divergences, time, notes."""
    parts = (
        _subject(comparison),
        [comparison.verdict],
        _figures(comparison.rows),
        comparison.wrong,
        _divergences(comparison),
        _scratch(comparison.scratch),
        [] if comparison.measurement.timing is None else _timing(comparison.measurement.timing),
        (f"Note: {note}" for note in comparison.notes),
    )
    return to_printable("\n\n".join("\n".join(lines) for part in parts if (lines := list(part))))


def format_ranks(comparisons: Sequence[Comparison]) -> str:
    """Return the peak of each rank as estimated and as measured, then the comparison of the rank with the largest error."""
    shown = worst(comparisons)
    header = ("rank", "estimated", "measured", "difference", "error", "")
    lines = format_table(header, map(_rank_cells, comparisons))
    title = f"Peak allocated on each of {pluralize(len(comparisons), 'rank')}, and rank {rank_of(shown)} whole:"
    return "\n\n".join(("\n".join((title, *lines)), format_comparison(shown)))


def _rank_cells(comparison: Comparison) -> tuple[str, ...]:
    peak = comparison.find(PEAK)
    rank = str(rank_of(comparison))
    if peak is None:
        return rank, format_bytes(comparison.estimate.peak_allocated_bytes), "", "", "", "not to its end"
    _, *figures, _, _ = _row_cells(peak)
    return rank, *figures, "" if comparison.holds else "WRONG"


def format_measurement(measurement: Measurement) -> str:
    """Return a measurement without comparison: the readings after each phase."""
    header = ("after", "allocated", "peak allocated", "reserved", "peak reserved", "driver")
    rows = (
        (reading.phase, *(size_text(getattr(reading, name)) for name in _COUNTERS)) for reading in measurement.phases
    )
    return to_printable("\n".join([f"measured on {_device(measurement)}", "", *format_table(header, rows)]))


# ---------------------------------------------------------------------------------------------------------- comparison


def _subject(comparison: Comparison) -> Iterator[str]:
    measurement = comparison.measurement
    model = f"{comparison.architecture} ({comparison.class_name})"
    yield f"{model}, {comparison.task} in {measurement.dtype} at batch {measurement.batch}{_place(measurement)}"
    yield f"measured on {_device(measurement)}"


def _place(measurement: Measurement) -> str:
    request = parse_query(measurement.query)
    if request.parallel == "none":
        return ""
    return f", rank {request.rank} of {request.world} by {PARALLELS[request.parallel].title}"


def _device(measurement: Measurement) -> str:
    facts = measurement.device
    memory = "" if facts.total_bytes is None else f" with {format_bytes(facts.total_bytes)}"
    torch = measurement.versions.get("torch", "unknown")
    return f"{facts.device}: {facts.name}{memory}, torch {torch}, at {measurement.measured_at} ({measurement.source})"


def _figures(rows: Sequence[Row]) -> Iterator[str]:
    header = ("", "estimated", "measured", "difference", "error", "may be", "")
    yield from format_table(header, map(_row_cells, rows))


def _row_cells(row: Row) -> tuple[str, ...]:
    return (
        _title(row),
        format_bytes(row.estimated_bytes),
        format_bytes(row.measured_bytes),
        _signed(row.difference_bytes),
        "exact" if row.difference_bytes == 0 else percent(row.error),
        _promise(row),
        {True: "", False: "WRONG", None: "not judged"}[row.holds],
    )


def _title(row: Row) -> str:
    name = TITLES.get(row.quantity.rpartition(".")[2], row.quantity)
    return f"{row.phase}: {name}" if row.quantity.startswith("phases.") else name


def _promise(row: Row) -> str:
    if row.tolerance is None:
        return ""
    if row.tolerance == 0:
        return f"exact but {format_bytes(row.allowance_bytes)}" if row.allowance_bytes else "exact"
    return f"{row.tolerance:.0%} off"


def _divergences(comparison: Comparison) -> Iterator[str]:
    first = comparison.first_divergence
    if first is None:
        return
    level = _signed(first.level_difference_bytes)
    yield f"The two first diverge in {first.describe()}; the estimate's level is {level} there."
    others = [one for one in comparison.largest_divergences if one != first]
    if others:
        yield "The largest divergences:"
    yield from (f"  up to {format_bytes(one.most_bytes)} in {one.describe()}" for one in others)


def _scratch(scratch: Sequence[Scratch]) -> Iterator[str]:
    if scratch:
        yield "Memory inside kernels, in addition to both sides' blocks:"
    for one in scratch[:SCRATCH_SHOWN]:
        where = f" in {one.module}" if one.module else ""
        size = f"{format_bytes(one.most_bytes)} (the estimate: {format_bytes(one.estimated_bytes)})"
        yield f"  {one.phase}: {one.op or 'code outside operators'}{where}, {pluralize(one.times, 'time')}, up to {size}"


def _timing(timing: Timing) -> Iterator[str]:
    yield f"A step takes {_seconds(timing.step)} ({timing.clock}, after {pluralize(timing.warm_up, 'step')} of warm-up)."
    yield f"Without waiting for the device one would have read {_seconds(timing.unsynchronized)}."
    for one in timing.transfers:
        memory = "pinned" if one.pinned else "plain"
        how = f"{memory} memory{', non_blocking' if one.non_blocking else ''}"
        text = f"{format_bytes(one.bytes)} from {how} take {_seconds(one.done)}"
        yield f"  {text}; without waiting one reads {_seconds(one.issued)}"


def _seconds(spread: Spread) -> str:
    low, median, high = map(_duration, (spread.low_seconds, spread.median_seconds, spread.high_seconds))
    return f"{median} ({low} to {high}, {pluralize(spread.runs, 'run')})"


def _duration(seconds: float) -> str:
    unit, name = next(((unit, name) for unit, name in _TIMES if seconds >= unit), _TIMES[-1])
    return f"{seconds / unit:.{0 if seconds >= 100 * unit else 2}f} {name}"


_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def _signed(size: int) -> str:
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)


# --------------------------------------------------------------------------------------------------------------- suite


def add_suite_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--device", default="cuda:0", help="cuda:0, mps or cpu (small models); by default cuda:0")
    parser.add_argument(
        "--record", action="store_true", help="also record the allocator's events, and kernels' workspaces"
    )
    parser.add_argument("--only", metavar="SUBSTRING", default="", help="only the cases with this in their name")
    parser.add_argument("--minutes", type=minutes, default=9.0, help="start no case that would end later; by default 9")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="by default tests/measured/<device>-<torch>-<date>")
    parser.add_argument("--again", action="store_true", help="measure failed cases again")
    parser.add_argument("--list", action="store_true", help="print the cases and measure nothing")


def run_cases(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Measure the cases that the folder lacks, or list them."""
    if options.list:
        for case in choose_cases(options.device.partition(":")[0], options.only):
            print(f"{case.name:46} {case.query}")
        return 0
    inventory, facts = find_device(options.device)
    cases = choose_cases(facts.kind, options.only)
    cases, lacking = split_by_places(cases, count_places(facts.kind) if facts.kind in PLACES else 1)
    runner = Runner(device=facts.device, record=options.record)
    folder = options.out or folder_for(inventory, facts, runner.date())
    print(f"{facts.name}: {pluralize(len(cases), 'case')}, to {folder}", flush=True)
    for case in lacking:
        print(f"{case.name:46} left out: it needs {case.ranks} {PLACES.get(facts.kind, 'devices')}", flush=True)
    if options.again:
        delete_failures(cases, folder)
    left = run_suite(
        cases,
        facts,
        folder,
        runner,
        record=options.record,
        seconds=60 * options.minutes,
        say=lambda text: print(to_printable(text), flush=True),
    )
    print(f"left for the same command again: {', '.join(left)}" if left else "nothing is left")
    return 0


COMMANDS = {
    "measure": (add_measure_arguments, run_measure),
    "suite": (add_suite_arguments, run_cases),
}

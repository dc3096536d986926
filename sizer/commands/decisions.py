"""The commands `levers`, `limits`, `which`, `ranks`, `budget` and `peak`: savings, largest sizes, devices that fit, tensors.

`peak` shows live tensors at the peak of allocated memory, writes PyTorch's snapshot of it, or a script that does the work.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sizer.base.codec import encode
from sizer.base.errors import RequestError, quote
from sizer.base.units import format_bytes
from sizer.commands.arguments import add_query, query_of
from sizer.commands.terminal import format_table, print_list, terminal_width, to_printable
from sizer.commands.waiting import Lines, MakeClient, Submit, in_focus, print_growing, start_worker_client, wait
from sizer.report.decision import (
    BudgetPoint,
    BudgetReport,
    Cell,
    DeviceReport,
    DeviceRow,
    LeverReport,
    LeverRow,
    Limit,
    LimitReport,
    RankReport,
    RankRow,
    describe_budgets,
    describe_fewest,
    describe_fitting,
    largest_batch,
    saves,
)
from sizer.report.peak import PeakReport, TensorGroup, with_children
from sizer.report.served import ServedFigures
from sizer.serving.words import STARTS, describe_served_devices, describe_served_ranks, gib, verdict_words, want_line

if TYPE_CHECKING:
    from sizer.service.client import JobClient
    from sizer.service.job import Job

MODULES = 20  # rows
DEPTH = 3  # of the modules' paths


def _add_peak_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_query(parser, "same as for estimate; focus=DTYPE:BATCH selects one of several dtypes or batches")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--json", action="store_true", help="print the result as JSON")
    either.add_argument(
        "--snapshot", metavar="FILE", type=Path, help="write it for PyTorch's viewer, pytorch.org/memory_viz"
    )
    either.add_argument(
        "--script",
        action="store_true",
        help="print a PyTorch program that runs and measures this work, for torchrun if there are several ranks",
    )


def _run_peak(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the live tensors at the peak, or write the snapshot, or print the script."""
    with contextlib.closing(start_worker_client(make_client)) as client:
        query = in_focus(client, query_of(options))
        if options.snapshot is not None:
            _write(options.snapshot, wait(client.submit_snapshot(query)))
            return 0
        if options.script:
            print(wait(client.submit_script(query)), end="")
            return 0
        found = wait(client.submit_peak(query))
    print_list(options, encode(found), map(to_printable, format_peak(found, terminal_width())))
    return 0


def format_peak(found: PeakReport, width: int | None = None) -> Iterator[str]:
    """Yield the sentence, the largest tensors, and the bytes by module."""
    yield found.sentence
    if found.remedy:
        yield found.remedy
    yield ""
    rows = [*map(_cells, found.tensors)]
    if found.rest_count:
        rows.append(("all others", f"{found.rest_count:,}", format_bytes(found.rest_bytes), "", ""))
    yield from format_table(("tensor", "count", "bytes", "what", "made by"), rows, width=width)
    yield ""
    totals = {path: sum(sizes.values()) for path, sizes in with_children(found.modules).items()}
    largest = sorted((path for path in totals if path.count(".") < DEPTH), key=lambda path: -totals[path])[:MODULES]
    yield from format_table(
        ("module, with its children", "bytes"), ((path or "(all)", format_bytes(totals[path])) for path in largest)
    )


def _cells(group: TensorGroup) -> tuple[str, ...]:
    made = f"{group.op} in {group.module or 'the model itself'}"
    return group.tensor, f"{group.count:,}", format_bytes(group.bytes), group.category, made


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise RequestError("the snapshot cannot be written", given=quote(str(path)), todo=error.strerror) from error


Command = Callable[[argparse.Namespace, MakeClient], int]


def format_levers(found: LeverReport, width: int | None = None) -> Iterator[str]:
    """Yield the levers as a table, the smallest set, changes without effect, and the code of changes that save memory."""
    if found.base is None:
        yield from format_served_levers(found, width)
        return
    base = found.base
    yield f"{base.dtype} at batch {base.batch}: process {format_bytes(base.process_bytes)}, {base.verdict}"
    yield ""
    rows = sorted(found.rows, key=lambda row: row.cell.process_bytes if row.cell else base.process_bytes)
    yield from format_table(
        ("change", "process", "saves", "verdict", "costs"), (_lever_cells(row, base.process_bytes) for row in rows), width=width
    )
    yield ""
    if found.smallest is not None:
        titles = {row.key: row.title for row in found.rows}
        changes = ", ".join(titles[key] for key in found.smallest.keys)
        yield f"To make it fit: {changes}, process {format_bytes(found.smallest.cell.process_bytes)}. {found.search}"
        yield f"  {found.smallest.query}"
    else:
        yield found.search
    for row in rows:
        if row.cell is None:
            yield f"{row.title}: {row.reason}"
        elif row.effect and not saves(row, base):
            yield f"{row.title} saves nothing: {row.effect}"
        elif row.effect:
            yield f"{row.title}: {row.effect}"
    for text in found.useless:
        yield f"Does not help: {text}"
    for row in rows:
        if row.cell is not None and row.cell.process_bytes < base.process_bytes:
            yield f"\n{row.title}:"
            yield from (f"    {line}" for line in row.code.splitlines())


def _lever_cells(row: LeverRow, base_bytes: int) -> tuple[str, ...]:
    if row.cell is None:
        return row.title, "-", "-", "-", "see below"
    saved = base_bytes - row.cell.process_bytes
    text = format_bytes(saved) if saved >= 0 else f"-{format_bytes(-saved)}"
    return row.title, format_bytes(row.cell.process_bytes), text, row.cell.verdict, row.cost


# -------------------------------------------------------------------------------------------------------------- limits


def format_limits(found: LimitReport, width: int | None = None) -> Iterator[str]:
    """Yield a row for each size; the other sizes are those of the query."""
    yield from format_table(("", "largest", "process", "why"), map(_limit_cells, found.limits), width=width)


def _limit_cells(limit: Limit) -> tuple[str, ...]:
    process = format_bytes(limit.cell.process_bytes) if limit.cell else "-"
    return limit.title, str(limit.interval), process, limit.reason


# --------------------------------------------------------------------------------------------------------------- which


def format_devices(found: DeviceReport, width: int | None = None) -> Iterator[str]:
    """Yield a row for each device, smallest memory first, and the smallest that fits; for servers, devices that fit come first."""
    if found.serves:
        yield from format_served_devices(found, width)
        return
    header = ("gpu", "memory", "process", "verdict", "left", "largest batch")
    yield from format_table(header, map(_device_cells, found.rows), width=width)
    yield ""
    reasons: dict[str, list[str]] = {}
    for row in found.rows:
        if row.cell is None:
            reasons.setdefault(row.reason, []).append(row.gpu)
    for reason, keys in reasons.items():
        yield f"{', '.join(keys)}: {reason}"
    yield describe_fitting(found)


def _device_cells(row: DeviceRow) -> tuple[str, ...]:
    if row.cell is None:
        return row.gpu, format_bytes(row.total_bytes), "-", "-", "-", "see below"
    left = row.total_bytes - row.cell.process_bytes
    room = format_bytes(left) if left >= 0 else f"-{format_bytes(-left)}"
    return (
        row.gpu,
        format_bytes(row.total_bytes),
        format_bytes(row.cell.process_bytes),
        row.cell.verdict,
        room,
        str(largest_batch(row)) if row.searched else "not known yet",
    )


# --------------------------------------------------------------------------------------------------------------- ranks


def format_ranks(found: RankReport, width: int | None = None) -> Iterator[str]:
    """Yield a row for each parallelism on each number of GPUs, with the figures of one GPU; then the fewest GPUs that suffice."""
    if found.serves:
        yield from format_served_ranks(found, width)
        return
    header = ("GPUs", "by", "process", "allocated", "verdict", "largest at the peak")
    yield from format_table(header, map(_rank_cells, found.rows), left=2, width=width)
    yield ""
    yield from describe_fewest(found)


def _rank_cells(row: RankRow) -> tuple[str, ...]:
    if row.cell is None:
        return f"{row.gpus}", row.words, "-", "-", "-", row.reason[:60]
    most = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in list(row.at_peak.items())[:2])
    sizes = (format_bytes(size) for size in (row.cell.process_bytes, row.cell.peak_allocated_bytes))
    return f"{row.gpus}", row.words, *sizes, row.cell.verdict, most


# -------------------------------------------------------------------------------------------------------------- budget


_MOST = 4  # operators of a row


def format_budgets(found: BudgetReport, width: int | None = None) -> Iterator[str]:
    """Return the steps as a table, and which of them has the lowest peak."""
    rows: list[tuple[str, ...]] = [("eager", *_peaks(found.eager), "-", "")]
    rows.append(("eager, checkpointing", *_peaks(found.checkpointing), "-", found.reason))
    rows += [_budget_row(point) for point in found.points]
    yield from format_table(("step", "allocated", "reserved", "computed again", "operators computed again"), rows, width=width)
    yield ""
    yield describe_budgets(found)
    yield "Allocated and reserved are peaks. Computed again: in the backward pass, of the forward FLOPs of compiled regions."


def _peaks(cell: Cell | None) -> tuple[str, str]:
    return ("-", "-") if cell is None else (format_bytes(cell.peak_allocated_bytes), format_bytes(cell.peak_reserved_bytes))


def _budget_row(point: BudgetPoint) -> tuple[str, ...]:
    title = f"compiled, budget {point.budget:g}"
    if point.peak_allocated_bytes is None or point.peak_reserved_bytes is None:
        return title, "-", "-", "-", point.reason
    share = "-" if point.recomputed_flops_share is None else f"{point.recomputed_flops_share:.0%}"
    again = ", ".join(point.recomputed[:_MOST]) + (", …" if len(point.recomputed) > _MOST else "")
    return title, format_bytes(point.peak_allocated_bytes), format_bytes(point.peak_reserved_bytes), share, again


# ------------------------------------------------------------------------------------------------------------- servers


FIGURES = ("verdict", "requests", "of tokens", "KV tokens", "longest", "weights", "KV cache")
NONE = ("-",) * len(FIGURES)


def format_served_devices(found: DeviceReport, width: int | None = None) -> Iterator[str]:
    """Yield a row for each device, those that hold the wanted requests first, then why devices have no row, and the smallest."""
    rows = ((row.gpu, format_bytes(row.total_bytes), *_figures(row.serve)) for row in found.rows)
    yield from format_table(("gpu", "memory", *FIGURES), rows, width=width)
    yield ""
    yield from _reasons((row.gpu, row.reason) for row in found.rows)
    yield describe_served_devices(found)


def format_served_ranks(found: RankReport, width: int | None = None) -> Iterator[str]:
    """Yield a row for each split of each number of GPUs, those that hold the wanted requests first; then the fewest GPUs.

    Requests are the total of all GPUs; tokens, weights and cache are per GPU.
    """
    rows = ((f"{row.gpus}", row.title, *_figures(row.serve)) for row in found.rows)
    yield from format_table(("GPUs", "by", *FIGURES), rows, left=2, width=width)
    yield ""
    yield from _reasons((f"{row.title} on {row.gpus}", row.reason) for row in found.rows)
    yield from describe_served_ranks(found)


def format_served_levers(found: LeverReport, width: int | None = None) -> Iterator[str]:
    """Yield the current server, each change with its requests and cache, and the query with the change."""
    if (base := found.serve) is None:
        return
    yield f"{STARTS[base.starts]} {base.requests_at_once:,.1f} requests of {base.length:,} tokens at once"
    if base.want is not None:
        yield want_line(base.want)
    yield found.search
    yield ""
    levers = [(row, row.serve) for row in found.rows if row.serve is not None]
    rows = (
        (row.title, f"{one.requests_at_once:,.1f}", f"{one.gained:+z,.1f}", f"{gib(one.kv_cache_bytes)} GiB", row.cost)
        for row, one in levers
    )
    if not levers:
        yield "Nothing that is known here makes room for more requests."
        return
    yield from format_table(("change", "requests", "gained", "KV cache", "costs"), rows, width=width)
    yield ""
    yield from (f"{row.title}: {row.query}" for row, _ in levers)


def _figures(found: ServedFigures | None) -> tuple[str, ...]:
    if found is None:
        return NONE
    return (
        verdict_words(found),
        f"{found.requests_at_once:,.1f}",
        f"{found.length:,}",
        f"{found.kv_tokens:,}",
        f"{found.longest:,}",
        f"{gib(found.weights_bytes)} GiB",
        f"{gib(found.kv_cache_bytes)} GiB",
    )


def _reasons(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield each reason once, with the names of the rows that have it."""
    reasons: dict[str, list[str]] = {}
    for name, reason in rows:
        if reason:
            reasons.setdefault(reason, []).append(name)
    yield from (f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


# ------------------------------------------------------------------------------------------------------------ commands


_QUERY = "same as for estimate; focus=DTYPE:BATCH selects one of several dtypes or batches"


def _adding(of_query: str = _QUERY, in_json: str = "print the result as JSON") -> Callable[[argparse.ArgumentParser], None]:
    """Return a function that adds a command's arguments to its parser."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_query(parser, of_query)
        parser.add_argument("--json", action="store_true", help=in_json)

    return add_arguments


def _printing(submit: Submit, lines: Lines, *, under: str | None = None, plans: bool = False) -> Command:
    """Return a function that runs a command: it prints the answer of a job (`print_growing`)."""

    def run(options: argparse.Namespace, make_client: MakeClient) -> int:
        return print_growing(options, make_client, submit, lines, under=under, plans=plans)

    return run


def _add_levers_arguments(parser: argparse.ArgumentParser) -> None:
    _adding()(parser)
    parser.add_argument("--with-compiled", action="store_true", help="also compile eager training: its trace takes longest")


def _run_levers(options: argparse.Namespace, make_client: MakeClient) -> int:
    def submit(client: JobClient, query: str) -> Job:
        return client.submit_levers(query, compiles=options.with_compiled)

    return print_growing(options, make_client, submit, format_levers, plans=True)


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Command]] = {
    "levers": (_add_levers_arguments, _run_levers),
    "limits": (_adding(), _printing(lambda client, query: client.submit_limits(query), format_limits)),
    "which": (
        _adding(f"{_QUERY}; gpu is ignored"),
        _printing(lambda client, query: client.submit_devices(query), format_devices, plans=True),
    ),
    "ranks": (
        _adding(f"{_QUERY}; parallel is ignored"),
        _printing(lambda client, query: client.submit_ranks(query), format_ranks, plans=True),
    ),
    "peak": (_add_peak_arguments, _run_peak),
    "budget": (
        _adding(_QUERY.replace("same as", "a training query as"), 'print {"budget": …} as JSON'),
        _printing(lambda client, query: client.submit_budget(query), format_budgets, under="budget"),
    ),
}

"""The command `ranks`: the work on one GPU and on several, by every way of training."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from sizer.base.units import format_bytes
from sizer.commands.arguments import add_query
from sizer.commands.job import MakeClient, print_growing
from sizer.commands.served_text import format_served_ranks
from sizer.commands.text import format_table
from sizer.report.decision import RankReport, RankRow, describe_fewest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_query(
        parser, "as of estimate, focus=DTYPE:BATCH names one of several dtypes or batches; its parallel does not count"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print on how many GPUs the work fits, what each of them holds, and the largest batch on the fewest."""
    return print_growing(options, make_client, lambda client, query: client.submit_ranks(query), format_ranks, plans=True)


def format_ranks(found: RankReport, width: int | None = None) -> Iterator[str]:
    """A row for each way of training on each number of GPUs, every figure of one of them; then the fewest that do."""
    if found.serves:
        yield from format_served_ranks(found, width)
        return
    header = ("GPUs", "by", "process", "allocated", "verdict", "largest at the peak")
    yield from format_table(header, map(_cells, found.rows), left=2, width=width)
    yield ""
    yield from describe_fewest(found)


def _cells(row: RankRow) -> tuple[str, ...]:
    if row.cell is None:
        return f"{row.gpus}", row.words, "-", "-", "-", row.reason[:60]
    most = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in list(row.at_peak.items())[:2])
    sizes = (format_bytes(size) for size in (row.cell.process_bytes, row.cell.peak_allocated_bytes))
    return f"{row.gpus}", row.words, *sizes, row.cell.verdict, most

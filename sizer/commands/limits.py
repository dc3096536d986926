"""The command `limits`: the largest batch, the longest sequence and the largest image that a device holds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from sizer.base.units import format_bytes
from sizer.commands.arguments import add_query
from sizer.commands.job import MakeClient, print_growing
from sizer.commands.text import format_table
from sizer.report.decision import Limit, LimitReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_query(parser, "as of estimate; focus=DTYPE:BATCH names one of several dtypes or batches")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print how far each size of the work can go."""
    return print_growing(options, make_client, lambda client, query: client.submit_limits(query), format_limits)


def format_limits(found: LimitReport, width: int | None = None) -> Iterator[str]:
    """A row for each size, all else being as it was asked for."""
    yield from format_table(("", "largest", "process", "why"), map(_cells, found.limits), width=width)


def _cells(limit: Limit) -> tuple[str, ...]:
    process = format_bytes(limit.cell.process_bytes) if limit.cell else "-"
    return limit.title, str(limit.interval), process, limit.reason

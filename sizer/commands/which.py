"""The command `which`: the work on every device of the catalogue."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from sizer.base.units import format_bytes
from sizer.commands.arguments import add_query
from sizer.commands.job import MakeClient, print_growing
from sizer.commands.served_text import format_served_devices
from sizer.commands.text import format_table
from sizer.report.decision import DeviceReport, DeviceRow, describe_fitting, largest_batch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_query(
        parser, "as of estimate, focus=DTYPE:BATCH names one of several dtypes or batches; its gpu does not count"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print where the work fits, what room it leaves, and the largest batch on each device."""
    return print_growing(options, make_client, lambda client, query: client.submit_devices(query), format_devices, plans=True)


def format_devices(found: DeviceReport, width: int | None = None) -> Iterator[str]:
    """A row for each device, smallest memory first, and the smallest that it fits; of a server those first that hold it."""
    if found.serves:
        yield from format_served_devices(found, width)
        return
    header = ("gpu", "memory", "process", "verdict", "left", "largest batch")
    yield from format_table(header, map(_cells, found.rows), width=width)
    yield ""
    reasons: dict[str, list[str]] = {}
    for row in found.rows:
        if row.cell is None:
            reasons.setdefault(row.reason, []).append(row.gpu)
    for reason, keys in reasons.items():
        yield f"{', '.join(keys)}: {reason}"
    yield describe_fitting(found)


def _cells(row: DeviceRow) -> tuple[str, ...]:
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
        _largest(row),
    )


def _largest(row: DeviceRow) -> str:
    """The largest batch of a row."""
    return str(largest_batch(row)) if row.searched else "not known yet"

"""The command `placement`: whether a model's tensors would all be on the right device."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from sizer.base.units import format_bytes
from sizer.commands.arguments import add_query, query_of
from sizer.commands.terminal import format_table, print_list, to_printable
from sizer.commands.waiting import MakeClient, start_worker_client, wait
from sizer.placement.report import PlacementReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_query(parser, "same as for estimate; the first dtype is used")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the tensors by device and dtype, and the mistakes that were found."""
    query = query_of(options)
    with contextlib.closing(start_worker_client(make_client)) as client:
        found = wait(client.submit_placement(query))
    print_list(options, found.to_dict(), format_placement(found))
    return 0


def format_placement(found: PlacementReport) -> Iterator[str]:
    """Yield the tensors by kind, device and dtype, and the findings, the worst first."""
    yield to_printable(f"{found.name} ({found.class_name})")
    rows = (
        (group.kind, group.device, group.dtype, f"{group.tensors:,}", f"{group.elements:,}", format_bytes(group.bytes))
        for group in found.groups
    )
    yield from format_table(("", "device", "dtype", "tensors", "elements", "size"), rows, left=3)
    yield ""
    for finding in sorted(found.findings, key=lambda one: not one.breaks):
        yield to_printable(f"{finding.problem}{'' if finding.breaks else ' (works, but)'}: {finding.what}")
        yield to_printable(f"    where: {finding.where}")
        yield to_printable(f"    why:   {finding.why}")
        yield to_printable(f"    do:    {finding.todo}")
    if not found.findings:
        yield "No placement mistakes were found."
    if found.reason is not None:
        yield to_printable(f"The forward pass was not followed to its end: {found.reason}")
    for note in found.notes:
        yield to_printable(f"Assumed: {note}")


COMMANDS = {"placement": (add_arguments, run)}

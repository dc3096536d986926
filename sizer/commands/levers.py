"""The command `levers`: what would make the work smaller, what each change saves, and the fewest that make it fit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sizer.base.units import format_bytes
from sizer.commands.arguments import add_query
from sizer.commands.job import MakeClient, print_growing
from sizer.commands.served_text import format_served_levers
from sizer.commands.text import format_table
from sizer.report.decision import LeverReport, LeverRow, saves

if TYPE_CHECKING:
    from sizer.service.client import JobClient
    from sizer.service.job import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_query(parser, "as of estimate; focus=DTYPE:BATCH names one of several dtypes or batches")
    parser.add_argument("--with-compiled", action="store_true", help="compile eager training, too: its trace takes longest")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print what each change comes to, and the smallest set of them that makes the work fit."""
    def submit(client: JobClient, query: str) -> Job:
        return client.submit_levers(query, compiles=options.with_compiled)

    return print_growing(options, make_client, submit, format_levers, plans=True)


def format_levers(found: LeverReport, width: int | None = None) -> Iterator[str]:
    """The levers as a table, the smallest set, what does not help, and the code of those that save something."""
    if found.base is None:
        yield from format_served_levers(found, width)
        return
    base = found.base
    yield f"{base.dtype} at batch {base.batch}: process {format_bytes(base.process_bytes)}, {base.verdict}"
    yield ""
    rows = sorted(found.rows, key=lambda row: row.cell.process_bytes if row.cell else base.process_bytes)
    yield from format_table(
        ("change", "process", "saves", "verdict", "costs"), (_cells(row, base.process_bytes) for row in rows), width=width
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


def _cells(row: LeverRow, base_bytes: int) -> tuple[str, ...]:
    if row.cell is None:
        return row.title, "-", "-", "-", "see below"
    saved = base_bytes - row.cell.process_bytes
    text = format_bytes(saved) if saved >= 0 else f"-{format_bytes(-saved)}"
    return row.title, format_bytes(row.cell.process_bytes), text, row.cell.verdict, row.cost

"""The command `budget`: the peak of a compiled training step over its activation memory budget."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from sizer.base.units import format_bytes
from sizer.commands.arguments import add_query
from sizer.commands.job import MakeClient, print_growing
from sizer.commands.text import format_table
from sizer.report.decision import BudgetPoint, BudgetReport, Cell, describe_budgets

_MOST = 4  # operators of a row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_query(parser, "as of estimate, of training; focus=DTYPE:BATCH names one of several dtypes or batches")
    parser.add_argument("--json", action="store_true", help='print {"budget": …} as JSON')


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the eager step, checkpointing and the compiled step at each budget."""
    return print_growing(
        options, make_client, lambda client, query: client.submit_budget(query), format_budgets, under="budget"
    )


def format_budgets(found: BudgetReport, width: int | None = None) -> Iterator[str]:
    """Return the steps as a table, and which of them has the lowest peak."""
    rows: list[tuple[str, ...]] = [("eager", *_peaks(found.eager), "-", "")]
    rows.append(("eager, checkpointing", *_peaks(found.checkpointing), "-", found.reason))
    rows += [_row(point) for point in found.points]
    yield from format_table(("step", "allocated", "reserved", "computed again", "what is computed again"), rows, width=width)
    yield ""
    yield describe_budgets(found)
    yield "Allocated and reserved are peaks. Computed again: in the backward pass, of the forward FLOPs of compiled regions."


def _peaks(cell: Cell | None) -> tuple[str, str]:
    return ("-", "-") if cell is None else (format_bytes(cell.peak_allocated_bytes), format_bytes(cell.peak_reserved_bytes))


def _row(point: BudgetPoint) -> tuple[str, ...]:
    title = f"compiled, budget {point.budget:g}"
    if point.peak_allocated_bytes is None or point.peak_reserved_bytes is None:
        return title, "-", "-", "-", point.reason
    share = "-" if point.recomputed_flops_share is None else f"{point.recomputed_flops_share:.0%}"
    again = ", ".join(point.recomputed[:_MOST]) + (", …" if len(point.recomputed) > _MOST else "")
    return title, format_bytes(point.peak_allocated_bytes), format_bytes(point.peak_reserved_bytes), share, again

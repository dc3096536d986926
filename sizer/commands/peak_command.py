"""The command `peak`: live tensors at the peak of allocated memory, PyTorch's snapshot of it, and a script that does the work."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from sizer.base.codec import encode
from sizer.base.errors import RequestError, quote
from sizer.base.units import format_bytes
from sizer.commands.arguments import add_query, query_of
from sizer.commands.terminal import format_table, print_list, terminal_width, to_printable
from sizer.commands.waiting import MakeClient, in_focus, start_worker_client, wait
from sizer.report.peak import PeakReport, TensorGroup, with_children

MODULES = 20  # rows
DEPTH = 3  # of the modules' paths


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
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


COMMANDS = {"peak": (add_arguments, run)}

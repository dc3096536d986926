"""The command `diff`: how two saved reports differ, by phase, category, module and line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from sizer.base.errors import RequestError
from sizer.base.units import format_bytes
from sizer.commands.job import MakeClient
from sizer.commands.text import to_printable
from sizer.running.difference import Tolerance, find_changes, format_changes, grown, read_report
from sizer.running.sizes import read_share, read_size

NO_FIT = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("before", type=Path, help="JSON of `sizer run --json FILE` or `sizer estimate --json`")
    parser.add_argument("after", type=Path, help="the JSON to compare with it")
    parser.add_argument(
        "--fail-over", metavar="MORE", type=tolerance, help="exit with 5 if a peak grew by more, such as 1%% or 64MiB"
    )
    parser.add_argument("--json", action="store_true", help="print the changes as JSON")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the changes, and return 5 if a peak grew more than is allowed."""
    changes = find_changes(read_report(options.before), read_report(options.after))
    if options.json:
        print(json.dumps([dataclasses.asdict(change) | {"more_bytes": change.more_bytes} for change in changes]))
    else:
        print(to_printable("\n".join(format_changes(changes))))
    over = [] if options.fail_over is None else grown(changes, options.fail_over)
    for change in over:
        print(
            f"sizer: {change.name} grew from {format_bytes(change.before_bytes)} to {format_bytes(change.after_bytes)}",
            file=sys.stderr,
        )
    return NO_FIT if over else 0


def tolerance(text: str) -> Tolerance:
    """Return a tolerance of a text such as 1% or 64MiB. Raises RequestError for any other form."""
    try:
        return Tolerance(share=read_share(text)) if text.endswith("%") else Tolerance(bytes=read_size(text))
    except ValueError as error:
        raise RequestError("--fail-over", todo=str(error)) from None

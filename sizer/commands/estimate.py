"""The command `estimate`: what a model needs, from its architecture alone."""

from __future__ import annotations

import argparse
import contextlib
import json

from sizer.commands.job import MakeClient, wait
from sizer.commands.query import query_of
from sizer.errors import TraceError
from sizer.memory.report import Report
from sizer.terminal.report import format_explanation, format_report


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Prints the report on a query. Raises TraceError where the model was counted, and no step could be traced."""
    query = query_of(options)
    with contextlib.closing(make_client()) as client:
        report = wait(client.submit(query))
    _print(report, options)
    if report.failures and not report.estimates:
        raise TraceError(
            "the model was counted, but no step could be traced",
            given=", ".join(report.failures),
            todo=next(iter(report.failures.values())),
        )
    return 0


def _print(report: Report, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(report.to_dict(), allow_nan=False))  # ASCII, whatever the terminal's encoding
    elif options.csv:
        print(report.to_csv().replace("\r\n", "\n"), end="")  # stdout writes the platform's own line ends
    else:
        print(format_report(report))
        if options.explain:
            print("\n" + format_explanation(report))

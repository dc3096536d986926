"""The command `estimate`: print what a model needs, from its architecture alone.

The text of an answer is kept. The same command then prints it again, and imports neither numpy nor what reads a report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import TYPE_CHECKING

from sizer.commands.arguments import add_query, query_of
from sizer.commands.job import MakeClient, wait
from sizer.commands.text import terminal_width
from sizer.errors import TraceError
from sizer.service.kept_reports import KeptReports
from sizer.service.tape_folder import default_folder

if TYPE_CHECKING:
    from sizer.memory.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_query(parser, 'such as "arch=torchvision:resnet50&batch=1,32&gpu=rtx-4090"')
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the report as JSON")
    form.add_argument("--csv", action="store_true", help="print the estimates as CSV")
    form.add_argument(
        "--explain", action="store_true", help="say how it was computed: kernels, workspaces, what is modelled"
    )


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the report on a query.

    Raises:
        TraceError: The model was counted, and no step could be traced.
    """
    query, form, kept = query_of(options), _form(options), KeptReports(default_folder())
    if (text := kept.find_text(query, form)) is not None:
        print(text, end="")
        return 0
    report = kept.find(query)
    if report is None:
        with contextlib.closing(make_client()) as client:
            report = wait(client.submit(query))
        kept.keep(query, report)
    text = _format(report, options)
    kept.keep_text(query, form, report, text)
    print(text, end="")
    if report.failures and not report.estimates:
        raise TraceError(
            "the model was counted, but no step could be traced",
            given=", ".join(report.failures),
            todo=next(iter(report.failures.values())),
        )
    return 0


def _form(options: argparse.Namespace) -> str:
    """Return a name for all that the text of a report depends on except the report."""
    if options.json or options.csv:
        return "json" if options.json else "csv"
    return f"{'explained' if options.explain else 'text'}-{terminal_width()}"


def _format(report: Report, options: argparse.Namespace) -> str:
    if options.json:
        return f"{json.dumps(report.to_dict(), allow_nan=False)}\n"  # ASCII, whatever the terminal's encoding
    if options.csv:
        return report.to_csv().replace("\r\n", "\n")  # stdout writes the platform's own line ends
    from sizer.commands.report_text import format_explanation, format_report

    parts = (format_report(report, terminal_width()), *([format_explanation(report)] if options.explain else []))
    return "\n\n".join(parts) + "\n"

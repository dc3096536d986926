"""The command `estimate`: print the memory that a model needs, from its architecture alone.

The text of an answer is stored. The same command later prints the stored text, without importing numpy or the report's code.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sizer.base.errors import JobError, SizerError, TraceError
from sizer.commands.arguments import add_query, query_of
from sizer.commands.terminal import terminal_width
from sizer.commands.waiting import MakeClient, answers_alone, raise_ended, shown_progress, wait
from sizer.service.stored_reports import REPORT, StoredReports, is_whole
from sizer.service.variables import default_folder

if TYPE_CHECKING:
    from sizer.report.report import Report


WORKER = "sizer.commands.estimate_worker"

NO_FIT = 5  # exit status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_query(parser, 'such as "arch=torchvision:resnet50&batch=1,32&gpu=rtx-4090"')
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the report as JSON")
    form.add_argument("--csv", action="store_true", help="print the estimates as CSV")
    form.add_argument(
        "--explain", action="store_true", help="print how the figures were computed: kernels, workspaces, modelled parts"
    )
    parser.add_argument(
        "--fail-unless-fits", action="store_true", help="exit with 5 unless every dtype and batch surely fits"
    )


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the report on a query.

    Raises:
        TraceError: The model was counted, and no step could be traced.
    """
    query, kept, form, width = query_of(options), StoredReports(default_folder()), _form(options), terminal_width()
    name = f"{form}-{width}"
    judges = options.fail_unless_fits  # the text does not contain whether all fits
    if not judges and (text := kept.find_text(query, name)) is not None:
        print(text, end="")
        return 0
    if (report := kept.find(query)) is not None or not answers_alone(make_client):
        found = _ask_server(query, report, form, width, kept, make_client)
    else:
        found = _ask_worker(query, form, width, kept)
    print(found.text, end="")
    if found.ended is not None:
        raise_ended(found.ended, "the partial result is printed above")
    if found.failures:
        raise TraceError(
            "the model was counted, but no step could be traced",
            given=", ".join(found.failures),
            todo=next(iter(found.failures.values())),
        )
    return NO_FIT if judges and not found.fits else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A report's text, its failures if no step could be traced, whether all fits, and the error that ended it early."""

    text: str
    failures: dict[str, str]
    fits: bool
    ended: SizerError | None = None


def _form(options: argparse.Namespace) -> str:
    if options.json or options.csv:
        return "json" if options.json else "csv"
    return "explained" if options.explain else "text"


def _ask_worker(query: str, form: str, width: int | None, kept: StoredReports) -> _Found:
    """Return a worker's answer."""
    from sizer.processes.wire import error_from_wire
    from sizer.service.local.asking import ask

    with shown_progress() as show:
        answer = ask(WORKER, query, {"form": form, "width": width}, show)
    if answer["report"] is not None:
        kept.keep_text(query, REPORT, answer["report"])
        kept.keep_text(query, f"{form}-{width}", answer["text"])
    ended = None if answer["ended"] is None else error_from_wire(answer["ended"])
    return _Found(text=answer["text"], failures=answer["failures"], fits=answer["fits"], ended=ended)


def _ask_server(
    query: str, report: Report | None, form: str, width: int | None, kept: StoredReports, make_client: MakeClient
) -> _Found:
    """Return the same of a report that is known in another form, or that a job server makes."""
    from sizer.commands.report_text import format_as

    ended = None
    if report is None:
        with contextlib.closing(make_client()) as client:
            job = client.submit(query)
            try:
                report = wait(job)
            except JobError as error:
                if job.partial is None or not job.partial.estimates:
                    raise
                report, ended = job.partial, error
        kept.keep(query, report)
    text = format_as(report, form, width)
    if is_whole(report):
        kept.keep_text(query, f"{form}-{width}", text)
    failures = {} if report.estimates else report.failures
    return _Found(text=text, failures=failures, fits=report.all_fit, ended=ended)


COMMANDS = {"estimate": (add_arguments, run)}

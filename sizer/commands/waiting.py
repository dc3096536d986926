"""A job of the service as the command line waits for it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from sizer.base.errors import SizerError, TimeLimitError
from sizer.catalogue.modes import MODES
from sizer.commands.arguments import query_of
from sizer.commands.terminal import print_list, terminal_width, to_printable
from sizer.query.request import check_traced
from sizer.query.text import format_query, parse_query
from sizer.service.settings import Settings
from sizer.service.stored_reports import StoredReports
from sizer.service.variables import JOB_SECONDS, default_folder

if TYPE_CHECKING:
    from sizer.service.client import JobClient


POLL_SECONDS = 0.1

MakeClient = Callable[[], "JobClient"]
Submit = Callable[["JobClient", str], Any]
Lines = Callable[[Any, int | None], Iterable[str]]  # the lines of an answer, for a terminal of this width


def start_client() -> JobClient:
    """Return a client with its own job server. Stored answers need neither, so they are imported late."""
    from sizer.service.client import JobClient

    return JobClient()


def answers_alone(make_client: MakeClient) -> bool:
    """Return True if a worker may answer instead of a job server: no other client was given, and this system has one user."""
    if make_client is not start_client:
        return False
    from sizer.service.local.asking import is_private

    return is_private()


def start_worker_client(make_client: MakeClient) -> JobClient:
    """Return a client with a worker for each question, which starts sooner than a job server; the given one if none may answer."""
    if not answers_alone(make_client):
        return make_client()
    from sizer.service.client import JobClient
    from sizer.service.local.connection import WorkerConnection

    connect: Any = WorkerConnection  # it has the methods of a Connection
    return JobClient(replace(Settings(), spares=0), connect=connect)


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[str], None]]:
    """Provide a function that shows a line of progress on a terminal, and clear the line at the end."""
    shown = sys.stderr.isatty()
    try:
        yield lambda text: print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True) if shown else None
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def wait(job: Any) -> Any:
    """Return the result of a job; show its progress on a terminal. Raises the job's error."""
    with shown_progress() as show:
        while (result := job.result(timeout=POLL_SECONDS)) is None:
            show(job.progress)
    return result


def in_focus(client: JobClient, query: str, *, plans: bool = False) -> str:
    """Return the query of one dtype and batch size: its own, those of focus=, else the report's focus.

    The report's focus is printed on stderr. A server has no dtype or batch size: its query is returned unchanged if the command
    `plans` servers. Raises SizerError.
    """
    request = parse_query(query)
    if plans and MODES[request.mode].serves:
        return query
    check_traced(request)
    if request.focus is not None or (len(request.dtypes), len(request.batches)) == (1, 1):
        return query
    report = StoredReports(default_folder()).find(query) or wait(client.submit(query))
    if (focus := report.focus) is None:  # no step can be traced: any further question reports why
        return format_query(replace(request, focus=(request.dtypes[0], request.batches[0])))
    print(f"{focus.dtype} at batch {focus.batch}; name another with focus={focus.dtype}:{focus.batch}", file=sys.stderr)
    return format_query(replace(request, focus=(focus.dtype, focus.batch)))


def print_growing(
    options: argparse.Namespace,
    make_client: MakeClient,
    submit: Submit,
    lines: Lines,
    *,
    under: str | None = None,
    plans: bool = False,
) -> int:
    """Print the growing answer of a job for a command's query; as JSON `under` this key, if it is given.

    `plans` says whether the command also answers for a server. If the job ends early, print the partial answer and raise the
    error.
    """
    from sizer.base.codec import encode

    query, ended = query_of(options), None
    with contextlib.closing(start_worker_client(make_client)) as client:
        job = submit(client, in_focus(client, query, plans=plans))
        try:
            found = wait(job)
        except SizerError as error:
            if (found := job.partial) is None:
                raise
            ended = error
    plain = encode(found)
    print_list(options, plain if under is None else {under: plain}, map(to_printable, lines(found, terminal_width())))
    if ended is not None:
        raise_ended(ended, "the same command continues from here")
    return 0


def raise_ended(ended: SizerError, found: str) -> NoReturn:
    """Raise the error that ended a job after something was printed; `found` describes the printed part if time was the limit."""
    if isinstance(ended, TimeLimitError):
        todo = f"{found}; {JOB_SECONDS.name} gives a job more seconds"
        raise TimeLimitError(ended.what, todo=todo) from ended
    raise ended

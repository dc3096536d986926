"""The client's side of the direct path: start a worker for one question, show its progress, return its answer."""

from __future__ import annotations

import os
from collections.abc import Callable

from sizer.base.errors import ConfigError, JobError, quote
from sizer.catalogue.sources import fetch
from sizer.processes.process import ChildProcess
from sizer.processes.wire import clip_progress, error_from_wire, from_line
from sizer.query.text import complete_query, parse_query
from sizer.service.settings import Settings, is_public
from sizer.service.variables import broker_url


def is_private() -> bool:
    """Return True if this system can fork, no strangers use it, and no broker has workers on other nodes."""
    return hasattr(os, "fork") and not is_public() and broker_url() is None


def ask(worker: str, query: str, details: dict, show: Callable[[str], None]) -> dict:
    """Return the answer of a worker to a query.

    Args:
        worker: The module that is run. It reads a message of the query, a fetched config and the details, and writes its answer.
        query: The query. The config of an architecture from the hub is fetched here, since the worker is offline.
        details: More keys of the message.
        show: Called with each line of progress.

    Raises:
        SizerError: The error of the worker, or that of the hub.
        JobError: The worker ended without an answer.
    """
    settings = Settings()
    message = {"query": complete_query(parse_query(query)), "config_text": _fetched_config(query, show), **details}
    process = ChildProcess(worker, *settings.to_arguments(), name="the worker")
    answer = None
    try:
        process.send(message)
        process.close_stdin()
        for line in process.lines(2 * settings.result_bytes):
            answer = from_line(line)
            if "progress" in answer:
                show(clip_progress(answer["progress"]))
    except (OSError, ValueError) as error:
        raise JobError(f"a message of the worker was not understood ({quote(str(error))})") from error
    finally:
        process.kill()
        status = process.wait()
    if answer is None or not answer.keys() & {"answer", "error"}:
        raise JobError(f"the worker ended (exit status {status}){process.saying()}", todo="try again")
    if "error" in answer:
        raise error_from_wire(answer["error"])
    return answer["answer"]


def _fetched_config(query: str, show: Callable[[str], None]) -> str | None:
    """Return the config of an architecture from the hub, None for other sources."""
    request = parse_query(query)
    if not request.is_fetched:
        return None
    show(f"fetching the config of {request.name}")
    try:
        return fetch(request.source, request.name, request.revision).decode()
    except UnicodeDecodeError:
        raise ConfigError("config is not UTF-8", given=quote(request.name)) from None

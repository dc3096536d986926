"""The command `startup`: what a server's startup log or error says, and how the plan for the same flags differs."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from sizer.base.errors import RequestError, quote
from sizer.commands.arguments import add_query, query_of
from sizer.commands.terminal import to_printable
from sizer.commands.waiting import MakeClient, wait
from sizer.serving.startup import MAX_CHARACTERS, StartupLog, compare, read_startup, refitted
from sizer.serving.words import headline

STDIN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_query(parser, 'the model and the device: "arch=hf:qwen3-8b&gpu=a100-40gb"; flags are read from the log')
    parser.add_argument("--log", metavar="FILE", default=STDIN, help="the log, or - for stdin (default)")
    parser.add_argument("--json", action="store_true", help="print the figures and the differences as JSON")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the figures of a log and, line by line, how the plan differs.

    Raises:
        RequestError: The log is of another program, or cannot be read.
    """
    log = read_startup(_read(options.log))
    query = _joined(query_of(options), log)
    _ask(options, query)
    with contextlib.closing(make_client()) as client:
        report = wait(client.submit(query))
    lines, constants = compare(log, report.serve), refitted(log, report.serve)
    if options.json:
        data = {"engine": log.engine, "figures": log.figures, "failure": log.failure, "query": query, "differences": lines}
        print(json.dumps(data | {"refitted": constants}))
        return 0
    said = [f"The log: {log.engine}{f', {log.failure}' if log.failure else ''}", *(f"  {line}" for line in lines)]
    asked = [f"The plan: {headline(report.serve)}", f"The question: {query}"]
    if constants:
        keys = "&".join(f"{key}={value}" for key, value in constants.items())
        asked.append(f"With this machine's own constants: {query}&{keys}")
    print(to_printable("\n".join([*said, *asked])))
    return 0


def _ask(options: argparse.Namespace, query: str) -> None:
    """Make the query the one of the options, so that the link below the answer has the log's flags."""
    for name in vars(options):
        if name.startswith("key_"):
            setattr(options, name, None)
    options.query = query


def _joined(query: str, log: StartupLog) -> str:
    """Return the query with the log's flags, except those that it has itself."""
    own = {item.partition("=")[0] for item in query.removeprefix("?").split("&")}
    read = [item for item in log.query().split("&") if item.partition("=")[0] not in own]
    return "&".join([query.removeprefix("?"), *read])


def _read(name: str) -> str:
    """Return the text of a file or of stdin. Raises RequestError if it cannot be read."""
    try:
        if name == STDIN:
            return sys.stdin.read(MAX_CHARACTERS + 1)
        with Path(name).open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_CHARACTERS + 1)
    except OSError as error:
        raise RequestError("log cannot be read", given=quote(name), todo=error.strerror) from error


COMMANDS = {"startup": (add_arguments, run)}

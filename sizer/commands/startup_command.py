"""The command `startup`: the figures of a server's startup log or error, and their difference from the plan for the same flags.

If the input is a command that starts a server instead of a log, the command's plan is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from sizer.base.errors import RequestError, quote
from sizer.commands.arguments import add_query, query_of
from sizer.commands.terminal import to_printable
from sizer.commands.waiting import MakeClient, start_worker_client, wait
from sizer.serving.launch import Launch, is_launch, read_launch, with_command
from sizer.serving.startup import MAX_CHARACTERS, StartupLog, compare, explain, is_startup, read_startup, refitted
from sizer.serving.words import headline, sum_line

STDIN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    example = '"arch=hf:qwen3-8b&gpu=a100-40gb"'
    add_query(parser, f"keys that the log lacks, or that differ from it, such as the device: {example}", is_optional=True)
    parser.add_argument("--log", metavar="FILE", default=STDIN, help="the log, or the server's command; - for stdin (default)")
    parser.add_argument("--json", action="store_true", help="print the figures and the differences as JSON")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the figures of a log and, line by line, how the plan differs.

    Raises:
        RequestError: The log is of another program, or cannot be read, or is given in the place of the query.
    """
    if options.log == STDIN and not options.query.endswith(".json") and os.path.isfile(options.query):
        name = quote(options.query)
        raise RequestError("the query is a file", given=name, allowed="key=value with & between", todo=f"write --log {name}")
    text = _read(options.log)
    if is_launch(text) and not is_startup(text):
        return _answer_launch(options, make_client, read_launch(text))
    log = with_command(read_startup(text), text)
    asked = query_of(options)
    own = _keys(asked.removeprefix("?"))
    if log.arch is None and "arch" not in own and log.failure and not options.json:
        said = [f"The log: {log.engine}, {log.failure}", *(f"  {line}" for line in explain(log))]
        print(to_printable("\n".join(said)))
    query, missing = _joined(asked, log)
    _ask(options, query)
    with contextlib.closing(start_worker_client(make_client)) as client:
        report = wait(client.submit(query))
    on_device = log.gpu is not None or "gpu" in own
    lines = compare(log, report.serve, on_device=on_device)
    constants = refitted(log, report.serve) if on_device else {}
    if options.json:
        data = {"engine": log.engine, "figures": log.figures, "failure": log.failure, "query": query, "differences": lines}
        print(json.dumps(data | {"refitted": constants, "missing": missing, "remarks": log.remarks()}))
        return 0
    said = [f"The log: {log.engine}{f', {log.failure}' if log.failure else ''}"]
    said += [f"  {line}" for line in (*lines, *log.remarks(), *missing)]
    if on_device or log.engine == "llama.cpp":
        said.append(f"The plan: {headline(report.serve)}")
    said.append(f"The question: {query}")
    if constants:
        keys = "&".join(f"{key}={value}" for key, value in constants.items())
        said.append(f"With this machine's own constants: {query}&{keys}")
    print(to_printable("\n".join(said)))
    return 0


def _answer_launch(options: argparse.Namespace, make_client: MakeClient, launch: Launch) -> int:
    """Print the flags read from a server's launch command, and its plan.

    Raises:
        RequestError: Neither the command nor the query names a model.
    """
    query = query_of(options).removeprefix("?")
    own = _keys(query)
    if "arch" not in own and launch.arch is None:
        given = f"the folder {quote(launch.model)}" if launch.model else "no model"
        raise RequestError("the command's model is not known", given=given, todo="write arch=hf:… or hub:…")
    items = ({} if launch.arch is None else {"arch": launch.arch}) | dict(launch.items)
    read = [f"{key}={value}" for key, value in items.items() if key not in own]
    query = "&".join([*read, *([query] if query else [])])
    _ask(options, query)
    with contextlib.closing(start_worker_client(make_client)) as client:
        report = wait(client.submit(query))
    missing = [] if "gpu" in own else [f"device: a command does not name it, {report.gpu.key} is taken; write gpu="]
    if options.json:
        data = {"engine": launch.engine, "query": query, "read": dict(launch.read), "unmatched": launch.unmatched}
        print(json.dumps(data | {"missing": missing}))
        return 0
    said = [f"The command: {launch.title}", *(f"  {given} → {means}" for given, means in launch.read)]
    said += [f"  not counted: {line}" for line in launch.unmatched]
    said += [f"  {line}" for line in missing]
    said += [f"The plan: {headline(report.serve)}", f"  {sum_line(report.serve)}", f"The question: {query}"]
    print(to_printable("\n".join(said)))
    return 0


def _keys(query: str) -> set[str]:
    """Return the keys that a query has."""
    own = {item.partition("=")[0] for item in query.split("&") if item}
    return own | ({"arch"} if query and "=" not in query.partition("&")[0] else set())  # only "qwen3-8b"


def _ask(options: argparse.Namespace, query: str) -> None:
    """Replace the query in the options, so that the link below the answer has the log's flags."""
    for name in vars(options):
        if name.startswith("key_"):
            setattr(options, name, None)
    options.query = query


def _joined(query: str, log: StartupLog) -> tuple[str, list[str]]:
    """Return the query with the log's keys added, except keys that it has, and a line for each missing fact.

    Raises:
        RequestError: Neither names a model.
    """
    query = query.removeprefix("?")
    own = _keys(query)
    missing = log.missing(own)
    if "arch" not in own and log.arch is None:
        given = missing[0].partition("; ")[0].removeprefix("model: ")
        raise RequestError("the log's model is not known", given=given, todo="write arch=hf:… or hub:…")
    found = {"arch": log.arch, "gpu": log.gpu}
    items = [f"{key}={value}" for key, value in found.items() if key not in own and value is not None]
    read = [item for item in log.query().split("&") if item.partition("=")[0] not in own]
    return "&".join([*items, *([query] if query else []), *read]), missing


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

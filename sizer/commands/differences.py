"""The commands `compare` and `diff`: how several questions differ, and how two saved reports do."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from sizer.base.errors import RequestError, SizerError, TraceError
from sizer.base.units import format_both, format_bytes
from sizer.commands.arguments import describe_keys, question_of
from sizer.commands.figures import TITLES
from sizer.commands.terminal import format_table, terminal_width, to_printable
from sizer.commands.waiting import MakeClient, wait
from sizer.query.request import Request
from sizer.query.text import format_query, read_questions
from sizer.report.side_by_side import FIGURES, Side, SideBySide, side_by_side, side_of
from sizer.running.difference import Tolerance, find_changes, format_changes, grown, read_report, read_share, read_size
from sizer.service.client import JobClient
from sizer.serving.words import VERDICTS

LONGEST = 40  # characters of a value: a config has thousands


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog, parser.formatter_class = describe_keys(), argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "queries",
        metavar="QUERY",
        nargs="+",
        help="two to four queries or files of estimate; focus=DTYPE:BATCH selects the compared cell",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the figures as JSON")
    form.add_argument("--csv", action="store_true", help="print the figures as CSV, a row for each question")


def run_compare(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the answers side by side; the first question without an answer decides the exit status."""
    requests = read_questions([question_of(text) for text in options.queries])
    with contextlib.closing(make_client()) as client:
        answers = [_answer(client, request) for request in requests]
    found = side_by_side(requests, [side for side, _ in answers])
    if options.json:
        print(json.dumps(found.to_dict(), allow_nan=False))
    elif options.csv:
        print(found.to_csv().replace("\r\n", "\n"), end="")  # stdout writes the platform's own line ends
    else:
        print(to_printable("\n".join(format_comparison(found, terminal_width()))))
    return next((status for _, status in answers if status), 0)


def _answer(client: JobClient, request: Request) -> tuple[Side, int]:
    """Return the figures of one question, and the exit status of that question."""
    try:
        side = side_of(request, wait(client.submit(format_query(request))))
    except SizerError as error:
        return side_of(request, None, str(error)), error.exit_status
    return side, TraceError.exit_status if side.error else 0


def format_comparison(found: SideBySide, width: int | None = None) -> Iterator[str]:
    """Yield lines with the keys in which the questions differ, then the figures, also as differences from the first."""
    numbers = [str(number) for number in range(1, len(found.questions) + 1)]
    rows = [(key, *map(_clip, values)) for key, values in found.differ.items()]
    yield from format_table(("", *numbers), rows, width=width)
    same = ", ".join(f"{key}={_clip(value)}" for key, value in found.same.items())
    yield from ("", f"The same in all: {same}", "")
    compared = [text for number in numbers[1:] for text in (number, f"{number} - 1")]
    yield from format_table(("", numbers[0], *compared), _figures(found), width=width)
    for number, side in zip(numbers, found.questions, strict=True):
        if side.error:
            yield f"{number} has no figures: {side.error}"


def _figures(found: SideBySide) -> Iterator[list[str]]:
    stepping, serving = "largest_batch" in found.figures, "kv_tokens" in found.figures
    if stepping:
        yield ["dtype", *_cells(found, lambda side: side.dtype or "-")]
        yield ["batch", *_cells(found, lambda side: "-" if side.batch is None else str(side.batch))]
    if serving:
        yield ["tokens of a request", *_cells(found, partial(_size, name="request_tokens", like=0))]
    for name in found.figures:
        if name != "largest_batch":
            words = TITLES.get(name, name.replace("_", " ").removesuffix(" bytes"))
            yield [words, *_cells(found, partial(_size, name=name, like=found.largest_bytes), name)]
    yield ["verdict", *_cells(found, _verdict)]
    if stepping:
        yield ["largest batch", *_cells(found, _largest, FIGURES[-1])]


def _verdict(side: Side) -> str:
    return side.verdict or ("-" if side.starts is None else VERDICTS[side.starts])


def _cells(found: SideBySide, text: Callable[[Side], str], figure: str | None = None) -> Iterator[str]:
    """Yield the cells of a row: the first question's, then each other question's with its difference from the first, if any."""
    first, *others = found.questions
    yield text(first)
    for side in others:
        yield text(side)
        difference = None if figure is None else side.differences.get(figure)
        yield "" if figure is None or difference is None else _signed(difference, figure, found.largest_bytes)


def _size(side: Side, name: str, like: int) -> str:
    value = getattr(side, name)
    if value is None:
        return "-"
    return format_both(value, like=like) if name.endswith("_bytes") else f"{value:,}"


def _signed(difference: float, name: str, like: int) -> str:
    if not difference:
        return "0"
    text = format_bytes(int(difference), like=like) if name.endswith("_bytes") else f"{round(difference, 2):,}"
    return text if difference < 0 else f"+{text}"


def _largest(side: Side) -> str:
    if side.fits is None:
        return "-"
    return str(side.interval)


def _clip(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


# ---------------------------------------------------------------------------------------------------------------- diff


NO_FIT = 5


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("before", type=Path, help="JSON of `sizer run --json FILE` or `sizer estimate --json`")
    parser.add_argument("after", type=Path, help="the JSON to compare with it")
    parser.add_argument(
        "--fail-over", metavar="MORE", type=tolerance, help="exit with 5 if a peak grew by more, such as 1%% or 64MiB"
    )
    parser.add_argument("--json", action="store_true", help="print the changes as JSON")


def run_diff(options: argparse.Namespace, make_client: MakeClient) -> int:
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


COMMANDS = {
    "compare": (add_compare_arguments, run_compare),
    "diff": (add_diff_arguments, run_diff),
}

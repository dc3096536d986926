"""The command line.

    python -m sizer estimate "arch=torchvision:resnet50&batch=1,32" [--config FILE] [--explain | --json | --csv]
    python -m sizer measure "arch=torchvision:resnet50&dtype=float32&batch=32" --device cuda:0|mps|cpu [--json]
    python -m sizer ledger [--json | --csv | --path] [--import FILE]
    python -m sizer gpus | models | devices   [--json]
    python -m sizer devices --demonstrate cpu|cuda:0|mps   [--json]
    python -m sizer placement "arch=hf:gpt2&dtype=bfloat16" [--config FILE] [--json]
    python -m sizer suite --device cuda:0 [--record] [--only SUBSTRING] [--minutes 9] [--out FOLDER] [--again] [--list]

Exit status: 0; 1 where the job hit a limit or crashed; 2 for bad input; 3 where the model was counted but no step could
be traced (the counts are printed); 4 where a device was asked for that is not there. Errors are one line on stderr.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sizer.commands.job import MakeClient
from sizer.errors import RequestError, SizerError, quote
from sizer.service.client import JobClient
from sizer.terminal.table import to_printable

INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(arguments: Sequence[str] | None = None, *, make_client: MakeClient = JobClient) -> int:
    """Runs one command and returns its exit status; `make_client` is a seam for tests."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = _parser().parse_args(arguments)
        command = importlib.import_module(f"sizer.commands.{options.command}")  # alone: the others need more
        return command.run(options, make_client)
    except SizerError as error:
        print(to_printable(f"sizer: {error}"), file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left; keep Python from telling it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are of ours, in one line."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(message, todo=f"see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m sizer", description="How much device memory will this model need, and does it fit?"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    estimate = commands.add_parser("estimate", help="what a model needs, from its architecture alone")
    _add_question(estimate, 'such as "arch=torchvision:resnet50&batch=1,32&gpu=rtx-4090"')
    form = estimate.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the report as JSON")
    form.add_argument("--csv", action="store_true", help="print the estimates as CSV")
    form.add_argument(
        "--explain", action="store_true", help="say how it was computed: kernels, workspaces, what is modelled"
    )
    for name, text in (
        ("gpus", "the devices that an estimate can be made for"),
        ("models", "the architectures known by name"),
        ("devices", "the devices of this machine"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--json", action="store_true", help="print the list as JSON")
        if name == "devices":
            command.add_argument(
                "--demonstrate", metavar="DEVICE", help="show what memory does on cpu, cuda:0, mps, ..."
            )
    placement = commands.add_parser("placement", help="whether a model's tensors would all be where they must")
    _add_question(placement, "as of estimate; the first dtype counts")
    placement.add_argument("--json", action="store_true", help="print what was found as JSON")
    _add_measure(commands)
    _add_ledger(commands)
    _add_suite(commands)
    return parser


def _add_question(command: argparse.ArgumentParser, help: str) -> None:
    command.add_argument("query", metavar="QUERY", help=help)
    command.add_argument("--config", metavar="FILE", type=Path, help="a config.json in the place of arch")


def _add_measure(commands: argparse._SubParsersAction) -> None:
    measure = commands.add_parser("measure", help="run the work on a real device and hold the estimate against it")
    _add_question(measure, 'such as "arch=torchvision:resnet50&dtype=float32&batch=32"')
    measure.add_argument("--device", required=True, help="cuda:0, mps, cpu, ... (see `python -m sizer devices`)")
    measure.add_argument(
        "--json", action="store_true", help="print measurement and comparison as JSON, one object a line"
    )
    measure.add_argument("--no-timing", action="store_true", help="measure memory alone")
    measure.add_argument("--no-ledger", action="store_true", help="do not keep the comparison")
    measure.add_argument(
        "--minutes", type=_minutes, default=10.0, help="stop a measurement that takes longer; by default 10"
    )


def _add_ledger(commands: argparse._SubParsersAction) -> None:
    ledger = commands.add_parser(
        "ledger", help="every comparison of an estimate with a device, and how far off they were"
    )
    form = ledger.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the whole ledger as JSON, for --import elsewhere")
    form.add_argument("--csv", action="store_true", help="print the ledger as CSV")
    form.add_argument("--path", action="store_true", help="print the file that holds it (see $SIZER_LEDGER)")
    ledger.add_argument(
        "--import",
        dest="import_file",
        metavar="FILE",
        type=Path,
        help="take in another machine's measurements: a file, or a folder of the suite",
    )


def _add_suite(commands: argparse._SubParsersAction) -> None:
    suite = commands.add_parser("suite", help="measure a list of models on a device, one process each; can be repeated")
    suite.add_argument("--device", default="cuda:0", help="cuda:0, mps or cpu (small models); by default cuda:0")
    suite.add_argument(
        "--record", action="store_true", help="also record what the allocator did, and kernels' workspaces"
    )
    suite.add_argument("--only", metavar="SUBSTRING", default="", help="only the cases with this in their name")
    suite.add_argument("--minutes", type=_minutes, default=9.0, help="start nothing that would end later; by default 9")
    suite.add_argument("--out", metavar="FOLDER", type=Path, help="by default tests/measured/<device>-<torch>-<date>")
    suite.add_argument("--again", action="store_true", help="measure once more what failed")
    suite.add_argument("--list", action="store_true", help="print the cases and measure nothing")


def _minutes(text: str) -> float:
    minutes = float(text) if re.fullmatch(r"\d{1,4}(\.\d+)?", text) else 0
    if not 0 < minutes < 24 * 60:
        raise argparse.ArgumentTypeError(f"{quote(text)} is no number of minutes between 0 and a day")
    return minutes


if __name__ == "__main__":
    sys.exit(main())

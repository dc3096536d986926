"""The command line.

    python -m sizer estimate resnet50
    python -m sizer estimate train.yaml --gpu rtx-4090
    python -m sizer estimate "arch=torchvision:resnet50&batch=1,32" [--config FILE] [--explain | --json | --csv]
    python -m sizer levers | limits | which | ranks | budget "arch=hf:gpt2&dtype=bfloat16&batch=8" [--config FILE] [--json]
    python -m sizer compare "arch=hf:gpt2&batch=8" "arch=hf:gpt2&batch=8&checkpointing=1" [--json | --csv]
    python -m sizer peak "arch=hf:gpt2&dtype=bfloat16&batch=8" [--config FILE] [--json | --snapshot FILE | --script]
    python -m sizer run [--gpu KEY] [--steps 3] [--world N] [--strict] [--json FILE] -- train.py ARGUMENTS
    python -m sizer measure "arch=torchvision:resnet50&dtype=float32&batch=32" --device cuda:0|mps|cpu [--json]
    python -m sizer startup "arch=hf:qwen3-8b&gpu=a100-40gb" --log server.log [--json]
    python -m sizer diff a.json b.json [--fail-over 1%] [--json]
    python -m sizer ledger [--json | --csv | --path] [--import FILE]
    python -m sizer gpus | models | devices   [--json]
    python -m sizer devices --demonstrate cpu|cuda:0|mps   [--json]
    python -m sizer placement "arch=hf:gpt2&dtype=bfloat16" [--config FILE] [--json]
    python -m sizer cache [--clear] [--json]
    python -m sizer app [-- --server.port 8600]
    python -m sizer suite --device cuda:0 [--record] [--only SUBSTRING] [--minutes 9] [--out FOLDER] [--again] [--list]

Exit status: 0 for an answer; 1 if the job hit a limit or crashed; 2 for bad input; 3 if the model was counted but no step could
be traced (the counts are printed); 4 if the requested device does not exist; 5 if a run does not fit. An error is one line on
stderr, or one line for each refused key.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sizer.base.errors import PipelineError, RequestError, SizerError
from sizer.base.versions import SIZER
from sizer.commands.arguments import answer_as_pipeline, describe_keys, instead_of, print_link
from sizer.commands.terminal import to_printable
from sizer.commands.waiting import MakeClient, start_client

# Each command: its module in sizer.commands, which has a table COMMANDS of functions, and its line in `--help`.
COMMANDS = {
    "estimate": ("estimate_command", "what a model needs, from its architecture alone"),
    "levers": ("decisions", "changes that save memory, and the smallest set of changes that makes it fit"),
    "limits": ("decisions", "the largest batch, sequence and image that fit the device"),
    "which": ("decisions", "the devices of the catalogue that it fits"),
    "ranks": ("decisions", "the number of GPUs that it fits, by form of parallelism, and the memory of each GPU"),
    "budget": ("decisions", "the peak of a compiled training step over its activation memory budget"),
    "compare": ("differences", "compare two to four questions"),
    "peak": ("decisions", "the tensors alive at the peak, by module; also as PyTorch's memory snapshot, or a script"),
    "startup": ("startup_command", "compare a server's startup log with its plan, or plan the server of a command"),
    "diff": ("differences", "compare two saved reports by phase, category, module and line"),
    "gpus": ("lists", "list the devices of the catalogue"),
    "models": ("lists", "list the models known by name"),
    "devices": ("lists", "list the devices of this machine"),
    "placement": ("placement", "check that all tensors of a model would be on the right device"),
    "run": ("run", "run your own PyTorch script, unmodified, on a GPU that you do not have"),
    "measure": ("measurements", "measure on a real device and compare with the estimate"),
    "ledger": ("ledger_command", "list the comparisons of estimates with measurements, and their errors"),
    "suite": ("measurements", "measure a list of models on a device, each in its own process"),
    "cache": ("lists", "show the folder of cached traces and reports, or empty it with --clear"),
    "app": ("app", "the page, in a browser"),
}
INTERRUPTED = 130  # exit status of a shell after Ctrl-C


def main(arguments: Sequence[str] | None = None, *, make_client: MakeClient = start_client) -> int:
    """Run one command and return its exit status. Tests replace `make_client`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = parse_options(sys.argv[1:] if arguments is None else arguments)
        try:
            status = options.run(options, make_client)
        except PipelineError as found:
            answer_as_pipeline(options, found)
            status = options.run(options, make_client)
        print_link(options)
        return status
    except SizerError as error:
        for line in str(error).splitlines():
            print(to_printable(f"sizer: {line}"), file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has gone; Python must not report it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises RequestError."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(message, todo=f"see `{self.prog} --help`")


def _program() -> str:
    """Return the words that started this program: the installed command, or the module."""
    return "sizer" if Path(sys.argv[0]).stem == "sizer" else "python -m sizer"


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line. Only the module of the given command is imported. Raises RequestError."""
    parser = _Parser(
        prog=_program(),
        description="How much device memory will this model need, and does it fit?",
        epilog=describe_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sizer {SIZER}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    named = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in named:
            add_arguments, run = importlib.import_module(f"sizer.commands.{module}").COMMANDS[name]
            add_arguments(command)
            command.set_defaults(run=run)
            flags = list(command._option_string_actions)
    options, unknown = parser.parse_known_args(arguments)
    if "query" in options and options.query is None and unknown and not unknown[0].startswith("--"):
        options.query = unknown.pop(0)  # argparse takes an optional word for missing if flags come before it (Python 3.11)
    if getattr(options, "needs_query", False) and options.query is None and options.config is None:
        raise RequestError("the following arguments are required: QUERY", todo=f"see `{parser.prog} {_command(named)} --help`")
    if unknown:
        raise RequestError(
            f"unrecognized arguments: {' '.join(unknown)}",
            todo=instead_of(unknown, flags) or f"see `{parser.prog} {_command(named)} --help`",
        )
    return options


def _command(arguments: Sequence[str]) -> str:
    return next((name for name in arguments if name in COMMANDS), "")


if __name__ == "__main__":
    sys.exit(main())

"""The command line.

    python -m sizer estimate resnet50
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

Exit status: 0; 1 where the job hit a limit or crashed; 2 for bad input; 3 where the model was counted but no step could
be traced (the counts are printed); 4 where a device was asked for that is not there; 5 if a run does not fit. An error is one
line on stderr, or one for each key that is refused.
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

# Each command with its module in sizer.commands, whose own COMMANDS has its functions, and its line in `--help`.
COMMANDS = {
    "estimate": ("estimate_command", "what a model needs, from its architecture alone"),
    "levers": ("decisions", "what to change so that it needs less, and the fewest changes that make it fit"),
    "limits": ("decisions", "the largest batch, sequence and image that the device holds"),
    "which": ("decisions", "on which devices of the catalogue it fits"),
    "ranks": ("decisions", "on how many GPUs it fits, by which way of training, and what each of them holds"),
    "budget": ("decisions", "the peak of a compiled training step over its activation memory budget"),
    "compare": (
        "differences",
        "two to four questions beside each other, and what each takes more or less than the first",
    ),
    "peak": (
        "peak_command",
        "what is alive at the peak: tensors, modules, PyTorch's memory snapshot, a script that does the work",
    ),
    "startup": ("startup_command", "what a server's startup log says, and how the plan for the same flags differs"),
    "diff": ("differences", "how two saved reports differ, by phase, category, module and line"),
    "gpus": ("lists", "the devices that an estimate can be made for"),
    "models": ("lists", "the architectures known by name"),
    "devices": ("lists", "the devices of this machine"),
    "placement": ("placement", "whether a model's tensors would all be where they must"),
    "run": ("run", "run a PyTorch script of yours, unmodified, on a GPU that you do not have"),
    "measure": ("measurements", "run the work on a real device and hold the estimate against it"),
    "ledger": ("ledger_command", "every comparison of an estimate with a device, and how far off they were"),
    "suite": ("measurements", "measure a list of models on a device, one process each; can be repeated"),
    "cache": ("cache_command", "the folder of kept traces and reports; --clear empties it"),
    "app": ("app", "the page, in a browser"),
}
INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(arguments: Sequence[str] | None = None, *, make_client: MakeClient = start_client) -> int:
    """Runs one command and returns its exit status; `make_client` is a seam for tests."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
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
    except BrokenPipeError:  # the reader of our output has left; keep Python from telling it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are of ours, in one line."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(message, todo=f"see `{self.prog} --help`")


def _program() -> str:
    """Return the words that started this program: the installed command, or the module."""
    return "sizer" if Path(sys.argv[0]).stem == "sizer" else "python -m sizer"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line; of the commands only the module that it names is imported. Raises RequestError."""
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
    if unknown:
        raise RequestError(
            f"unrecognized arguments: {' '.join(unknown)}",
            todo=instead_of(unknown, flags)
            or f"see `{parser.prog} {' '.join(name for name in COMMANDS if name in named)} --help`",
        )
    return options


if __name__ == "__main__":
    sys.exit(main())

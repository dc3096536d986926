"""The command `run`: a PyTorch script of yours, unmodified, on a GPU that this machine does not have."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from sizer.base.errors import RefusedValueError, RequestError, quote
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import Gpu
from sizer.commands.terminal import to_printable
from sizer.commands.waiting import MakeClient
from sizer.running.command_line import Command, read_command
from sizer.running.difference import read_size
from sizer.running.routes import ROUTES, run_script
from sizer.running.run_outcome import Outcome, format_outcome

MOST_RANKS = 65536


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s [OPTION ...] -- SCRIPT [ARGUMENT ...]"
    parser.add_argument("--gpu", default="a100-80gb", help="the device, a key of `sizer gpus` (default: a100-80gb)")
    parser.add_argument(
        "--steps", type=int, default=3, help="optimizer steps; 0 runs the script to its end (default: 3)"
    )
    parser.add_argument("--seconds", type=int, default=0, help="end the run after this many seconds (default: no limit)")
    parser.add_argument("--world", type=int, help="number of ranks, as torchrun would start them")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, help="the rank to run (default: 0)")
    which.add_argument("--all-ranks", action="store_true", help="run all ranks in sequence")
    parser.add_argument(
        "--route", choices=ROUTES, default="auto", help="driver: PyTorch's own CUDA code; meta: Sizer's tracer"
    )
    parser.add_argument(
        "--strict", action="store_true", help="limit the device's memory: PyTorch raises OutOfMemoryError"
    )
    parser.add_argument("--snapshot", metavar="FILE", type=Path, help="write PyTorch's memory snapshot")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report as JSON, - for stdout")
    parser.add_argument(
        "--skip-draws", action="store_true", help="leave large weights on the host without initial values"
    )
    parser.add_argument("--fail-over", metavar="SIZE", type=size, help="exit with 5 if more is reserved, such as 20GiB")
    parser.add_argument(
        "command", nargs="*", help="a script, -m module, torchrun ..., accelerate launch ..., deepspeed ... or python -c ..."
    )


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Run the script, print its report, and return the exit status."""
    gpu, command = _gpu(options.gpu), read_command(options.command)
    world, ranks = _ranks(options, command)
    for name in ("steps", "seconds"):
        if getattr(options, name) < 0:
            raise RequestError(
                f"--{name}", given=str(getattr(options, name)), allowed="0 or more", todo="0 is no limit"
            )
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="sizer-ranks-") as messages:
        for rank in ranks:
            snapshot = options.snapshot
            if snapshot is not None and len(ranks) > 1:
                snapshot = snapshot.with_name(f"{snapshot.stem}-rank{rank}{snapshot.suffix}")
            outcome = run_script(
                command,
                gpu=gpu,
                route=options.route,
                strict=options.strict,
                steps=options.steps,
                seconds=options.seconds,
                world=world,
                rank=rank,
                skip_draws=options.skip_draws,
                snapshot=snapshot,
                messages=Path(messages),
            )
            outcomes.append(outcome)
            print(to_printable("\n".join(format_outcome(outcome))), file=sys.stderr if _on_stdout(options) else sys.stdout)
    statuses = [outcome.exit_status(limit_bytes=options.fail_over) for outcome in outcomes]
    worst = max(zip(statuses, outcomes, strict=True), key=lambda row: (row[0], _reserved(row[1])))
    if len(outcomes) > 1:
        print(f"Largest: rank {worst[1].rank}.")
    if options.fail_over is not None and (row := worst[1].estimate) and row.peak_reserved_bytes > options.fail_over:
        print(
            f"sizer: peak reserved was {row.peak_reserved_bytes:,} bytes, more than {options.fail_over:,}",
            file=sys.stderr,
        )
    if options.json is not None:
        _write_json(options.json, worst[1], outcomes)
    return worst[0]


def size(text: str) -> int:
    """Return the bytes of a text such as 20GiB. Raises RequestError for any other form."""
    try:
        return read_size(text)
    except ValueError as error:
        raise RequestError("--fail-over", todo=str(error)) from None


def _gpu(key: str) -> Gpu:
    try:
        return find_gpu(key)
    except RefusedValueError as refused:
        raise RequestError(refusals=[refused.refusal("gpu", key)]) from None


def _ranks(options: argparse.Namespace, command: Command) -> tuple[int, list[int]]:
    """Return the number of ranks, and the ranks to run."""
    world = options.world if options.world is not None else command.world or 1
    if not 1 <= world <= MOST_RANKS:
        raise RequestError("--world", given=str(world), allowed=f"1 to {MOST_RANKS:,}", todo="give the number of ranks")
    rank = options.rank or 0
    if not 0 <= rank < world:
        raise RequestError("--rank", given=str(rank), allowed=f"0 to {world - 1}", todo="give --world, too")
    return world, list(range(world)) if options.all_ranks else [rank]


def _reserved(outcome: Outcome) -> int:
    return outcome.estimate.peak_reserved_bytes if outcome.estimate else 0


def _on_stdout(options: argparse.Namespace) -> bool:
    return options.json is not None and str(options.json) == "-"


def _write_json(path: Path, outcome: Outcome, outcomes: list[Outcome]) -> None:
    data = outcome.to_dict()
    if len(outcomes) > 1:
        data["ranks"] = [{"rank": one.rank, **_peaks(one)} for one in outcomes]
    text = json.dumps(data, allow_nan=False)
    if str(path) == "-":
        print(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError("the JSON cannot be written", given=quote(str(path)), todo=error.strerror) from error


def _peaks(outcome: Outcome) -> dict[str, int]:
    row = outcome.estimate
    if row is None:
        return {}
    return {"peak_allocated_bytes": row.peak_allocated_bytes, "peak_reserved_bytes": row.peak_reserved_bytes}


COMMANDS = {"run": (add_arguments, run)}

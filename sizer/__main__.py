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
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from sizer.errors import ConfigError, RequestError, SizerError, TraceError, quote
from sizer.memory.report import Report
from sizer.packing import MAX_CONFIG_BYTES, encode_config
from sizer.service.client import Job, JobClient
from sizer.terminal import format_explanation, format_report, format_table, to_printable
from sizer.units import format_bytes, format_count

POLL_SECONDS = 0.1
INTERRUPTED = 130  # what a shell reports for Ctrl-C

MakeClient = Callable[[], JobClient]


def main(arguments: Sequence[str] | None = None, *, make_client: MakeClient = JobClient) -> int:
    """Runs one command and returns its exit status; `make_client` is a seam for tests."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = _parser().parse_args(arguments)
        return options.run(options, make_client)
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
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    estimate = commands.add_parser("estimate", help="what a model needs, from its architecture alone")
    estimate.add_argument("query", metavar="QUERY", help='such as "arch=torchvision:resnet50&batch=1,32&gpu=rtx-4090"')
    estimate.add_argument("--config", metavar="FILE", type=Path, help="a config.json in the place of arch")
    form = estimate.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the report as JSON")
    form.add_argument("--csv", action="store_true", help="print the estimates as CSV")
    form.add_argument(
        "--explain", action="store_true", help="say how it was computed: kernels, workspaces, what is modelled"
    )
    estimate.set_defaults(run=_estimate)
    for name, run, text in (
        ("gpus", _gpus, "the devices that an estimate can be made for"),
        ("models", _models, "the architectures known by name"),
        ("devices", _devices, "the devices of this machine"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--json", action="store_true", help="print the list as JSON")
        command.set_defaults(run=run)
        if name == "devices":
            command.add_argument(
                "--demonstrate", metavar="DEVICE", help="show what memory does on cpu, cuda:0, mps, ..."
            )
    placement = commands.add_parser("placement", help="whether a model's tensors would all be where they must")
    placement.add_argument("query", metavar="QUERY", help="as of estimate; the first dtype counts")
    placement.add_argument("--config", metavar="FILE", type=Path, help="a config.json in the place of arch")
    placement.add_argument("--json", action="store_true", help="print what was found as JSON")
    placement.set_defaults(run=_placement)
    _add_measure(commands)
    _add_ledger(commands)
    _add_suite(commands)
    return parser


# ------------------------------------------------------------------------------------------------------------ estimate


def _estimate(options: argparse.Namespace, make_client: MakeClient) -> int:
    query = options.query if options.config is None else _with_config(options.query, options.config)
    with contextlib.closing(make_client()) as client:
        report = _wait(client.submit(query))
    _print_report(report, options)
    if report.failures and not report.estimates:
        raise TraceError(
            "the model was counted, but no step could be traced",
            given=", ".join(report.failures),
            todo=next(iter(report.failures.values())),
        )
    return 0


def _placement(options: argparse.Namespace, make_client: MakeClient) -> int:
    from sizer.device.text import format_placement

    query = options.query if options.config is None else _with_config(options.query, options.config)
    with contextlib.closing(make_client()) as client:
        found = _wait(client.submit_placement(query))
    _print_list(options, found.to_dict(), format_placement(found))
    return 0


def _print_report(report: Report, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(report.to_dict(), allow_nan=False))  # ASCII, whatever the terminal's encoding
    elif options.csv:
        print(report.to_csv().replace("\r\n", "\n"), end="")  # stdout writes the platform's own line ends
    else:
        print(format_report(report))
        if options.explain:
            print("\n" + format_explanation(report))


def _with_config(query: str, path: Path) -> str:
    """The query with a file's config in the place of its arch, which it need not have. Raises ConfigError."""
    from sizer.architecture.ingest import read_config

    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError("config file cannot be read", given=quote(str(path)), todo=error.strerror) from error
    read_config(data)
    others = [item for item in query.removeprefix("?").split("&") if item and item.partition("=")[0] != "arch"]
    return "&".join([f"arch=config:{encode_config(data.decode())}", *others])


def _wait(job: Job) -> Report:
    """The job's result; shows its progress where somebody looks on."""
    shown = sys.stderr.isatty()
    try:
        while (result := job.result(timeout=POLL_SECONDS)) is None:
            if shown:
                print(f"\r\x1b[K{job.progress}", end="", file=sys.stderr, flush=True)
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return result


# --------------------------------------------------------------------------------------------------------------- lists


def _gpus(options: argparse.Namespace, make_client: MakeClient) -> int:
    from sizer.memory.gpus import GPUS

    header = ("key", "name", "memory", "outside the allocator")
    rows = (
        (gpu.key, gpu.name, format_bytes(gpu.total_bytes), format_bytes(gpu.context_bytes)) for gpu in GPUS.values()
    )
    _print_list(options, {"gpus": [asdict(gpu) for gpu in GPUS.values()]}, format_table(header, rows, left=2))
    return 0


def _models(options: argparse.Namespace, make_client: MakeClient) -> int:
    from sizer.architecture.presets import list_presets

    with contextlib.closing(make_client()) as client:
        vision = _wait(client.submit_models())["torchvision"]
    keys = ("key", "title", "family", "modality", "hub_id", "head", "published_parameters", "published_as")
    presets = [{key: getattr(preset, key) for key in keys} for preset in list_presets()]
    header = ("arch", "family", "parameters, as published")
    rows = [(f"hf:{row['key']}", row["family"], format_count(row["published_parameters"])) for row in presets]
    rows += [(f"torchvision:{row['name']}", row["family"], "") for row in vision]
    _print_list(options, {"presets": presets, "torchvision": vision}, format_table(header, rows, left=2))
    return 0


def _devices(options: argparse.Namespace, make_client: MakeClient) -> int:
    from sizer.device.demonstration import demonstrate
    from sizer.device.inventory import find_inventory
    from sizer.device.text import format_demonstration, format_inventory, inventory_rows

    if options.demonstrate is not None:
        shown = demonstrate(options.demonstrate)
        _print_list(options, shown.to_dict(), format_demonstration(shown))
        return 0
    inventory = find_inventory()
    data = {
        "devices": inventory_rows(inventory),
        "missing": inventory.missing,
        "line": inventory.line,
        "versions": inventory.versions,
    }
    _print_list(options, data, format_inventory(inventory))
    return 0


# --------------------------------------------------------------------------------------------------------------- suite


def _add_measure(commands: argparse._SubParsersAction) -> None:
    measure = commands.add_parser("measure", help="run the work on a real device and hold the estimate against it")
    measure.add_argument("query", metavar="QUERY", help='such as "arch=torchvision:resnet50&dtype=float32&batch=32"')
    measure.add_argument("--device", required=True, help="cuda:0, mps, cpu, ... (see `python -m sizer devices`)")
    measure.add_argument("--config", metavar="FILE", type=Path, help="a config.json in the place of arch")
    measure.add_argument(
        "--json", action="store_true", help="print measurement and comparison as JSON, one object a line"
    )
    measure.add_argument("--no-timing", action="store_true", help="measure memory alone")
    measure.add_argument("--no-ledger", action="store_true", help="do not keep the comparison")
    measure.add_argument(
        "--minutes", type=_minutes, default=10.0, help="stop a measurement that takes longer; by default 10"
    )
    measure.set_defaults(run=_measure)


def _measure(options: argparse.Namespace, make_client: MakeClient) -> int:
    from sizer.device.commands import measure

    query = options.query if options.config is None else _with_config(options.query, options.config)
    return measure(options, query, make_client, _wait)


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
    ledger.set_defaults(run=_ledger)


def _ledger(options: argparse.Namespace, make_client: MakeClient) -> int:
    from sizer.device.commands import ledger

    return ledger(options, make_client, _wait)


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
    suite.set_defaults(run=_suite)


def _minutes(text: str) -> float:
    minutes = float(text) if re.fullmatch(r"\d{1,4}(\.\d+)?", text) else 0
    if not 0 < minutes < 24 * 60:
        raise argparse.ArgumentTypeError(f"{quote(text)} is no number of minutes between 0 and a day")
    return minutes


def _suite(options: argparse.Namespace, make_client: MakeClient) -> int:
    from sizer.device.bench import DeviceBench
    from sizer.device.suite import choose_cases, find_device, folder_for, forget_failures, run_suite

    if options.list:
        for case in choose_cases(options.device.partition(":")[0], options.only):
            print(f"{case.name:46} {case.query}")
        return 0
    inventory, facts = find_device(options.device)
    cases = choose_cases(facts.kind, options.only)
    bench = DeviceBench(device=facts.device, record=options.record)
    folder = options.out or folder_for(inventory, facts, bench.date())
    print(f"{facts.name}: {len(cases)} cases, to {folder}", flush=True)
    if options.again:
        forget_failures(cases, folder)
    left = run_suite(
        cases,
        facts,
        folder,
        bench,
        record=options.record,
        seconds=60 * options.minutes,
        say=lambda text: print(to_printable(text), flush=True),
    )
    print(f"left for the same command again: {', '.join(left)}" if left else "nothing is left")
    return 0


# --------------------------------------------------------------------------------------------------------------- print


def _print_list(options: argparse.Namespace, data: dict, lines: Iterable[str]) -> None:
    print(json.dumps(data) if options.json else "\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())

"""The command line.

    python -m sizer estimate "arch=torchvision:resnet50&batch=1,32" [--config FILE] [--json | --csv]
    python -m sizer gpus | models | devices   [--json]

Exit status: 0; 1 where the job hit a limit or crashed; 2 for bad input; 3 where the model was counted but no step could
be traced (the counts are printed); 4 where a device was asked for that is not there. Errors are one line on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from sizer.errors import ConfigError, RequestError, SizerError, TraceError, quote
from sizer.memory.report import Report
from sizer.packing import MAX_CONFIG_BYTES, encode_config
from sizer.service.client import Job, JobClient
from sizer.terminal import format_report, format_table, to_printable
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
    estimate.set_defaults(run=_estimate)
    for name, run, text in (
        ("gpus", _gpus, "the devices that an estimate can be made for"),
        ("models", _models, "the architectures known by name"),
        ("devices", _devices, "the devices of this machine"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--json", action="store_true", help="print the list as JSON")
        command.set_defaults(run=run)
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


def _print_report(report: Report, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(report.to_dict(), allow_nan=False))  # ASCII, whatever the terminal's encoding
    elif options.csv:
        print(report.to_csv().replace("\r\n", "\n"), end="")  # stdout writes the platform's own line ends
    else:
        print(format_report(report))


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
    from sizer.service.devices import find_devices

    devices = find_devices()
    sizes = ("" if row["total_bytes"] is None else format_bytes(row["total_bytes"]) for row in devices)
    rows = ((row["device"], row["name"], size) for row, size in zip(devices, sizes, strict=True))
    _print_list(options, {"devices": devices}, format_table(("device", "name", "memory"), rows, left=2))
    return 0


def _print_list(options: argparse.Namespace, data: dict, lines: Iterable[str]) -> None:
    print(json.dumps(data) if options.json else "\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())

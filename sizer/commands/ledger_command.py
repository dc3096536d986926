"""The command `ledger`: every comparison of an estimate with a device, and how far off they were."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sizer.base.codec import DecodeError, encode
from sizer.base.errors import RequestError, quote
from sizer.commands.figures import TITLES, percent
from sizer.commands.terminal import format_table, to_printable
from sizer.commands.waiting import MakeClient, wait
from sizer.device.ledger.ledger import LIMIT_CHARACTERS, ImportItem, ImportResult, Ledger, read_items
from sizer.device.ledger.rows import ErrorStatistics, LedgerRow
from sizer.device.record.recording import read_measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the whole ledger as JSON, for --import elsewhere")
    form.add_argument("--csv", action="store_true", help="print the ledger as CSV")
    form.add_argument("--path", action="store_true", help="print the path of its file (see $SIZER_LEDGER)")
    parser.add_argument(
        "--import",
        dest="import_file",
        metavar="FILE",
        type=Path,
        help="import another machine's measurements: a file, or a folder of the suite",
    )


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Show the ledger, import another machine's measurements, or print the path of the file."""
    ledger = Ledger()
    if options.path:
        print(ledger.path)
    elif options.import_file is not None:
        return _import(ledger, options, make_client)
    elif options.json:
        sys.stdout.writelines(ledger.export_json())
    elif options.csv:
        print(ledger.export_csv().replace("\r\n", "\n"), end="")  # stdout writes the platform's own line ends
    else:
        print("\n".join(_lines(ledger)))
    return 0


def _lines(ledger: Ledger) -> Iterator[str]:
    rows = ledger.rows()
    if not rows:
        yield f"The ledger is empty ({to_printable(str(ledger.path))}): `python -m sizer measure` fills it."
        return
    yield from format_rows(rows)
    yield ""
    yield from format_statistics(ledger.statistics())


def _import(ledger: Ledger, options: argparse.Namespace, make_client: MakeClient) -> int:
    items = _items(options.import_file)
    with contextlib.closing(make_client()) as client:
        done = ledger.import_items(items, compare=lambda measured: wait(client.submit_comparison(measured)))
    print(json.dumps(encode(done)) if options.json else _summary(done))
    for reason in done.refused:
        print(to_printable(f"sizer: not taken, {reason}"), file=sys.stderr)
    return RequestError.exit_status if done.refused else 0


def _items(path: Path) -> Iterable[ImportItem | str]:
    """Return the items of a file, or of a folder of the suite with its recordings."""
    if not path.is_dir():
        return read_items(_read(path))
    try:
        return [ImportItem(measured=record.measured) for record in read_measured(path)]
    except (DecodeError, OSError) as error:
        raise RequestError("the folder is not one of the suite", given=quote(str(path)), todo=str(error)) from error


def _summary(done: ImportResult) -> str:
    return f"{len(done.added)} added, {done.known} known already, {len(done.refused)} not taken"


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(LIMIT_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RequestError("the file cannot be read", given=quote(str(path)), todo=reason) from error


IN_STATISTICS = ("peak_allocated_bytes", "peak_reserved_bytes", "process_bytes")


def format_rows(rows: Sequence[LedgerRow]) -> Iterator[str]:
    """Yield the ledger's rows as a table, with the errors of the three peaks."""
    header = (
        "id",
        "measured",
        "architecture",
        "mode",
        "dtype",
        "batch",
        "rank",
        "device",
        "torch",
        "allocated",
        "reserved",
        "process",
        "",
    )
    yield from format_table(header, map(_cells, rows), left=9)


def format_statistics(statistics: Sequence[ErrorStatistics]) -> Iterator[str]:
    """Yield signed errors of the main figures, per device and family."""
    header = ("error of", "device", "family", "count", "median", "worst", "bias")
    rows = (
        (
            TITLES[row.quantity],
            row.device,
            row.family,
            str(row.count),
            *(percent(error) for error in (row.median, row.worst, row.bias)),
        )
        for row in statistics
        if row.quantity in IN_STATISTICS
    )
    yield from format_table(header, rows, left=3)


def _cells(row: LedgerRow) -> tuple[str, ...]:
    pairs = (
        (row.estimated_peak_allocated_bytes, row.measured_peak_allocated_bytes),
        (row.estimated_peak_reserved_bytes, row.measured_peak_reserved_bytes),
        (row.estimated_process_bytes, row.measured_process_bytes),
    )
    errors = ("" if not measured else percent((estimated - measured) / measured) for estimated, measured in pairs)
    about = (row.architecture, row.mode, row.dtype, str(row.batch), row.place, row.device_name, row.torch)
    return str(row.id), row.measured_at[:10], *about, *errors, "" if row.holds else "WRONG"


COMMANDS = {"ledger": (add_arguments, run)}

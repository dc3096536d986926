"""The command `ledger`: every comparison of an estimate with a device, and how far off they were."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from sizer.commands.job import MakeClient, wait
from sizer.device.ledger.exchange import LIMIT_CHARACTERS, Parcel, read_parcels
from sizer.device.ledger.ledger import Imported, Ledger
from sizer.device.record.files import read_measured
from sizer.errors import RequestError, quote
from sizer.memory.codec import DecodeError, encode
from sizer.terminal.ledger import format_rows, format_statistics
from sizer.terminal.table import to_printable


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Shows the ledger, takes in another machine's measurements, or says where it is."""
    kept = Ledger()
    if options.path:
        print(kept.path)
    elif options.import_file is not None:
        return _import(kept, options, make_client)
    elif options.json:
        print(kept.export_json())
    elif options.csv:
        print(kept.export_csv().replace("\r\n", "\n"), end="")  # stdout writes the platform's own line ends
    else:
        print("\n".join(_shown(kept)))
    return 0


def _shown(kept: Ledger) -> Iterator[str]:
    rows = kept.rows()
    if not rows:
        yield f"The ledger is empty ({to_printable(str(kept.path))}): `python -m sizer measure` fills it."
        return
    yield from format_rows(rows)
    yield ""
    yield from format_statistics(kept.statistics())


def _import(kept: Ledger, options: argparse.Namespace, make_client: MakeClient) -> int:
    parcels = _parcels(options.import_file)
    with contextlib.closing(make_client()) as client:
        done = kept.take_in(parcels, compare=lambda measured: wait(client.submit_comparison(measured)))
    print(json.dumps(encode(done)) if options.json else _told(done))
    for reason in done.refused:
        print(to_printable(f"sizer: not taken, {reason}"), file=sys.stderr)
    return RequestError.exit_status if done.refused else 0


def _parcels(path: Path) -> Iterable[Parcel | str]:
    """What a file holds, or a folder of the suite, whose recordings come along."""
    if not path.is_dir():
        return read_parcels(_read(path))
    try:
        return [Parcel(measured=record.measured) for record in read_measured(path)]
    except (DecodeError, OSError) as error:
        raise RequestError("the folder is not one of the suite", given=quote(str(path)), todo=str(error)) from error


def _told(done: Imported) -> str:
    return f"{len(done.added)} added, {done.known} known already, {len(done.refused)} not taken"


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(LIMIT_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RequestError("the file cannot be read", given=quote(str(path)), todo=reason) from error

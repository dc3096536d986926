"""The commands `measure` and `ledger`: each returns its exit status. No torch here; what needs it runs in child processes."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sizer.device.comparison import Comparison
from sizer.device.exchange import LIMIT_CHARACTERS, Parcel, read_parcels
from sizer.device.launch import start
from sizer.device.ledger import Imported, Ledger
from sizer.device.recording import Measured
from sizer.device.records import read_measured
from sizer.device.side_by_side import format_comparison, format_measurement, format_rows, format_statistics
from sizer.errors import JobError, RequestError, SizerError, quote
from sizer.memory.codec import DecodeError, encode
from sizer.request import DTYPES, Request, format_query, parse_query
from sizer.service.client import JobClient
from sizer.terminal import to_printable

SCHEMA = 1
MakeClient = Callable[[], JobClient]
Wait = Callable[[Any], Any]  # a job -> its result, with its progress shown


def measure(options: argparse.Namespace, query: str, make_client: MakeClient, wait: Wait) -> int:
    """Measures every cell of a query in a process of its own, holds the estimate against it, and keeps the comparison.

    Raises, after all is printed, the first of: TraceError where a step was measured and cannot be traced, JobError where one
    ended early. A lack of memory is a result.
    """
    problem: SizerError | None = None
    with contextlib.closing(make_client()) as client:
        for cell in _cells(query):
            measured = _measure_cell(options, cell, wait)
            comparison, failure = _compare(client, measured, wait)
            _print(options, measured, comparison, failure)
            if comparison is not None and not options.no_ledger:
                Ledger().add(comparison)
            problem = problem or failure or _ended_early(measured)
    if problem is not None:
        raise problem
    return 0


def ledger(options: argparse.Namespace, make_client: MakeClient, wait: Wait) -> int:
    """Shows the ledger, takes in another machine's measurements, or says where it is."""
    kept = Ledger()
    if options.path:
        print(kept.path)
    elif options.import_file is not None:
        return _import(kept, options, make_client, wait)
    elif options.json:
        print(kept.export_json())
    elif options.csv:
        print(kept.export_csv().replace("\r\n", "\n"), end="")  # stdout writes the platform's own line ends
    else:
        print("\n".join(_shown(kept)))
    return 0


def _cells(query: str) -> Iterator[Request]:
    """Every dtype and batch size that a query names; where it names none, one is chosen and said on stderr."""
    request = parse_query(query)
    given = {item.partition("=")[0] for item in query.removeprefix("?").split("&")}
    dtypes = request.dtypes if "dtype" in given else DTYPES[:1]
    batches = request.batches if "batch" in given else (1,)
    chosen = [f"{key}={value}" for key, value in (("dtype", dtypes[0]), ("batch", batches[0])) if key not in given]
    if chosen:
        print(f"sizer: measured is {' and '.join(chosen)}, since the query names none", file=sys.stderr)
    for dtype in dtypes:
        for batch in batches:
            yield replace(request, dtypes=(dtype,), batches=(batch,))


def _measure_cell(options: argparse.Namespace, cell: Request, wait: Wait) -> Measured:
    query = format_query(cell, complete=True)
    job = start(query, options.device, timing=not options.no_timing, seconds=60 * options.minutes)
    try:
        return wait(job)
    finally:
        job.cancel()  # only where the waiting was cut short: a job that is done stays done


def _compare(client: JobClient, measured: Measured, wait: Wait) -> tuple[Comparison | None, SizerError | None]:
    """The comparison, or why there is none: the measurement stands in any case."""
    try:
        return wait(client.submit_comparison(measured)), None
    except SizerError as error:
        return None, error


def _ended_early(measured: Measured) -> JobError | None:
    """What ended a measurement early, but a lack of memory: that is a result."""
    failure = measured.measurement.failure
    return None if failure is None else JobError("the device did not come to the end", given=quote(failure, 300))


def _print(
    options: argparse.Namespace, measured: Measured, comparison: Comparison | None, failure: SizerError | None
) -> None:
    measurement = measured.measurement
    if options.json:
        data = {
            "schema": SCHEMA,
            "measurement": measurement.to_dict(),
            "comparison": comparison and comparison.to_dict(),
        }
        if failure is not None:
            data["error"] = str(failure)
        print(json.dumps(data, allow_nan=False), flush=True)
    elif comparison is not None:
        print(format_comparison(comparison), end="\n\n", flush=True)
    else:
        print(format_measurement(measurement), end="\n\n", flush=True)


# -------------------------------------------------------------------------------------------------------------- ledger


def _shown(kept: Ledger) -> Iterator[str]:
    rows = kept.rows()
    if not rows:
        yield f"The ledger is empty ({to_printable(str(kept.path))}): `python -m sizer measure` fills it."
        return
    yield from format_rows(rows)
    yield ""
    yield from format_statistics(kept.statistics())


def _import(kept: Ledger, options: argparse.Namespace, make_client: MakeClient, wait: Wait) -> int:
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

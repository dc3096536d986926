"""The command `measure`: run the work on a real device and hold the estimate against it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from sizer.base.errors import JobError, RequestError, SizerError, quote
from sizer.base.versions import format_version, installed_version
from sizer.commands.arguments import add_query, minutes, query_of
from sizer.commands.job import MakeClient, wait
from sizer.commands.measure_text import format_comparison, format_measurement, format_ranks
from sizer.device.comparison.comparison import Comparison
from sizer.device.ledger.ledger import Ledger
from sizer.device.record.recording import Measured
from sizer.device.trial.launch import MeasureJob, start
from sizer.device.trial.launch_ranks import RanksJob, start_ranks
from sizer.query.request import Request, check_traced
from sizer.query.text import format_query, parse_query
from sizer.query.values import DTYPES
from sizer.service.client import JobClient

SCHEMA = 1
DEVICE_HELP = "cuda:0, mps, cpu, ... (see `python -m sizer devices`); of several ranks cpu or cuda"


class Found(NamedTuple):
    """What was measured, and its comparison or why there is none."""

    measured: Measured
    comparison: Comparison | None
    failure: SizerError | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_query(parser, 'such as "arch=torchvision:resnet50&dtype=float32&batch=32"')
    parser.add_argument("--device", required=True, help=DEVICE_HELP)
    parser.add_argument(
        "--json", action="store_true", help="print measurement and comparison as JSON, one object a line"
    )
    parser.add_argument("--no-timing", action="store_true", help="measure memory alone")
    parser.add_argument("--no-ledger", action="store_true", help="do not keep the comparison")
    parser.add_argument(
        "--minutes", type=minutes, default=10.0, help="stop a measurement that takes longer; by default 10"
    )


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Measure every dtype and batch size of a query, each in a process of its own, and compare them with the estimate; of several
    ranks each in one, side by side.

    Raises, after all is printed, the first of: TraceError where a step was measured and cannot be traced, JobError where one
    ended early. A lack of memory is a result.
    """
    query, problem = query_of(options), None
    with contextlib.closing(make_client()) as client:
        for cell in _cells(query):
            found = [Found(measured, *_compare(client, measured)) for measured in _measure_cell(options, cell)]
            _print(options, found)
            for one in found:
                if one.comparison is not None and not options.no_ledger:
                    Ledger().add(one.comparison)
                problem = problem or one.failure or _ended_early(one.measured)
    if problem is not None:
        raise problem
    return 0


def _cells(query: str) -> Iterator[Request]:
    """Every dtype and batch size that a query names; where it names none, one is chosen and said on stderr."""
    request = parse_query(query)
    check_traced(request)
    if request.torch not in (None, installed := format_version(installed_version())):
        raise RequestError(
            "torch with measure",
            given=quote(request.torch),
            allowed=f"the installed one, {installed}",
            todo="leave it out",
        )
    given = {item.partition("=")[0] for item in query.removeprefix("?").split("&")}
    dtypes = request.dtypes if "dtype" in given else DTYPES[:1]
    batches = request.batches if "batch" in given else (1,)
    chosen = [f"{key}={value}" for key, value in (("dtype", dtypes[0]), ("batch", batches[0])) if key not in given]
    if chosen:
        print(f"sizer: measured is {' and '.join(chosen)}, since the query names none", file=sys.stderr)
    for dtype in dtypes:
        for batch in batches:
            yield replace(request, dtypes=(dtype,), batches=(batch,))


def _measure_cell(options: argparse.Namespace, cell: Request) -> tuple[Measured, ...]:
    """What was measured, of each rank."""
    query, seconds = format_query(cell, complete=True), 60 * options.minutes
    several = cell.parallel != "none"
    job: RanksJob | MeasureJob
    if several:
        job = start_ranks(query, options.device, seconds=seconds)
    else:
        job = start(query, options.device, timing=not options.no_timing, seconds=seconds)
    try:
        return wait(job) if several else (wait(job),)
    finally:
        job.cancel()  # only where the waiting was cut short: a job that is done stays done


def _compare(client: JobClient, measured: Measured) -> tuple[Comparison | None, SizerError | None]:
    """The comparison, or why there is none: the measurement stands in any case."""
    try:
        return wait(client.submit_comparison(measured)), None
    except SizerError as error:
        return None, error


def _ended_early(measured: Measured) -> JobError | None:
    """What ended a measurement early, but a lack of memory: that is a result."""
    failure = measured.measurement.failure
    return None if failure is None else JobError("the device did not come to the end", given=quote(failure, 300))


def _print(options: argparse.Namespace, found: Sequence[Found]) -> None:
    if options.json:
        for one in found:
            print(json.dumps(_json(one), allow_nan=False), flush=True)
        return
    comparisons = [one.comparison for one in found if one.comparison is not None]
    if not comparisons:
        text = format_measurement(found[0].measured.measurement)
    elif len(comparisons) > 1:
        text = format_ranks(comparisons)
    else:
        text = format_comparison(comparisons[0])
    print(text, end="\n\n", flush=True)


def _json(one: Found) -> dict:
    data = {
        "schema": SCHEMA,
        "measurement": one.measured.measurement.to_dict(),
        "comparison": one.comparison and one.comparison.to_dict(),
    }
    return data if one.failure is None else data | {"error": str(one.failure)}

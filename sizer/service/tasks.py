"""Tasks that a job can run, by name. Its functions import torch: only the job server's children run them."""

from __future__ import annotations

import base64
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from sizer.base.errors import ConfigError, RequestError, quote
from sizer.estimating.scopes import digest_scope
from sizer.processes.child import Channel
from sizer.service.messages import COMPILED, STOPS

PARTIAL_SECONDS = 0.2  # between two partial results


def run(job: dict, channel: Channel) -> dict:
    """Return the result of a job {"task", "query", "config_text", ...} as plain data.

    Raises SizerError; KeyError: unknown task.
    """
    return TASKS[job["task"]](job, channel)


class ServerStore:
    """Read traces that earlier jobs stored for this architecture, and store the traces of this job.

    Names are sent as digests, the digest of their scope first (`ScopedResults` of sizer.estimating.store). Names contain
    everything that a value depends on, including a whole config, and may have any length.
    """

    def __init__(self, job: dict, channel: Channel) -> None:
        self._known, self._channel = dict(job["kept"]), channel

    def get(self, name: str) -> bytes | None:
        """Return the value under a name, None if there is none."""
        data = self._known.get(_digest(name))
        return None if data is None else bytes(data)

    def put(self, name: str, data: bytes) -> None:
        """Store a value for this job and for later jobs."""
        digest = _digest(name)
        self._known[digest] = data
        self._channel.keep(digest, data)


def _digest(name: str) -> str:
    scope, _, _ = name.partition("\n")
    return f"{digest_scope(scope)}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _estimate(job: dict, channel: Channel) -> dict:
    """Return the report of a query; send new parts as partial results: the counts, the first cells and the last ones at once."""
    from sizer.base.codec import encode
    from sizer.estimating.estimator import Estimator
    from sizer.query.text import parse_query

    request = parse_query(job["query"])
    cells = len(request.dtypes) * len(request.batches)
    estimator = Estimator(
        request,
        config=_config(job),
        store=ServerStore(job, channel),
        progress=channel.progress,
        stops=job.get("part") == STOPS,
    )
    sent: set[tuple[str, int]] = set()
    last = -PARTIAL_SECONDS
    for report in estimator.reports():
        more = len(report.estimates) > len(sent)
        awaited = more and (not sent or len(report.estimates) == cells)
        if job.get("partials", True) and report.pending and (awaited or time.monotonic() >= last + PARTIAL_SECONDS):
            channel.partial(encode(report.without(sent)))
            sent |= {(row.dtype, row.batch) for row in report.estimates}
            last = time.monotonic()
    return encode(report)


def _levers(job: dict, channel: Channel) -> dict:
    """Return possible changes for the one dtype and batch size of a query, and their savings."""
    from sizer.decision.levers import levers

    return _last(partial(levers, compiles=job.get("part") == COMPILED), job, channel)


def _limits(job: dict, channel: Channel) -> dict:
    """Return the largest batch, sequence and image of a query on its device."""
    from sizer.decision.limits import limits

    return _last(limits, job, channel)


def _devices(job: dict, channel: Channel) -> dict:
    """Return the figures of a query's one dtype and batch size on the devices of a part of the catalogue."""
    from sizer.catalogue.gpus import in_parts
    from sizer.decision.devices import devices

    number, parts = map(int, job["part"].split("/"))
    return _last(partial(devices, gpus=in_parts(parts)[number - 1]), job, channel)


def _ranks(job: dict, channel: Channel) -> dict:
    """Return the figures of a query's one dtype and batch size on one GPU and on several."""
    from sizer.decision.ranks import ranks

    return _last(ranks, job, channel)


def _budget(job: dict, channel: Channel) -> dict:
    """Return the figures of a compiled training query's one dtype and batch size, over the activation memory budget."""
    from sizer.decision.budget import budget

    return _last(budget, job, channel)


def _peak(job: dict, channel: Channel) -> dict:
    """Return the live tensors at the peak of the one dtype and batch size of a query."""
    from sizer.decision.peak import peak

    return _last(peak, job, channel)


def _snapshot(job: dict, channel: Channel) -> dict:
    """Return the same peak as PyTorch's memory snapshot: {"zlib": base64 of the compressed pickle}."""
    from sizer.decision.peak import snapshot
    from sizer.query.text import parse_query

    store = ServerStore(job, channel)
    data = snapshot(parse_query(job["query"]), config=_config(job), store=store, progress=channel.progress)
    return {"zlib": base64.b64encode(zlib.compress(data)).decode("ascii")}


def _last(answer: Callable[..., Iterator[Any]], job: dict, channel: Channel) -> dict:
    """Return the last report of a growing answer; earlier ones are sent as partial results."""
    from sizer.base.codec import encode
    from sizer.query.text import parse_query

    store = ServerStore(job, channel)
    reports = answer(parse_query(job["query"]), config=_config(job), store=store, progress=channel.progress)
    last = -PARTIAL_SECONDS
    for report in reports:
        if time.monotonic() >= last + PARTIAL_SECONDS:
            channel.partial(encode(report))
            last = time.monotonic()
    return encode(report)


def _script(job: dict, channel: Channel) -> dict:
    """Return the program that runs and measures the one dtype and batch size of a query: {"text": ...}."""
    from sizer.decision.peak import script
    from sizer.query.text import parse_query

    store = ServerStore(job, channel)
    return {"text": script(parse_query(job["query"]), config=_config(job), store=store, progress=channel.progress)}


def _compare(job: dict, channel: Channel) -> dict:
    """Return the comparison of a measurement ("measured", JSON as a text) with the estimate of the same work."""
    from sizer.base.codec import DecodeError
    from sizer.base.config_json import read_config
    from sizer.device.comparison.comparison import compare
    from sizer.device.comparison.counterpart import gpu_of, request_of
    from sizer.device.record.recording import Measured
    from sizer.estimating.estimator import estimate_cell

    try:
        measured = Measured.from_dict(json.loads(job["measured"]))
    except (DecodeError, ValueError, RecursionError) as error:
        raise RequestError("this is not a measurement", given=quote(str(error), 200)) from None
    measurement = measured.measurement
    text = measurement.config_text
    report, tape = estimate_cell(
        request_of(measurement),
        config=None if text is None else read_config(text),
        gpu=gpu_of(measurement.device),
        progress=channel.progress,
    )
    channel.progress("comparing")
    return compare(report, measured, tape).to_dict()


def _read_snapshot(job: dict, channel: Channel) -> dict:
    """Return the curve of a memory snapshot ("measured", base64 of the compressed pickle), which is read without unpickling."""
    from sizer.base.codec import encode
    from sizer.pasted.pickle_reader import MAX_BYTES, read_plain
    from sizer.pasted.snapshot import read_snapshot

    unpack = zlib.decompressobj()
    data = unpack.decompress(base64.b64decode(job["measured"], validate=True), MAX_BYTES)
    if not unpack.eof:
        raise ConfigError("this snapshot is too large", allowed=f"at most {MAX_BYTES:,} bytes", todo="record fewer events")
    channel.progress("reading the snapshot")
    return encode(read_snapshot(read_plain(data)))


def _placement(job: dict, channel: Channel) -> dict:
    """Check where the tensors of a query's model and batch are, and report the mistakes."""
    from sizer.placement.check import check_request
    from sizer.query.text import parse_query

    request = parse_query(job["query"])
    return check_request(request, config=_config(job), report_progress=channel.progress).to_dict()


def _models(job: dict, channel: Channel) -> dict:
    """Return the models of each source's package by name, each with its family, the module that defines it."""
    from sizer.catalogue.sources import import_function, offered_sources

    return {source.key: import_function(source.names)() for source in offered_sources() if source.names}


def _config(job: dict) -> dict | None:
    from sizer.base.config_json import read_config

    text = job["config_text"]
    return None if text is None else read_config(text)


TASKS = {
    "estimate": _estimate,
    "levers": _levers,
    "limits": _limits,
    "devices": _devices,
    "ranks": _ranks,
    "budget": _budget,
    "peak": _peak,
    "snapshot": _snapshot,
    "script": _script,
    "compare": _compare,
    "placement": _placement,
    "read_snapshot": _read_snapshot,
    "models": _models,
}

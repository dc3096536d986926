"""Routes besides the pages: start and end of the server, health checks, and estimates over HTTP.

GET /api/estimate?QUERY: the JSON of `estimate` over HTTP, through the queue, the limits and the sandbox of the pages.

| status | meaning |
|---|---|
| 200 | the JSON of `estimate` |
| 400 | the question was refused |
| 422 | the model was counted, but no step of it could be traced; `report` holds the counts |
| 429 | too many jobs run or wait |
| 500 | the job failed |
| 504 | the job took longer than it may |

Every answer but 200 holds `error`, `key` and `allowed`.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from sizer.base.errors import JobError, QueueFullError, RequestError, SizerError, TimeLimitError, TraceError
from sizer.report.report import Report
from sizer.service.client import JobClient, shared_client
from sizer.service.fair_queue import Visitor
from sizer.service.job import Job
from sizer.service.monitoring import set_up_logging
from sizer.service.settings import is_public
from sizer.ui.page_cache import done_once
from sizer.ui.surface import OWN

LATELY_SECONDS = 60.0
PROBE_SECONDS = 5.0  # for a job of at most a second, which may wait in the queue
WARM_SECONDS = 180.0
POLL_SECONDS = 0.05
# Longest time that a page's thread holds the interpreter while others wait, the event loop's thread among them.
SWITCH_SECONDS = 0.0005
TOKEN_VARIABLE = "SIZER_METRICS_TOKEN"
_NO_CACHE = {"Cache-Control": "no-store"}
_log = logging.getLogger(__name__)


def routes() -> list[Route]:
    """Return the routes of the health checks and of the metrics."""
    return [Route("/healthz", _alive), Route("/readyz", _ready), Route("/metrics", _metrics)]


@asynccontextmanager
async def lifespan(app: object) -> AsyncIterator[dict]:
    """Run the job server for the lifetime of the app. In public mode the app opens after a first job has succeeded.

    Raises SizerError if no job can run in public mode.
    """
    set_up_logging()
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    client = shared_client()
    try:
        client.start()
        if is_public():
            await _run_probe(client, WARM_SECONDS)
        gc.freeze()  # imported modules stay alive: exclude them from garbage collection
        with done_once():
            yield {}
    finally:
        gc.unfreeze()
        sys.setswitchinterval(usual)
        await run_in_threadpool(client.close)


async def _alive(request: HttpRequest) -> PlainTextResponse:
    return PlainTextResponse("ok\n", headers=_NO_CACHE)


async def _ready(request: HttpRequest) -> PlainTextResponse:
    client = shared_client()
    ago = client.answered_ago()
    if ago is None or ago > LATELY_SECONDS:
        try:
            await _run_probe(client, PROBE_SECONDS)
        except SizerError as error:
            _log.warning("not ready: %s", error)  # for the operator, not for the caller
            return PlainTextResponse("no job has ended well lately\n", status_code=503, headers=_NO_CACHE)
    return PlainTextResponse("ok\n", headers=_NO_CACHE)


async def _metrics(request: HttpRequest) -> PlainTextResponse:
    token = os.environ.get(TOKEN_VARIABLE, "")
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not token or not hmac.compare_digest(given.encode(), token.encode()):
        return PlainTextResponse("not found\n", status_code=404, headers=_NO_CACHE)
    return PlainTextResponse(shared_client().metrics(), headers=_NO_CACHE)


async def _run_probe(client: JobClient, seconds: float) -> None:
    """Run a small real job. Raises SizerError if it fails, or takes longer than `seconds`. The job is then left to end."""
    job = client.submit_probe()
    end = time.monotonic() + seconds
    while not job.done and time.monotonic() < end:
        await asyncio.sleep(POLL_SECONDS)
    if job.result(timeout=0) is None:
        raise JobError(f"a small job has not ended within {seconds:.0f} s ({job.progress})")


# ------------------------------------------------------------------------------------------------------------ endpoint


PATH = "/api/estimate"

GONE_SECONDS = 1.0  # how often to check that the caller is still there
_STATUSES = ((QueueFullError, 429), (TimeLimitError, 504), (TraceError, 422), (JobError, 500), (SizerError, 400))


def endpoint_routes() -> list[Route]:
    """Return the route of the endpoint."""
    return [Route(PATH, _respond, methods=["GET"])]


def visitor_of(request: HttpRequest) -> Visitor:
    """Return the caller of a request. The queue sets no limit for the machine's own address."""
    address = request.client.host if request.client else ""
    if address in OWN and "x-forwarded-for" not in Headers(scope=request.scope):
        return Visitor()
    return Visitor(address=address, session=PATH)


async def _respond(request: HttpRequest) -> Response:
    if request.method != "GET":
        return _json({"error": f"{request.method} is not GET", "key": None, "allowed": "GET"}, 405)
    client = shared_client().on_behalf_of(visitor_of(request))
    try:
        report = await _answer(client, request)
    except SizerError as error:
        return _json(describe_error(error), status_of(error))
    if report is None:
        return Response(status_code=499)  # the caller has gone
    if not report.estimates:
        return _json(describe_untraced(report), 422)
    return Response(report.to_json(), media_type="application/json", headers=_HEADERS)


async def _answer(client: JobClient, request: HttpRequest) -> Report | None:
    """Return the report of a request's query, None if the caller has gone."""
    query = request.url.query
    if not query:
        raise RequestError("arch is missing", allowed="arch=torchvision:resnet50 and other keys", todo="give a query")
    job: Job = await run_in_threadpool(client.submit, query)
    waited = 0.0
    try:
        while not job.done:
            await asyncio.sleep(POLL_SECONDS)
            waited += POLL_SECONDS
            if waited >= GONE_SECONDS:
                waited = 0.0
                if await request.is_disconnected():
                    job.cancel()
                    return None
        return job.result(timeout=0)
    finally:
        job.leave()


def status_of(error: SizerError) -> int:
    """Return the HTTP status of an error."""
    return next(status for kind, status in _STATUSES if isinstance(error, kind))


def describe_error(error: SizerError) -> dict[str, object]:
    """Return the JSON of an error; several refused keys are listed in `refusals`."""
    refusals = getattr(error, "refusals", ())
    first = refusals[0] if refusals else None
    found: dict[str, object] = {
        "error": str(error),
        "key": first.key if first else None,
        "allowed": first.allowed if first else error.allowed,
    }
    if len(refusals) > 1:
        rows = [{"key": one.key, "given": one.given, "allowed": one.allowed, "todo": one.todo} for one in refusals]
        found["refusals"] = rows
    return found


def describe_untraced(report: Report) -> dict[str, object]:
    """Return the JSON of a model that was counted only."""
    reasons = dict.fromkeys(report.failures.values()) or dict.fromkeys(report.notes)
    error = f"the model was counted, but its step could not be traced: {'; '.join(reasons)}"
    return {"error": error, "key": None, "allowed": None, "report": json.loads(report.to_json())}


def _json(value: dict[str, object], status: int) -> Response:
    return Response(json.dumps(value, ensure_ascii=False), status, headers=_HEADERS, media_type="application/json")


_HEADERS = {"Cache-Control": "no-store"}

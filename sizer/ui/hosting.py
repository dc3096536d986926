"""What an operator needs of the app beside its pages: its start and its end, and addresses that say how it is.

/healthz answers while this process serves pages; /readyz where a real job has ended well lately, and runs one where none has;
/metrics says what became of jobs to who brings the token that $SIZER_METRICS_TOKEN holds, and is not there for anybody else.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from sizer.base.errors import JobError, SizerError
from sizer.service.client import JobClient, shared_client
from sizer.service.monitoring import set_up_logging
from sizer.service.settings import is_public
from sizer.ui.once import done_once

LATELY_SECONDS = 60.0
PROBE_SECONDS = 5.0  # for a job of a second or less, which may have to wait for its turn
WARM_SECONDS = 180.0
POLL_SECONDS = 0.05
# How long a page's thread may hold the interpreter while others wait: the one that serves all addresses is one of them.
SWITCH_SECONDS = 0.0005
TOKEN_VARIABLE = "SIZER_METRICS_TOKEN"
_NO_CACHE = {"Cache-Control": "no-store"}
_log = logging.getLogger(__name__)


def routes() -> list[Route]:
    """The three addresses."""
    return [Route("/healthz", _alive), Route("/readyz", _ready), Route("/metrics", _metrics)]


@asynccontextmanager
async def lifespan(app: object) -> AsyncIterator[dict]:
    """The job server from before the first visitor to after the last. In public mode nobody is let in before a job has run.

    Raises SizerError where none can be run in public mode.
    """
    set_up_logging()
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    client = shared_client()
    try:
        client.start()
        if is_public():
            await _run_probe(client, WARM_SECONDS)
        gc.freeze()  # what was imported stays: collections need not go through it again and again
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
            _log.warning("not ready: %s", error)  # for the operator, not for whoever asks
            return PlainTextResponse("no job has ended well lately\n", status_code=503, headers=_NO_CACHE)
    return PlainTextResponse("ok\n", headers=_NO_CACHE)


async def _metrics(request: HttpRequest) -> PlainTextResponse:
    token = os.environ.get(TOKEN_VARIABLE, "")
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not token or not hmac.compare_digest(given.encode(), token.encode()):
        return PlainTextResponse("not found\n", status_code=404, headers=_NO_CACHE)
    return PlainTextResponse(shared_client().metrics(), headers=_NO_CACHE)


async def _run_probe(client: JobClient, seconds: float) -> None:
    """Run a small real job. Raises SizerError where it fails, or takes longer than `seconds`; it is left to end then."""
    job = client.submit_probe()
    end = time.monotonic() + seconds
    while not job.done and time.monotonic() < end:
        await asyncio.sleep(POLL_SECONDS)
    if job.result(timeout=0) is None:
        raise JobError(f"a small job has not ended within {seconds:.0f} s ({job.progress})")

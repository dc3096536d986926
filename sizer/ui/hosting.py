"""What an operator needs of the app beside its pages: its start and its end, and addresses that say how it is.

/healthz answers while this process serves pages; /readyz where a real job has ended well lately, and runs one where none has;
/metrics says what became of jobs to who brings the token that $SIZER_METRICS_TOKEN holds, and is not there for anybody else.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import hmac
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from unittest import mock

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from streamlit.proto.NewSession_pb2 import CustomThemeConfig
from streamlit.runtime import app_session

from sizer.errors import JobError, SizerError
from sizer.service.client import JobClient, shared_client
from sizer.service.logs import set_up_logging
from sizer.service.settings import is_public

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
        with _theme_read_once():
            yield {}
    finally:
        gc.unfreeze()
        sys.setswitchinterval(usual)
        await run_in_threadpool(client.close)


@contextmanager
def _theme_read_once() -> Iterator[None]:
    """Within the context a section of the theme is read once, and stays as it is.

    Streamlit reads all six, among all its options, for each page that it draws: more than a tenth of the time
    (`AppSession._create_new_session_message`, streamlit/runtime/app_session.py, read in 1.67). Where it does so by another function
    it is left to.
    """
    read = getattr(app_session, "_populate_theme_msg", None)
    if read is None:
        yield
        return

    @functools.cache
    def theme(section: str) -> CustomThemeConfig:
        message = CustomThemeConfig()
        read(message, section)
        return message

    def populate(message: CustomThemeConfig, section: str = "theme") -> None:
        if (found := theme(section)).ByteSize():  # else it is left out
            message.MergeFrom(found)

    with mock.patch.object(app_session, "_populate_theme_msg", populate):
        yield


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

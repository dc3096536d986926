"""Checks of a request before Streamlit, and the headers of every response.

Requests with a foreign Origin are refused here. Streamlit would ask an outside address for this host's name in its event loop
(`is_url_from_allowed_origins`, streamlit/web/server/server_util.py, 1.67; Streamlit's issue 7721). Host is checked against
`server.allowedHosts` (see `allowed_hosts`), Origin against Host and `server.corsAllowedOrigins`, both settings of Streamlit.

The number of open pages and the size of uploads are limited before Streamlit holds any of them.

Limits apply to each page, to each address and to all together. The machine's own address has no limit for itself. Streamlit's
runtime frees the files of a page with the page.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import logging
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from streamlit import config, runtime

from sizer.base.units import MIB
from sizer.service.settings import framing_origins, is_public
from sizer.service.variables import SESSION_UPLOADS, SESSIONS, UPLOADS, read_limit
from sizer.ui.links import COPY, write_default
from sizer.ui.preview import INDEX
from sizer.ui.question_words import PRESS

OWN = ("127.0.0.1", "::1")
STREAM = re.compile(r"/_stcore/stream/?$")
UPLOAD = re.compile(r"/_stcore/upload_file/([^/]+)/[^/]+/?$")

# Of one page: each message may be a run of the page, and no reader needs ten runs a second.
MESSAGES_A_SECOND, MESSAGES_AT_ONCE = 10.0, 30.0
# Of one address: the first page loads about 30 files, later pages one.
REQUESTS_A_SECOND, REQUESTS_AT_ONCE, MOST_ADDRESSES = 100.0, 2_000.0, 10_000

Held = Callable[[], Mapping[str, int]]  # bytes of each session's files


def _address_of(scope: Scope) -> str:
    return scope["client"][0] if scope["client"] else ""


def held_uploads() -> dict[str, int]:
    """Return the bytes of the files of each session."""
    if not runtime.exists():
        return {}
    files = runtime.get_instance().uploaded_file_mgr.file_storage
    return {session: sum(len(file.data) for file in list(held.values())) for session, held in list(files.items())}


class Bucket:
    """Token bucket that refills by `rate` a second, to at most `burst`."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, time.monotonic()

    def take(self) -> float:
        """Take a token, and return the seconds until it is available: 0 if it was."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - 1
        self._at = now
        return max(0.0, -self._left / self._rate)

    def give_back(self) -> None:
        """Return the last token, whose request was refused."""
        self._left += 1


class Quotas:
    """Limits of pages, uploads and requests.

    The status is 503 for too many pages, 413 for a large upload, 411 for one without a length, 429 for too many requests of an
    address. Too fast messages of a page wait: Streamlit reruns the page for each message.
    """

    def __init__(self, app: ASGIApp, held: Held = held_uploads):
        self._app, self._held = app, held
        self._most_pages = read_limit(SESSIONS, 200)
        self._most_of_one = read_limit(SESSION_UPLOADS, 32) * MIB
        self._most_of_all = read_limit(UPLOADS, 128) * MIB
        self._pages: Counter[str] = Counter()  # by address
        self._coming: Counter[str] = Counter()  # bytes of running uploads, by session
        self._asked: OrderedDict[str, Bucket] = OrderedDict()  # by address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and STREAM.search(scope["path"]):
            await self._open_page(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "PUT" and (found := UPLOAD.search(scope["path"])):
            await self._upload(found[1], scope, receive, send)
        elif scope["type"] == "http" and self._is_too_fast(scope):
            await PlainTextResponse("too many requests\n", status_code=429)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_too_fast(self, scope: Scope) -> bool:
        """Return True if the address has exceeded its rate. Nothing of the request is read before."""
        address = _address_of(scope)
        bucket = self._asked.setdefault(address, Bucket(REQUESTS_A_SECOND, REQUESTS_AT_ONCE))
        self._asked.move_to_end(address)
        while len(self._asked) > MOST_ADDRESSES:
            self._asked.popitem(last=False)
        if bucket.take() == 0:
            return False
        bucket.give_back()
        return True

    async def _open_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        address, bucket = _address_of(scope), Bucket(MESSAGES_A_SECOND, MESSAGES_AT_ONCE)

        async def receive_in_time() -> Message:
            message = await receive()
            if (seconds := bucket.take()) > 0:
                await asyncio.sleep(seconds)
            return message

        too_many = self._pages.total() >= self._most_pages
        own = address in OWN and "x-forwarded-for" not in Headers(scope=scope)  # a forwarded address is never own
        if too_many or (not own and self._pages[address] >= max(self._most_pages // 2, 1)):
            return await PlainTextResponse("too many pages are open\n", status_code=503)(scope, receive, send)
        self._pages[address] += 1
        try:
            await self._app(scope, receive_in_time, send)
        finally:
            self._pages[address] -= 1
            self._pages += Counter()  # drops the zeros

    async def _upload(self, session: str, scope: Scope, receive: Receive, send: Send) -> None:
        length = Headers(scope=scope).get("content-length", "")
        if not (length.isascii() and length.isdecimal()):
            return await PlainTextResponse("how long is it?\n", status_code=411)(scope, receive, send)
        size, held = int(length), Counter(self._held()) + self._coming
        if held[session] + size > self._most_of_one or held.total() + size > self._most_of_all:
            return await PlainTextResponse("too much is uploaded\n", status_code=413)(scope, receive, send)
        self._coming[session] += size
        try:
            await self._app(scope, receive, send)
        finally:
            self._coming[session] -= size
            self._coming += Counter()


# ------------------------------------------------------------------------------------------------------------- surface


LOOPBACK = ("127.0.0.1", "localhost", "::1")  # values of server.address
# Older versions of Starlette read a Host header up to its first colon. "[" is then an IPv6 address, which cannot be rebound.
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "[")
_log = logging.getLogger(__name__)
HIDDEN = re.compile(r"/_stcore/(metrics|agent)(/|$)")  # addresses that visitors do not need
_INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def middleware() -> list[Middleware]:
    """Return the checks in the order of a request. Call it after the server has been configured."""
    return [
        Middleware(Surface, policy=content_policy()),
        Middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts(), www_redirect=False),
        Middleware(Quotas),
    ]


def allowed_hosts() -> list[str]:
    """Return the allowed host names of this app.

    They are the names of `server.allowedHosts`. Without any, an app on a loopback address answers to loopback names only: a site
    whose name resolves to 127.0.0.1 (DNS rebinding) would otherwise be its own origin.
    """
    if given := config.get_option("server.allowedHosts"):
        return list(given)
    if config.get_option("server.address") in LOOPBACK:
        return [*LOOPBACK_NAMES]
    if is_public():
        _log.warning("no STREAMLIT_SERVER_ALLOWED_HOSTS: any site may name this app its own (DNS rebinding); set this host's names")
    return ["*"]


class Surface:
    """Middleware that refuses foreign requests, hides internal addresses, and adds the headers."""

    def __init__(self, app: ASGIApp, policy: str):
        self._app = app
        self._headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "same-origin",  # a link holds the question, maybe a whole config
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        if not is_own_origin(Headers(scope=scope)):
            return PlainTextResponse("this comes from another site\n", status_code=403)
        if HIDDEN.search(scope["path"]):
            return PlainTextResponse("not found\n", status_code=404)
        return None


def is_own_origin(headers: Headers) -> bool:
    """Return True if a request comes from this host's pages, from an allowed origin, or from no page."""
    origins = headers.getlist("origin")
    if not origins or not config.get_option("server.enableCORS"):
        return True
    (origin, *others) = origins
    if others:
        return False
    try:
        netloc = urlsplit(origin).netloc
    except ValueError:  # not an address, such as "http://["
        return False
    allowed = {one.strip().rstrip("/") for one in config.get_option("server.corsAllowedOrigins") or ()}
    return origin in allowed or (netloc != "" and netloc == headers.get("host"))


@functools.cache
def content_policy() -> str:
    """Return the Content-Security-Policy of Streamlit's pages.

    Vega compiles its expressions ("unsafe-eval"). Emotion and the legends write styles into the page. Inline scripts are allowed by
    their hashes. Pages load nothing from other hosts, and send nothing to them.
    """
    inline = [*_INLINE.findall(INDEX.read_text(encoding="utf-8")), PRESS, COPY, write_default()]
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline)
    scripts = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return "; ".join(
        (
            "default-src 'self'",
            f"script-src 'self' 'unsafe-eval' {scripts}",
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "font-src 'self' data:",
            "worker-src 'self' blob:",
            "object-src 'none'",
            "base-uri 'self'",
            "form-action 'self'",
            " ".join(("frame-ancestors 'self'", *framing_origins())),
        )
    )

"""What a request must look like before Streamlit sees it, and the headers of every response.

A request with an Origin that is not this host's is refused here: to find out what this host is called outside, Streamlit would ask
an outside address in its event loop (`is_url_from_allowed_origins`, streamlit/web/server/server_util.py, 1.67; issue 7721 there).
Host is checked against `server.allowedHosts`, see `allowed_hosts`, Origin against Host and `server.corsAllowedOrigins`: both are
Streamlit's settings.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from streamlit import config

from sizer.service.settings import framing_origins, is_public
from sizer.ui.links import COPY
from sizer.ui.preview import INDEX
from sizer.ui.question import PRESS
from sizer.ui.quotas import Quotas

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # values of server.address
# Older Starlettes read a Host header up to its first colon: "[" is an IPv6 address, which is no name that could be rebound.
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "[")
_log = logging.getLogger(__name__)
HIDDEN = re.compile(r"/_stcore/(metrics|agent)(/|$)")  # what visitors have no business with
_INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def middleware() -> list[Middleware]:
    """The checks, in the order in which a request meets them. Read when the server has been configured."""
    return [
        Middleware(Surface, policy=content_policy()),
        Middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts(), www_redirect=False),
        Middleware(Quotas),
    ]


def allowed_hosts() -> list[str]:
    """Return the names by which this app may be asked for.

    They are those of `server.allowedHosts`. Without any, an app on a loopback address answers to the names of loopback alone: a
    site whose name is made to resolve to 127.0.0.1 (DNS rebinding) would be its own origin.
    """
    if given := config.get_option("server.allowedHosts"):
        return list(given)
    if config.get_option("server.address") in LOOPBACK:
        return [*LOOPBACK_NAMES]
    if is_public():
        _log.warning("no STREAMLIT_SERVER_ALLOWED_HOSTS: any site may name this app its own (DNS rebinding); set this host's names")
    return ["*"]


class Surface:
    """Refuses what comes from elsewhere, hides what is not for visitors, and adds the headers."""

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
    """Whether a request comes from this host's own pages, from an origin that the operator allows, or from no page at all."""
    origins = headers.getlist("origin")
    if not origins or not config.get_option("server.enableCORS"):
        return True
    (origin, *others) = origins
    if others:
        return False
    try:
        netloc = urlsplit(origin).netloc
    except ValueError:  # no address: "http://[", say
        return False
    allowed = {one.strip().rstrip("/") for one in config.get_option("server.corsAllowedOrigins") or ()}
    return origin in allowed or (netloc != "" and netloc == headers.get("host"))


@functools.cache
def content_policy() -> str:
    """The Content-Security-Policy under which Streamlit's pages run.

    Vega compiles its expressions ("unsafe-eval"), Emotion and our own legends write styles into the page; the scripts that stand in
    the page are named by their hashes. Nothing is loaded from, or sent to, another host.
    """
    inline = [*_INLINE.findall(INDEX.read_text(encoding="utf-8")), PRESS, COPY]
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

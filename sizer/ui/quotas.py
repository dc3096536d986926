"""How many pages may be open and how much they may upload, refused before Streamlit holds any of it.

Limits are per page and address as well as in all, so that one visitor leaves something to the others; the machine's own address has
no limit of its own. What is held is what Streamlit's runtime holds: it forgets a page's files with the page.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from streamlit import runtime

from sizer.base.units import MIB
from sizer.service.variables import SESSION_UPLOADS, SESSIONS, UPLOADS, read_limit

OWN = ("127.0.0.1", "::1")
STREAM = re.compile(r"/_stcore/stream/?$")
UPLOAD = re.compile(r"/_stcore/upload_file/([^/]+)/[^/]+/?$")

# Of one page: a reader moves no control ten times a second, and each message may be a run of the page.
MESSAGES_A_SECOND, MESSAGES_AT_ONCE = 10.0, 30.0
# Of one address: a page is some 30 files at first, then one.
REQUESTS_A_SECOND, REQUESTS_AT_ONCE, MOST_ADDRESSES = 100.0, 2_000.0, 10_000

Held = Callable[[], Mapping[str, int]]  # the bytes that each session's files take


def _address_of(scope: Scope) -> str:
    return scope["client"][0] if scope["client"] else ""


def held_uploads() -> dict[str, int]:
    """The bytes of the files that each session holds."""
    if not runtime.exists():
        return {}
    files = runtime.get_instance().uploaded_file_mgr.file_storage
    return {session: sum(len(file.data) for file in list(held.values())) for session, held in list(files.items())}


class Bucket:
    """A budget that fills up by `rate` a second, to at most `burst`."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, time.monotonic()

    def take(self) -> float:
        """Take one, and return the seconds after which it would have been there: 0 if it was."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - 1
        self._at = now
        return max(0.0, -self._left / self._rate)

    def give_back(self) -> None:
        """Take back the last one that was taken, whose request is refused."""
        self._left += 1


class Quotas:
    """Refuses a page too many with 503, an upload too large with 413, one that does not say how large it is with 411, and an
    address that asks for pages too fast with 429. What a page is told too fast waits: Streamlit runs it again for each message.
    """

    def __init__(self, app: ASGIApp, held: Held = held_uploads):
        self._app, self._held = app, held
        self._most_pages = read_limit(SESSIONS, 200)
        self._most_of_one = read_limit(SESSION_UPLOADS, 32) * MIB
        self._most_of_all = read_limit(UPLOADS, 128) * MIB
        self._pages: Counter[str] = Counter()  # by address
        self._coming: Counter[str] = Counter()  # bytes on their way, by session
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
        """Return True if the address has asked for too much lately, before anything of its request is read."""
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
        own = address in OWN and "x-forwarded-for" not in Headers(scope=scope)  # a forwarded address is never the server's own
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

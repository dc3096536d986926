"""How many pages may be open and how much they may upload, refused before Streamlit holds any of it.

Limits are per page and address as well as in all, so that one visitor leaves something to the others; the machine's own address has
no limit of its own. What is held is what Streamlit's runtime holds: it forgets a page's files with the page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from streamlit import runtime

from sizer.service.variables import SESSION_UPLOADS, SESSIONS, UPLOADS, read_limit
from sizer.units import MIB

OWN = ("127.0.0.1", "::1")
STREAM = re.compile(r"/_stcore/stream/?$")
UPLOAD = re.compile(r"/_stcore/upload_file/([^/]+)/[^/]+/?$")

Held = Callable[[], Mapping[str, int]]  # the bytes that each session's files take


def held_uploads() -> dict[str, int]:
    """The bytes of the files that each session holds."""
    if not runtime.exists():
        return {}
    files = runtime.get_instance().uploaded_file_mgr.file_storage
    return {session: sum(len(file.data) for file in list(held.values())) for session, held in list(files.items())}


class Quotas:
    """Refuses a page too many with 503, an upload too large with 413, one that does not say how large it is with 411."""

    def __init__(self, app: ASGIApp, held: Held = held_uploads):
        self._app, self._held = app, held
        self._most_pages = read_limit(SESSIONS, 200)
        self._most_of_one = read_limit(SESSION_UPLOADS, 32) * MIB
        self._most_of_all = read_limit(UPLOADS, 128) * MIB
        self._pages: Counter[str] = Counter()  # by address
        self._coming: Counter[str] = Counter()  # bytes on their way, by session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and STREAM.search(scope["path"]):
            await self._open_page(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "PUT" and (found := UPLOAD.search(scope["path"])):
            await self._upload(found[1], scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _open_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = scope["client"][0] if scope["client"] else ""
        too_many = self._pages.total() >= self._most_pages
        if too_many or (address not in OWN and self._pages[address] >= max(self._most_pages // 2, 1)):
            return await PlainTextResponse("too many pages are open\n", status_code=503)(scope, receive, send)
        self._pages[address] += 1
        try:
            await self._app(scope, receive, send)
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

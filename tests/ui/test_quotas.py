"""How many pages may be open and how much they may upload, with an app behind the door that waits until it is let go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from sizer.base.errors import JobError
from sizer.base.units import MIB
from sizer.service.variables import SESSION_UPLOADS, SESSIONS, UPLOADS
from sizer.ui import surface
from sizer.ui.surface import Quotas


class Door:
    """Quotas before an app that answers 200 once `release` is set; `held` are the bytes that it holds by session."""

    def __init__(self, held: dict[str, int] | None = None):
        self.release, self.entered = asyncio.Event(), 0
        self._quotas = Quotas(self._app, lambda: held or {})

    async def _app(self, scope, receive, send) -> None:
        self.entered += 1
        await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(self, scope: dict) -> int:
        sent = []

        async def send(message) -> None:
            sent.append(message)

        await self._quotas(scope, None, send)
        return sent[0]["status"]

    def page(self, address: str) -> Awaitable[int]:
        return self.ask({"type": "websocket", "path": "/_stcore/stream", "client": (address, 1), "headers": []})

    def upload(self, session: str, size: int | None) -> Awaitable[int]:
        headers = [] if size is None else [(b"content-length", str(size).encode())]
        path = f"/_stcore/upload_file/{session}/file"
        return self.ask({"type": "http", "method": "PUT", "path": path, "client": ("10.0.0.1", 1), "headers": headers})


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    for limit, number in ((SESSIONS, 6), (SESSION_UPLOADS, 2), (UPLOADS, 5)):
        monkeypatch.setenv(limit.name, str(number))


def outcome(*requests: Awaitable[int], door: Door) -> list[int]:
    """What each request is answered, the later ones while those before are still inside."""

    async def run() -> list[int]:
        tasks = []
        for request in requests:
            tasks.append(asyncio.ensure_future(request))
            await asyncio.sleep(0)
        door.release.set()
        return await asyncio.gather(*tasks)

    return asyncio.run(run())


def test_one_address_opens_half_of_the_pages_and_the_rest_is_for_others():
    door = Door()
    asked = ["10.0.0.1"] * 5 + ["10.0.0.2"] * 2 + ["10.0.0.3"] * 2
    assert outcome(*map(door.page, asked), door=door) == [200] * 3 + [503] * 2 + [200] * 2 + [200, 503]
    assert outcome(door.page("10.0.0.1"), door=door) == [200]  # the others have closed theirs


def test_the_machines_own_may_open_all():
    door = Door()
    assert outcome(*map(door.page, ["127.0.0.1"] * 7), door=door) == [200] * 6 + [503]


def test_one_page_uploads_so_much_and_all_together_so_much():
    door = Door()
    asked = [door.upload("a", MIB), door.upload("a", MIB), door.upload("a", 1), door.upload("b", 2 * MIB)]
    asked += [door.upload("c", MIB + 1), door.upload("c", MIB), door.upload("d", 1)]
    assert outcome(*asked, door=door) == [200, 200, 413, 200, 413, 200, 413]
    assert door.entered == 4


def test_what_a_page_holds_already_counts_too():
    door = Door({"a": 2 * MIB - 10, "b": 2 * MIB})
    asked = [door.upload("a", 11), door.upload("a", 10), door.upload("b", 1), door.upload("c", MIB + 1)]
    assert outcome(*asked, door=door) == [413, 200, 413, 413]


def test_upload_says_how_long_it_is():
    door = Door()
    assert outcome(door.upload("a", None), door=door) == [411]


def test_everything_else_passes():
    door = Door()
    scope = {"type": "http", "method": "GET", "path": "/", "client": None, "headers": []}
    assert outcome(door.ask(scope), door=door) == [200]


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", "1" * 20, "٣"])
def test_limit_that_cannot_be_read_is_refused_by_name(monkeypatch, value):
    monkeypatch.setenv(SESSIONS.name, value)
    with pytest.raises(
        JobError, match=r"SIZER_SESSIONS \(open pages.*\) cannot be used: given .*, allowed a whole number from 1 to"
    ):
        Door()


def test_an_address_that_a_proxy_names_is_never_the_machines_own():
    door = Door()
    headers = [(b"x-forwarded-for", b"127.0.0.1")]
    page = {"type": "websocket", "path": "/_stcore/stream", "client": ("127.0.0.1", 1), "headers": headers}
    assert outcome(*(door.ask(page) for _ in range(4)), door=door) == [200, 200, 200, 503]  # half of the six


def test_messages_of_one_page_wait_once_they_come_too_fast(monkeypatch):
    waited, now = [], [0.0]

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(surface.asyncio, "sleep", sleep)
    monkeypatch.setattr(surface.time, "monotonic", lambda: now[0])

    async def app(scope, receive, send) -> None:
        for _ in range(2000):
            await receive()

    async def receive() -> dict:
        return {"type": "websocket.receive"}

    page = {"type": "websocket", "path": "/_stcore/stream", "client": ("10.0.0.1", 1), "headers": []}
    asyncio.run(Quotas(app, dict)(page, receive, None))
    # 30 at once, then 10 a second
    assert len(waited) == 2000 - 30 and sum(waited) == pytest.approx((2000 - 30) / 10)


def test_an_address_that_asks_too_fast_is_refused_before_anything_is_read(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(surface.time, "monotonic", lambda: now[0])
    door = Door()
    door.release.set()

    def get(address: str) -> Awaitable[int]:
        return door.ask({"type": "http", "method": "GET", "path": "/compare", "client": (address, 1), "headers": []})

    async def run() -> list[int]:
        return [await get("10.0.0.1") for _ in range(2100)] + [await get("10.0.0.2")]

    answers = asyncio.run(run())
    assert answers.count(429) == 100 and answers[-1] == 200
    now[0] = 1.0
    assert asyncio.run(get("10.0.0.1")) == 200

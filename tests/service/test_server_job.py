"""A job's turns while its child comes and goes, and the clock that gives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sizer.service.server import Server
from sizer.service.server_job import ServerJob
from sizer.service.settings import Settings


class Child:
    """A child that notes what is done to it."""

    id = 1

    def __init__(self) -> None:
        self.done: list[str] = []

    def pause(self) -> bool:
        self.done.append("pause")
        return True

    def go_on(self) -> None:
        self.done.append("go on")

    def kill(self) -> None:
        self.done.append("kill")


def test_a_child_that_is_being_ended_is_neither_paused_nor_goes_on():
    """Its limit cannot be moved any more: that once killed the clock, and all jobs waited for ever."""
    child = Child()

    async def turns() -> None:
        held = ServerJob(asyncio.current_task())
        async with asyncio.timeout(60) as limit:
            held.hold(child, limit)
            held.pause(0.0)
            held.start(1.0)
            held.end_time()
        held.pause(2.0)
        assert not held.turn.is_set()
        held.start(3.0)
        assert held.turn.is_set()
        held.stop()
        assert held.release()

    asyncio.run(turns())
    assert child.done == ["pause", "go on", "kill"]


def test_a_server_whose_clock_fails_ends(monkeypatch: pytest.MonkeyPatch):
    def fail(self: Server) -> None:
        raise KeyError("mine")

    async def no_lines() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    monkeypatch.setattr(Server, "_keep_budget", fail)
    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(Server(Settings(tapes=""), lambda data: None, {}, None).serve(no_lines()))
    assert failed.group_contains(KeyError, match="mine")

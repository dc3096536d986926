"""A Redis server for the tests of what goes over it, and what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.service.brokers import RedisServer

if TYPE_CHECKING:
    from sizer.service.broker.board import Board


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for a module."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def url(redis: RedisServer) -> str:
    """The address of an empty database."""
    from redis import Redis

    Redis.from_url(redis.url).flushall()
    return redis.url


@pytest.fixture
def board(url: str) -> Board:
    """The board of that database."""
    from sizer.service.broker.board import Board, connect

    return Board(connect(url))

"""Results that are kept for a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Cache(Generic[T]):
    """The most recently used values, each for a limited time."""

    def __init__(self, ttl_seconds: float, max_entries: int, clock: Callable[[], float]):
        self._ttl_seconds, self._max_entries, self._clock = ttl_seconds, max_entries, clock
        self._entries: OrderedDict[tuple, tuple[float, T]] = OrderedDict()

    def get(self, key: tuple) -> T | None:
        expires, value = self._entries.get(key, (0.0, None))
        if value is None or self._clock() >= expires:
            self._entries.pop(key, None)
            return None
        self._entries.move_to_end(key)
        return value

    def put(self, key: tuple, value: T, ttl_seconds: float | None = None) -> None:
        self._entries[key] = (self._clock() + (ttl_seconds or self._ttl_seconds), value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        self._entries.clear()

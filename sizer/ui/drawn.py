"""What was drawn for an answer once is sent again as it was: to a page that runs anew, and to whoever else looks at that answer.

Making a chart's specification takes tens of milliseconds, sending it a fraction of one. Streamlit keeps what a function that it
caches has drawn (`st.cache_data`); what the function draws from is told apart here, without reading an answer of thousands of
numbers each time.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import streamlit as st

KEPT = 512  # drawings; a chart takes some 50 KiB
Made = TypeVar("Made")
_SCALARS = (str, int, float, bool, type(None))


def drawn_once(show: Callable[..., None]) -> Callable[..., None]:
    """Decorate a function that draws from its arguments alone, and no widget: for the same ones it draws once.

    The theme may be looked at, too. Arguments are values that nobody changes. Of an answer the numbers are not compared but the
    tuples that hold them: one that is equal, but was read again, is drawn again.
    """
    name = f"{show.__module__}.{show.__qualname__}"

    @functools.wraps(show)
    def show_drawn(*arguments: object) -> None:
        drawing = functools.partial(show, *arguments)
        _draw(name=name, token=_TOKENS.of(*arguments), theme=st.context.theme.type, _show=drawing)

    return show_drawn


def made_once(make: Callable[..., Made]) -> Callable[..., Made]:
    """Decorate a function that makes something of its arguments alone, which nobody changes: for the same ones it is made once."""
    name = f"{make.__module__}.{make.__qualname__}"

    @functools.wraps(make)
    def take_made(*arguments: object) -> Made:
        return _make(name=name, token=_TOKENS.of(*arguments), _make=functools.partial(make, *arguments))

    return take_made


# Both are given their arguments by name: Streamlit looks up the name of one that has none in the signature, for each call.
@st.cache_data(max_entries=KEPT, show_spinner=False)
def _draw(*, name: str, token: int, theme: str | None, _show: Callable[[], None]) -> None:
    _show()


@st.cache_resource(max_entries=KEPT, show_spinner=False)
def _make(*, name: str, token: int, _make: Callable[[], object]) -> object:
    return _make()


class Tokens:
    """A number for each group of values that was seen lately, the same one for the same values. For use from any thread."""

    def __init__(self, most: int):
        self._most, self._lock = most, threading.Lock()
        self._known: OrderedDict[object, tuple[int, object]] = OrderedDict()
        self._keys: OrderedDict[int, tuple[object, object]] = OrderedDict()  # by identity: the value, and its key
        self._numbers = itertools.count()

    def of(self, *values: object) -> int:
        """The number of some values. They are kept alive: none other can get the identity of one of their parts."""
        with self._lock:
            key = tuple(map(self._key_of, values))
            number, _ = _look_up(self._known, key, lambda: (next(self._numbers), values), self._most)
            return number

    def _key_of(self, value: object) -> object:
        """The key of a value, of an answer or a part of one read off it once: pages look at the same one again and again."""
        if not is_dataclass(value):
            return _key(value)
        _, key = _look_up(self._keys, id(value), lambda: (value, _key(value)), self._most)
        return key


def _look_up(known: OrderedDict[Any, Made], key: object, make: Callable[[], Made], most: int) -> Made:
    """What is known by a key, made where nothing is; what was not looked up for longest is given up for it."""
    if key not in known:
        known[key] = make()
        if len(known) > most:
            known.popitem(last=False)
    known.move_to_end(key)
    return known[key]


def _key(value: object) -> object:
    """What tells a value from others: its type and parts, down to tuples of more than scalars, which are told by their identity."""
    if isinstance(value, _SCALARS):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(_key(getattr(value, name)) for name in _names(type(value))))
    if isinstance(value, Mapping):
        return (dict, *((key, _key(part)) for key, part in value.items()))
    if isinstance(value, tuple) and all(isinstance(part, _SCALARS) for part in value):
        return value
    return (type(value), id(value))


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


_TOKENS = Tokens(KEPT)

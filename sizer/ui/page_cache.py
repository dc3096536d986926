"""Caches of a page's work: drawings of answers, tinted tables, and conversions that Streamlit repeats for each page.

Streamlit keeps the drawings of cached functions (`st.cache_data`). `drawn_once` compares answers without reading thousands of
numbers each time.

`done_once` replaces functions of Streamlit 1.67. It changes nothing in a version that lacks them.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar
from unittest import mock

import streamlit as st
from pandas import DataFrame
from pandas.io.formats.style import Styler
from streamlit import dataframe_util
from streamlit.proto.NewSession_pb2 import CustomThemeConfig
from streamlit.runtime import app_session

KEPT = 512  # drawings; a chart takes 2 to 30 KiB
Made = TypeVar("Made")
_SCALARS = (str, int, float, bool, type(None))


def drawn_once(show: Callable[..., None]) -> Callable[..., None]:
    """Decorate a function that draws from its arguments only, without widgets: it draws once for the same arguments.

    The function may read the theme. Arguments are immutable. Answers are compared by the identity of their tuples: an equal answer
    that was parsed again is drawn again.
    """
    name = f"{show.__module__}.{show.__qualname__}"

    @functools.wraps(show)
    def show_drawn(*arguments: object) -> None:
        drawing = functools.partial(show, *arguments)
        _draw(name=name, token=_TOKENS.of(*arguments), theme=st.context.theme.type, _show=drawing)

    return show_drawn


def made_once(make: Callable[..., Made]) -> Callable[..., Made]:
    """Decorate a pure function of immutable arguments: it runs once for the same arguments."""
    name = f"{make.__module__}.{make.__qualname__}"

    @functools.wraps(make)
    def take_made(*arguments: object) -> Made:
        return _make(name=name, token=_TOKENS.of(*arguments), _make=functools.partial(make, *arguments))

    return take_made


# Arguments are passed by name: Streamlit looks up the names of positional ones in the signature, for each call.
@st.cache_data(max_entries=KEPT, show_spinner=False)
def _draw(*, name: str, token: int, theme: str | None, _show: Callable[[], None]) -> None:
    _show()


@st.cache_resource(max_entries=KEPT, show_spinner=False)
def _make(*, name: str, token: int, _make: Callable[[], object]) -> object:
    return _make()


class Tokens:
    """Numbers of recently seen groups of values: the same number for the same values. Thread-safe."""

    def __init__(self, most: int):
        self._most, self._lock = most, threading.Lock()
        self._known: OrderedDict[object, tuple[int, object]] = OrderedDict()
        self._keys: OrderedDict[int, tuple[object, object]] = OrderedDict()  # identity → value and its key
        self._numbers = itertools.count()

    def of(self, *values: object) -> int:
        """Return the number of some values. They are kept alive, so that no other object gets the identity of a part."""
        with self._lock:
            key = tuple(map(self._key_of, values))
            number, _ = _look_up(self._known, key, lambda: (next(self._numbers), values), self._most)
            return number

    def _key_of(self, value: object) -> object:
        """Return the key of a value. The keys of answers and their parts are computed once."""
        if not is_dataclass(value):
            return _key(value)
        _, key = _look_up(self._keys, id(value), lambda: (value, _key(value)), self._most)
        return key


def _look_up(known: OrderedDict[Any, Made], key: object, make: Callable[[], Made], most: int) -> Made:
    """Return the entry of a key, or make it. The least recently used entry is dropped for a new one."""
    if key not in known:
        known[key] = make()
        if len(known) > most:
            known.popitem(last=False)
    known.move_to_end(key)
    return known[key]


def _key(value: object) -> object:
    """Return a key of a value: its type and the keys of its parts. A tuple of other values than scalars counts by identity."""
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


# -------------------------------------------------------------------------------------------------------- tinted tables


class Texts(DataFrame):
    """An immutable table of texts that keeps its converted form for the browser."""

    _internal_names = [*DataFrame._internal_names, "_arrow"]  # noqa: RUF012 (as pandas has it: no column, but an attribute)
    _arrow: bytes | None = None

    def astype(self, dtype: object, *arguments: object, **options: object) -> DataFrame:
        """Return this table if texts are asked for."""
        return self if dtype is str else super().astype(dtype, *arguments, **options)

    def arrow(self, convert: Callable[[DataFrame], bytes]) -> bytes:
        """Return the result of `convert` for this table, computed once."""
        if self._arrow is None:
            self._arrow = convert(self)
        return self._arrow


def worked_out(styler: Styler) -> Styler:
    """Return an immutable styler of a table for Streamlit, with precomputed styles. Texts are shown unchanged.

    Streamlit has pandas compute and translate styles each time it shows a table (`marshall_styler`, streamlit/elements/lib/
    pandas_styler_utils.py, 1.67), and writes the displayed values into a copy of the table, cell by cell. This styler returns the
    styles of the first time, and no displayed values.
    """
    styler.set_uuid("texts")
    styler._compute()
    translated = styler._translate(False, False) | {"body": []}
    styler._compute = lambda: styler
    styler._translate = lambda *_: translated
    styler.data = Texts(styler.data)
    return styler


# -------------------------------------------------------------------------------------------------------- of Streamlit


@contextmanager
def done_once() -> Iterator[None]:
    """Read the theme once and convert each table of texts once, within the context. The theme must not change in it."""
    with ExitStack() as stack:
        for module, name, replacement in (
            (app_session, "_populate_theme_msg", _read_once),
            (dataframe_util, "convert_pandas_df_to_arrow_bytes", _convert_once),
        ):
            if (plain := getattr(module, name, None)) is not None:
                stack.enter_context(mock.patch.object(module, name, replacement(plain)))
        yield


def _read_once(read: Callable[[CustomThemeConfig, str], None]) -> Callable[..., None]:
    """Cache the theme.

    Streamlit reads its six sections from all options for each page, more than a tenth of the time
    (`AppSession._create_new_session_message`, streamlit/runtime/app_session.py).
    """

    @functools.cache
    def theme(section: str) -> CustomThemeConfig:
        message = CustomThemeConfig()
        read(message, section)
        return message

    def populate(message: CustomThemeConfig, section: str = "theme") -> None:
        if (found := theme(section)).ByteSize():  # else it is left out
            message.MergeFrom(found)

    return populate


def _convert_once(convert: Callable[..., bytes]) -> Callable[..., bytes]:
    """Cache conversions.

    Streamlit converts the values and the texts of a tinted table each time it shows it, a tenth of the time
    (`ArrowMixin.dataframe`, streamlit/elements/arrow.py).
    """

    def convert_unless_kept(frame: DataFrame, **options: object) -> bytes:
        if isinstance(frame, Texts) and not options:
            return frame.arrow(convert)
        return convert(frame, **options)

    return convert_unless_kept

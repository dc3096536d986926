"""Work that Streamlit and Altair do anew for each page, done once: reading the theme, converting tables, checking charts.

Each function replaces one of theirs, read in Streamlit 1.67 and Altair 6.0. A version without that function is left as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from altair.utils import schemapi
from pandas import DataFrame
from streamlit import dataframe_util
from streamlit.proto.NewSession_pb2 import CustomThemeConfig
from streamlit.runtime import app_session

from sizer.ui.styled import Texts


@contextmanager
def done_once() -> Iterator[None]:
    """Read the theme once, convert each table of texts once, and check no chart, within the context. The theme stays as it is."""
    with ExitStack() as stack:
        for module, name, replacement in (
            (app_session, "_populate_theme_msg", _read_once),
            (dataframe_util, "convert_pandas_df_to_arrow_bytes", _convert_once),
            (schemapi, "DEBUG_MODE", _never),
            (schemapi.SchemaBase, "validate", _accept),
            (getattr(schemapi, "_FromDict", None), "__init__", _list_classes_once),
        ):
            if (plain := getattr(module, name, None)) is not None:
                stack.enter_context(mock.patch.object(module, name, replacement(plain)))
        yield


def _never(debug_mode: bool) -> bool:
    """Half of the time that a chart takes is its check against Vega-Lite's schema: the tests check ours (`schemapi.DEBUG_MODE`)."""
    return False


def _accept(validate: Callable[..., None]) -> Callable[..., None]:
    return lambda *arguments, **options: None


def _list_classes_once(fill: Callable[..., None]) -> Callable[..., None]:
    """Altair lists some 400 classes by a hash of their schemas for each channel: a third of the time of a chart."""
    known: dict[tuple[type, ...], Any] = {}

    def list_classes(self: Any, classes: Iterable[type]) -> None:
        classes = tuple(classes)
        if classes not in known:
            fill(self, classes)
            known[classes] = self.class_dict
        self.class_dict = known[classes]

    return list_classes


def _read_once(read: Callable[[CustomThemeConfig, str], None]) -> Callable[..., None]:
    """Streamlit reads all six sections of the theme, among all its options, for each page that it draws: more than a tenth of
    the time (`AppSession._create_new_session_message`, streamlit/runtime/app_session.py)."""

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
    """A tinted table is converted twice each time that it is shown, its values and its texts: a tenth of the time
    (`ArrowMixin.dataframe`, streamlit/elements/arrow.py)."""

    def convert_unless_kept(frame: DataFrame, **options: object) -> bytes:
        if isinstance(frame, Texts) and not options:
            return frame.arrow(convert)
        return convert(frame, **options)

    return convert_unless_kept

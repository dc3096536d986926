"""What Streamlit does anew for each page and is done once here: reading the theme, converting a table of texts for the browser.

Both take the place of a function of its own, read in 1.67. Where another version has no such function it is left to what it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from pandas import DataFrame
from streamlit import dataframe_util
from streamlit.proto.NewSession_pb2 import CustomThemeConfig
from streamlit.runtime import app_session

from sizer.ui.styled import Texts


@contextmanager
def done_once() -> Iterator[None]:
    """Within the context the theme is read once, and each table of texts converted once; the theme stays as it is."""
    with ExitStack() as stack:
        for module, name, replacement in (
            (app_session, "_populate_theme_msg", _read_once),
            (dataframe_util, "convert_pandas_df_to_arrow_bytes", _convert_once),
        ):
            if (plain := getattr(module, name, None)) is not None:
                stack.enter_context(mock.patch.object(module, name, replacement(plain)))
        yield


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

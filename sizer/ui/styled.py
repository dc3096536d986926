"""A tinted table of texts that is worked out once, however often it is shown."""

from __future__ import annotations

from collections.abc import Callable

from pandas import DataFrame
from pandas.io.formats.style import Styler


class Texts(DataFrame):
    """A table of texts that nobody changes, and its form for the browser once it has been converted."""

    _internal_names = [*DataFrame._internal_names, "_arrow"]  # noqa: RUF012 (as pandas has it: no column, but an attribute)
    _arrow: bytes | None = None

    def astype(self, dtype: object, *arguments: object, **options: object) -> DataFrame:
        """This table where texts are asked for."""
        return self if dtype is str else super().astype(dtype, *arguments, **options)

    def arrow(self, convert: Callable[[DataFrame], bytes]) -> bytes:
        """What `convert` makes of this table, which it is asked for once."""
        if self._arrow is None:
            self._arrow = convert(self)
        return self._arrow


def worked_out(styler: Styler) -> Styler:
    """The styler of a table whose texts are shown as they are, for Streamlit alone; from now on nothing of it changes.

    Streamlit has pandas compute and translate styles each time that it shows them (`marshall_styler`, streamlit/elements/lib/
    pandas_styler_utils.py, 1.67), and writes what is to be shown into a copy of the table cell by cell. Both are done here: it is
    given the styles of the first time, and no cell has another text than its own.
    """
    styler.set_uuid("texts")
    styler._compute()
    translated = styler._translate(False, False) | {"body": []}
    styler._compute = lambda: styler
    styler._translate = lambda *_: translated
    styler.data = Texts(styler.data)
    return styler

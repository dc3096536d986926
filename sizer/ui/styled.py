"""A tinted table of texts that is worked out once, however often it is shown."""

from __future__ import annotations

from pandas.io.formats.style import Styler


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
    return styler

"""Frame around a page, and tabs that draw only the open one.

A visitor may open any page first. Streamlit then runs it without app.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import streamlit as st

FRAMED = "framed"  # session state: app.py has run


def enter() -> None:
    """Note that app.py has run; for app.py."""
    st.session_state[FRAMED] = True


def need_frame(path: str) -> None:
    """Rerun the page at `path` through app.py if Streamlit runs it alone. Call it in the first line of a page.

    Streamlit runs the files of a folder `pages` as pages until `st.navigation` has been called once
    (streamlit/runtime/pages_manager.py, 1.67). A page that is opened first would lack its frame.
    """
    if FRAMED not in st.session_state:
        st.session_state[FRAMED] = False
        pages = [st.Page(_nothing, title="Sizer", default=True), st.Page(_nothing, title=path, url_path=path)]
        st.navigation(pages, position="hidden")
        st.rerun()


def _nothing() -> None:
    """Be the page that `st.navigation` needs and never shows."""


# ----------------------------------------------------------------------------------------------------------------- tabs


def show_tabs(contents: Mapping[str, Callable[[], object]], *, key: str, default: str | None = None) -> None:
    """Show tabs by name and draw the open one: at first `default`, or the first tab. `key` holds the name of the open tab."""
    tabs = st.tabs(list(contents), default=default, key=key, on_change="rerun")
    for show, tab in zip(contents.values(), tabs, strict=True):
        if tab.open:
            with tab:
                show()

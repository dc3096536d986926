"""Frame around a page, and tabs of which only the open one is drawn.

A page may be the first thing that anybody opens; Streamlit then runs it without app.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import streamlit as st

FRAMED = "framed"  # session state: app.py has run


def enter() -> None:
    """Note that app.py has run; for app.py."""
    st.session_state[FRAMED] = True


def need_frame(path: str) -> None:
    """Run the page at `path` once more through app.py where Streamlit runs it alone; for the first line of a page.

    A process that finds a folder `pages` beside the main script makes pages of its own of it until `st.navigation` has
    been called once (streamlit/runtime/pages_manager.py, 1.67): a link to a page that is opened first would lack its frame.
    """
    if FRAMED not in st.session_state:
        st.session_state[FRAMED] = False
        pages = [st.Page(_nothing, title="Sizer", default=True), st.Page(_nothing, title=path, url_path=path)]
        st.navigation(pages, position="hidden")
        st.rerun()


def _nothing() -> None:
    """A page of its own, never shown."""


# ----------------------------------------------------------------------------------------------------------------- tabs


def show_tabs(contents: Mapping[str, Callable[[], object]], *, key: str, default: str | None = None) -> None:
    """Show tabs by name, the first or the `default` one open, and draw what the open one has; `key` holds its name."""
    tabs = st.tabs(list(contents), default=default, key=key, on_change="rerun")
    for show, tab in zip(contents.values(), tabs, strict=True):
        if tab.open:
            with tab:
                show()

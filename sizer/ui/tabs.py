"""Tabs of which the open one alone is drawn: what is not looked at costs a page nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import streamlit as st


def show_tabs(contents: Mapping[str, Callable[[], object]], *, key: str, default: str | None = None) -> None:
    """Show tabs by name, the first or the `default` one open, and draw what the open one has; `key` holds its name."""
    tabs = st.tabs(list(contents), default=default, key=key, on_change="rerun")
    for show, tab in zip(contents.values(), tabs, strict=True):
        if tab.open:
            with tab:
                show()

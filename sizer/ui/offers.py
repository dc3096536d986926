"""Buttons that put a changed question of one dtype and batch size into the form."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from sizer.query.request import Request
from sizer.query.text import parse_query
from sizer.query.values import DTYPES
from sizer.ui import form, links
from sizer.ui.focus import look_at

APPLIED = "applied"  # session state: a change was put into the form, and the page has not run since


def rerun_if_applied() -> None:
    """Run the whole page if a change was applied: a button within a fragment runs the fragment alone."""
    if st.session_state.pop(APPLIED, False):
        st.rerun()


def _apply(changed: str, request: Request) -> None:
    """Put a changed question of one dtype and batch size into the form, beside the dtypes and batch sizes that are there."""
    asked = parse_query(changed)
    (dtype,), (batch,) = asked.dtypes, asked.batches
    dtypes = tuple(one for one in DTYPES if one in (*request.dtypes, dtype))
    batches = tuple(sorted({*request.batches, batch}))
    whole = replace(asked, dtypes=dtypes, batches=batches, focus=(dtype, batch))
    st.session_state[APPLIED] = True
    if (address := links.address_of(whole)) is not None:
        st.query_params.from_dict(address)
    else:
        form.fill(whole)
        look_at((dtype, batch))


def offer(label: str, changed: str, request: Request, key: str) -> None:
    """Show a button that puts a changed question into the form."""
    st.button(label, key=key, on_click=_apply, args=(changed, request), type="tertiary", icon=":material/check:")

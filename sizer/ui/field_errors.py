"""Refused values below their fields. A field leaves a place for its error; the refusals are put there once the query was read."""

from __future__ import annotations

from collections.abc import Iterable

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from sizer.base.errors import Refusal

MARK = "not understood"


class Places:
    """The places for errors, by key of the query. One for each run of a form."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, DeltaGenerator]] = {}

    def leave(self, key: str, label: str) -> None:
        """Leave a place for the error of a key, below the field with this label, which was shown last."""
        self._places[key] = (label, st.empty())

    def show(self, refusals: Iterable[Refusal]) -> None:
        """Show each refusal below its field. Text that a stranger wrote is never markdown."""
        for refusal in refusals:
            label, place = self._places.get(refusal.key, ("", None))
            if place is not None:
                with place.container(border=True, gap=None):
                    st.badge(f"{label}: {MARK}", icon=":material/error:", color="red")
                    st.text(f"{refusal.given} is not {refusal.allowed}. {refusal.todo[:1].upper()}{refusal.todo[1:]}.")

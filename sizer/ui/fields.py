"""Fields of the form: numbers as people write them, names of devices, and places for refused values below their fields.

Streamlit's select box sorts matches by the score of fzy, which prefers matches that begin a word. The memory is a word of its own:
"8 GB" finds "RTX 4060 · 8 GB" before "L40S · 48 GB".
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from sizer.base.errors import Refusal
from sizer.catalogue.gpu_keys import CUSTOM
from sizer.catalogue.gpus import GPUS

THOUSAND = 1024  # tokens: a context of 8k is 8,192
_GROUPED = re.compile(r"\d{1,3}(?:[,_' \u00a0\u202f]\d{3})+", re.ASCII)
_SHORT = re.compile(r"(\d{1,6})(?:\.(\d{1,3}))?\s*[kK]", re.ASCII)


def read_tokens(text: str) -> str:
    """Return a number of tokens without separators and letters; a text of another form as it is, for the query to refuse."""
    text = text.strip()
    if _GROUPED.fullmatch(text):
        return re.sub(r"\D", "", text)
    if found := _SHORT.fullmatch(text):
        whole, part = int(found[1]) * THOUSAND, found[2]
        return str(whole + (round(float(f"0.{part}") * THOUSAND) if part else 0))
    return text


def read_count(text: str) -> str:
    """Return a number without separators; a text of another form as it is."""
    text = text.strip()
    return re.sub(r"\D", "", text) if _GROUPED.fullmatch(text) else text


# -------------------------------------------------------------------------------------------------------- device choice


CUSTOM_TITLE = "Other: my own custom device (memory, compute capability)"
OPTIONS = (CUSTOM, *GPUS)
_MEMORY = re.compile(r" \((?:a host with )?(\d+ Gi?B)\)$")


def device_title(key: str) -> str:
    """Return what the form calls a device ("GeForce RTX 4060 · 8 GB")."""
    return CUSTOM_TITLE if key == CUSTOM else _MEMORY.sub(r" · \1", GPUS[key].name)


# --------------------------------------------------------------------------------------------------------- field errors


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

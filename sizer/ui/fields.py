"""Fields of the form: names of devices, and places for refused values below their fields.

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

# -------------------------------------------------------------------------------------------------------- device choice


CUSTOM_TITLE = "Other: my custom device (memory, compute capability)"
OPTIONS = (CUSTOM, *GPUS)
_MEMORY = re.compile(r" \((?:a host with )?(\d+ Gi?B)\)$")


def device_title(key: str) -> str:
    """Return the title of a device in the form ("GeForce RTX 4060 · 8 GB")."""
    return CUSTOM_TITLE if key == CUSTOM else _MEMORY.sub(r" · \1", GPUS[key].name)


# --------------------------------------------------------------------------------------------------------- field errors


MARK = "not understood"


class Places:
    """Places for errors below the form's fields, by key of the query. Make one for each run of the form."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, DeltaGenerator]] = {}

    def leave(self, key: str, label: str) -> None:
        """Reserve a place for the error of a key, below the field that was shown last and has this label."""
        self._places[key] = (label, st.empty())

    def show(self, refusals: Iterable[Refusal]) -> None:
        """Show each refusal below its field. A stranger's text is never rendered as markdown."""
        for refusal in refusals:
            label, place = self._places.get(refusal.key, ("", None))
            if place is not None:
                with place.container(border=True, gap=None):
                    st.badge(f"{label}: {MARK}", icon=":material/error:", color="red")
                    todo = refusal.todo.replace(f"{refusal.key}=", "")  # a field holds the value alone
                    st.text(f"{refusal.given} is not understood. Allowed: {refusal.allowed}. {todo[:1].upper()}{todo[1:]}.")

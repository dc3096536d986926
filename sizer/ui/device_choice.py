"""The devices of the form: how they are named, so that typing a name, a memory or "laptop" finds them.

Streamlit's select box sorts matches by the score of fzy, which prefers matches that begin a word. The memory is a word of its own:
"8 GB" finds "RTX 4060 · 8 GB" before "L40S · 48 GB".
"""

from __future__ import annotations

import re

from sizer.catalogue.gpu_keys import CUSTOM
from sizer.catalogue.gpus import GPUS

CUSTOM_TITLE = "Other: my own custom device (memory, compute capability)"
OPTIONS = (CUSTOM, *GPUS)
_MEMORY = re.compile(r" \((?:a host with )?(\d+ Gi?B)\)$")


def device_title(key: str) -> str:
    """Return what the form calls a device ("GeForce RTX 4060 · 8 GB")."""
    return CUSTOM_TITLE if key == CUSTOM else _MEMORY.sub(r" · \1", GPUS[key].name)

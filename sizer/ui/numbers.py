"""Numbers as people write them in fields: 8k, 32K, 8,192, 8 192, 1_024."""

from __future__ import annotations

import re

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

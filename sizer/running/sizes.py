"""Sizes and tolerances as text: 20GiB, 1%. No torch."""

from __future__ import annotations

import re

from sizer.base.errors import quote

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?([KMGT]iB)", re.ASCII)
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?%", re.ASCII)


def read_size(text: str) -> int:
    """Return the bytes of a text such as 20GiB. Raises ValueError for any other form."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{quote(text)} is no size: write for example 20GiB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2]])


def read_share(text: str) -> float:
    """Return the share of a text such as 1%. Raises ValueError for any other form."""
    found = _SHARE.fullmatch(text)
    if found is None:
        raise ValueError(f"{quote(text)} is no share: write for example 1%")
    return float(found[1]) / 100

"""PyTorch's version: whose rules are followed. Everything that follows from it asks here, or the value that was made here.

A version is (major, minor). The rules were read in the sources of `OLDEST` to `NEWEST`; what they say of each stands beside them.
"""

from __future__ import annotations

import re
from importlib.metadata import version

Version = tuple[int, int]

OLDEST: Version = (2, 11)
NEWEST: Version = (2, 15)

_TEXT = re.compile(r"(\d{1,2})\.(\d{1,3})(?:\.\d{1,3})?", re.ASCII)


def parse_version(text: str) -> Version:
    """The version that a text such as "2.11" or "2.11.1" names. Raises ValueError."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no version of PyTorch: write for example 2.11")
    return int(found[1]), int(found[2])


def format_version(one: Version) -> str:
    """The text that `parse_version` reads."""
    return f"{one[0]}.{one[1]}"


def installed_version() -> Version:
    """The installed PyTorch's (major, minor)."""
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


def cautions(target: Version, installed: Version) -> tuple[str, ...]:
    """What to know of figures by the rules of one PyTorch that another one, the installed, was run for."""
    said = []
    nearest = min(max(target, OLDEST), NEWEST)
    if target != nearest:
        said.append(
            f"PyTorch {format_version(target)} is {'newer' if target > nearest else 'older'} than the rules, which were read in "
            f"{format_version(OLDEST)} to {format_version(NEWEST)}: those of {format_version(nearest)} were followed"
        )
    if target != installed:
        said.append(
            f"the rules are those of PyTorch {format_version(target)}, the code that ran is that of the installed "
            f"{format_version(installed)}: autograd, optimizers and models' own code may keep other tensors in "
            f"{format_version(target)}"
        )
    return tuple(said)

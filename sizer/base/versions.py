"""Versions: Sizer's own, and PyTorch's, whose rules are followed; what follows from it asks here, or the value made here.

A version is (major, minor). The rules were read in the sources of the versions in `READ`; what they say of each stands beside
them. Where pull requests tell in which version between 2.6 and 2.11 a rule changed, it goes by that.
"""

from __future__ import annotations

import re
from functools import cache

SIZER = "0.1.0"

Version = tuple[int, int]

READ: tuple[Version, ...] = ((2, 6), *((2, minor) for minor in range(11, 16)))
OLDEST, NEWEST = READ[0], READ[-1]
_AS_2_11: Version = (2, 9)  # from here on versions that were not read are taken to be as 2.11, before as 2.6

_TEXT = re.compile(r"(\d{1,2})\.(\d{1,3})(?:\.\d{1,3})?", re.ASCII)


def parse_version(text: str) -> Version:
    """The version that a text such as "2.11" or "2.11.1" names. Raises ValueError."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no version of PyTorch: write for example 2.11")
    return int(found[1]), int(found[2])


def allocator_variable(version: Version) -> str:
    """The environment variable of the caching allocator's settings: c10/core/AllocatorConfig.cpp, from 2.9 on."""
    return "PYTORCH_ALLOC_CONF" if version >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF"


def by_address(version: Version) -> bool:
    """Return whether the CUDA allocator goes by address between free blocks of equal size, and not by age: see
    sizer.allocator.cuda."""
    return version < (2, 12)


def format_version(one: Version) -> str:
    """The text that `parse_version` reads."""
    return f"{one[0]}.{one[1]}"


@cache
def installed(package: str) -> str:
    """Return the version of an installed package, which importlib.metadata looks for by parsing all that the package says.

    Raises:
        PackageNotFoundError: There is no such package.
    """
    from importlib.metadata import distribution  # slow to import, and a kept answer does not need it

    found = distribution(package)
    line = re.search(r"^Version: (\S+)$", found.read_text("METADATA") or "", re.MULTILINE)
    return found.version if line is None else line[1]


def installed_version() -> Version:
    """The installed PyTorch's (major, minor)."""
    major, minor = installed("torch").split(".")[:2]
    return int(major), int(minor)


def version_followed(target: Version) -> Version:
    """The version that was read whose rules a version goes by: its own, or of those that were not read a neighbour's."""
    if target in READ:
        return target
    if target > NEWEST:
        return NEWEST
    return OLDEST if target < _AS_2_11 else (2, 11)


def cautions(target: Version, installed: Version) -> tuple[str, ...]:
    """Return what to know of figures by the rules of one PyTorch that another one, the installed, was run for."""
    said = []
    followed = version_followed(target)
    if target != followed:
        where = "newer than" if target > NEWEST else "older than" if target < OLDEST else "not among"
        said.append(
            f"PyTorch {format_version(target)} is {where} the versions whose rules were read, 2.6 and 2.11 to "
            f"{format_version(NEWEST)}: those of {format_version(followed)} were followed"
        )
    if target != installed:
        said.append(
            f"the rules are those of PyTorch {format_version(target)}, the code that ran is that of the installed "
            f"{format_version(installed)}: autograd, optimizers and models' own code may keep other tensors in "
            f"{format_version(target)}"
        )
    return tuple(said)

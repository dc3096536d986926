"""Versions of Sizer and of PyTorch, and the rules to follow for a version of PyTorch.

A version is (major, minor). The rules were read in the sources of the versions in `READ`; the differences are noted with each
rule. If pull requests tell the version between 2.6 and 2.11 in which a rule changed, that version decides.
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
    """Return the version that a text such as "2.11" or "2.11.1" names. Raises ValueError."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is not a version of PyTorch: write for example 2.11")
    return int(found[1]), int(found[2])


def allocator_variable(version: Version) -> str:
    """Return the environment variable of the caching allocator's settings: c10/core/AllocatorConfig.cpp, from 2.9 on."""
    return "PYTORCH_ALLOC_CONF" if version >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF"


def by_address(version: Version) -> bool:
    """Return whether the CUDA allocator orders free blocks of equal size by address, not by age: see sizer.allocator.cuda."""
    return version < (2, 12)


def format_version(one: Version) -> str:
    """Return the text that `parse_version` reads."""
    return f"{one[0]}.{one[1]}"


@cache
def installed(package: str) -> str:
    """Return the version of an installed package.

    importlib.metadata would find it by parsing all metadata of the package.

    Raises:
        PackageNotFoundError: There is no such package.
    """
    from importlib.metadata import distribution  # slow to import, and a kept answer does not need it

    found = distribution(package)
    line = re.search(r"^Version: (\S+)$", found.read_text("METADATA") or "", re.MULTILINE)
    return found.version if line is None else line[1]


def installed_version() -> Version:
    """Return the installed PyTorch's (major, minor)."""
    major, minor = installed("torch").split(".")[:2]
    return int(major), int(minor)


def rules_version(target: Version) -> Version:
    """Return the read version with the rules for a version: the version itself, or a neighbour if it was not read."""
    if target in READ:
        return target
    if target > NEWEST:
        return NEWEST
    return OLDEST if target < _AS_2_11 else (2, 11)


def cautions(target: Version, installed: Version) -> tuple[str, ...]:
    """Return cautions on figures by the rules of one PyTorch, computed with another, installed one."""
    said = []
    followed = rules_version(target)
    if target != followed:
        where = "newer than" if target > NEWEST else "older than" if target < OLDEST else "not among"
        said.append(
            f"PyTorch {format_version(target)} is {where} the versions with known rules, 2.6 and 2.11 to "
            f"{format_version(NEWEST)}: the rules of {format_version(followed)} are used"
        )
    if target != installed:
        said.append(
            f"the rules are those of PyTorch {format_version(target)}, the code that ran is the installed "
            f"{format_version(installed)}: autograd, optimizers and models' own code may keep other tensors in "
            f"{format_version(target)}"
        )
    return tuple(said)

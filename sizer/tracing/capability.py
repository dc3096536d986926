"""A compute capability that notes what rules ask of it: a trace is that of every other one that answers alike."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from sizer.tape.archive import Decision, Range

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("lt", "le", "eq", "ne", "ge", "gt")
}


class Capability(tuple[int, int]):
    """(major, minor), whose comparisons, and those of its numbers, are kept in `decisions`.

    What is no comparison (a sum, a text made of it) can be asked of `plain` alone, which nothing is noted of.
    """

    decisions: set[Decision]

    def __new__(cls, plain: tuple[int, int]) -> Capability:
        """The capability of a device, of which nothing was asked yet."""
        made = super().__new__(cls, plain)
        made.decisions = set()
        return made

    def among(self, *ranges: Range) -> bool:
        """Whether it is in one of some ranges, both ends included. Noted as one: which of them it is in makes no difference."""
        outcome = _is_among(self.plain, ranges)
        self.decisions.add(("capability", "among", ranges, outcome))
        return outcome

    @property
    def plain(self) -> tuple[int, int]:
        """(major, minor) as plain numbers."""
        major, minor = tuple.__iter__(self)
        return major, minor

    def __getitem__(self, index: int) -> _Number:  # type: ignore[override] # no slices
        """Major (0) or minor (1)."""
        return _Number(tuple.__getitem__(self, index), ("major", "minor")[index], self.decisions)

    def __iter__(self) -> NoReturn:
        """Refused: the numbers of one and all are the plain ones. Raises TypeError."""
        raise TypeError("a rule compares a capability; where its numbers themselves are wanted, ask for .plain")

    def __hash__(self) -> NoReturn:
        """Refused: what is looked up by a capability depends on all of it. Raises TypeError."""
        raise TypeError("a rule compares a capability; where it is a key, ask for .plain")


class _Number(int):
    """Major or minor, whose comparisons are noted."""

    name: str
    decisions: set[Decision]

    def __new__(cls, value: int, name: str, decisions: set[Decision]) -> _Number:
        made = super().__new__(cls, value)
        made.name, made.decisions = name, decisions
        return made

    __hash__ = int.__hash__


def _compare_capability(name: str) -> Callable[[Capability, tuple[int, int]], bool]:
    def compare(self: Capability, other: tuple[int, int]) -> bool:
        outcome = COMPARISONS[name](self.plain, other)
        self.decisions.add(("capability", name, other, outcome))
        return outcome

    return compare


def _compare_number(name: str) -> Callable[[_Number, int], bool]:
    def compare(self: _Number, other: int) -> bool:
        outcome = COMPARISONS[name](int(self), other)
        self.decisions.add((self.name, name, other, outcome))
        return outcome

    return compare


for _name in COMPARISONS:
    setattr(Capability, f"__{_name}__", _compare_capability(_name))
    setattr(_Number, f"__{_name}__", _compare_number(_name))


def decide_alike(capability: tuple[int, int], decisions: Iterable[Decision]) -> bool:
    """Whether each of the comparisons has the same outcome for this capability."""
    sides: dict[str, Any] = {"capability": capability, "major": capability[0], "minor": capability[1]}
    compare: dict[str, Callable[[Any, Any], bool]] = COMPARISONS | {"among": _is_among}
    return all(compare[name](sides[what], other) == outcome for what, name, other, outcome in decisions)


def _is_among(capability: tuple[int, int], ranges: Iterable[Range]) -> bool:
    return any(low <= capability <= high for low, high in ranges)

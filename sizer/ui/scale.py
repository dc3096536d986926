"""One unit for a whole table or chart, so that its numbers compare at a glance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sizer.base.units import GIB, KIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A unit's name and its size in bytes."""

    name: str
    unit_bytes: int

    def of(self, size_bytes: int) -> float:
        """A number of bytes in this unit."""
        return size_bytes / self.unit_bytes

    def text(self, size_bytes: int) -> str:
        """Return a number of bytes as text in this unit, to three digits or more: "1,024.00 GiB", "0.052 GiB", "<0.001 GiB"."""
        size = abs(self.of(size_bytes))
        number = "<0.001" if 0 < size < 0.001 else f"{size:,.{3 if 0 < size < 0.9995 else 2}f}"
        return f"{'−' if size_bytes < 0 else ''}{number} {self.name}"


GIBIBYTES = Scale(name="GiB", unit_bytes=GIB)
_SCALES = (GIBIBYTES, Scale(name="MiB", unit_bytes=MIB), Scale(name="KiB", unit_bytes=KIB))


def scale_for(sizes: Iterable[int]) -> Scale:
    """The largest unit in which the largest of `sizes` (bytes) is at least 0.1; KiB where they are all tiny."""
    largest = max(sizes, default=0)
    return next((scale for scale in _SCALES if largest >= scale.unit_bytes / 10), _SCALES[-1])

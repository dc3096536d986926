"""The interval of the largest batch, sequence or image that fits a device, in one wording for all pages and commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sizer.report.fit import Fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """`least` fits, 0 if no value is known to fit. No value above `most` can fit, None if no such value is known."""

    least: int = 0
    most: int | None = None

    def with_verdict(self, value: int, fits: Fits) -> Interval:
        """Return the interval with a further verdict on one value. A value that fits outweighs one that does not."""
        if fits is True:
            return self.meet(Interval(least=value))
        return self.meet(Interval(most=value - 1)) if fits is False else self

    def meet(self, other: Interval) -> Interval:
        """Return the intersection of both intervals."""
        least = max(self.least, other.least)
        bounds = [bound for bound in (self.most, other.most) if bound is not None]
        return replace(self, least=least, most=max(least, min(bounds)) if bounds else None)

    @property
    def is_known(self) -> bool:
        """True if the interval says anything."""
        return bool(self.least) or self.most is not None

    def __str__(self) -> str:
        if self.most is None:
            return f"at least {self.least:,}" if self.least else "not known"
        if not self.most:
            return "none"
        if self.least == self.most:
            return f"{self.most:,}"
        return f"{self.least:,} to {self.most:,}" if self.least else f"at most {self.most:,}"


def left_out(batches: Sequence[int], fits: Mapping[int, Fits]) -> tuple[int, ...]:
    """Return the batch sizes of an ascending list that have no verdict and follow two consecutive ones that do not fit."""
    pairs = enumerate(pairwise(batches), start=2)
    end = next((place for place, pair in pairs if all(fits.get(batch) is False for batch in pair)), len(batches))
    return tuple(batch for batch in batches[end:] if batch not in fits)

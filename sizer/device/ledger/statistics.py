"""How far estimates were off, per quantity and device: always signed, estimate less measured over measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedError:
    """One row of one comparison: `error` is positive where the estimate was too high."""

    quantity: str
    device: str
    family: str
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatistics:
    """Signed errors (fractions of what was measured) of one quantity on one device, over `count` comparisons.

    `device` is the device's name as the driver gives it, `family` "transformer", "CNN", "other", or "all". `median` is the
    middle of the signed errors, `bias` their mean: an estimate that errs to both sides alike has none. `worst` is the error
    farthest from 0, with its sign. `median_size` is the median without signs, as the aims are stated: errors to both sides
    do not cancel in it.
    """

    quantity: str
    device: str
    family: str
    count: int
    median: float
    worst: float
    bias: float
    median_size: float


def error_statistics(errors: Iterable[SignedError], *, by_family: bool = True) -> tuple[ErrorStatistics, ...]:
    """One row per quantity, device and family (without `by_family` the family is "all"), in the order of first appearance."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for one in errors:
        family = one.family if by_family else "all"
        groups.setdefault((one.quantity, one.device, family), []).append(one.error)
    return tuple(
        ErrorStatistics(
            quantity=quantity,
            device=device,
            family=family,
            count=len(found),
            median=statistics.median(found),
            worst=max(found, key=abs),
            bias=statistics.fmean(found),
            median_size=statistics.median(map(abs, found)),
        )
        for (quantity, device, family), found in groups.items()
    )

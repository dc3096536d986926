"""Rows of the ledger, one for each comparison, and statistics of their errors.

Errors are signed: estimate less measured, over measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sizer.device.comparison.comparison import Comparison, rank_of, world_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One comparison in a line. Figures (bytes) are None where the device has no such counter or the work did not end."""

    id: int
    measured_at: str
    architecture: str
    class_name: str
    family: str
    mode: str
    dtype: str
    batch: int
    ranks: int  # that train together, 1 for one GPU
    rank: int | None  # the one of them that this is
    query: str
    device_name: str
    device_kind: str
    torch: str
    holds: bool
    verdict: str
    estimated_peak_allocated_bytes: int
    measured_peak_allocated_bytes: int | None
    estimated_peak_reserved_bytes: int
    measured_peak_reserved_bytes: int | None
    estimated_process_bytes: int
    measured_process_bytes: int | None

    @property
    def place(self) -> str:
        """Which rank of how many, "1 of 2"; empty for one GPU."""
        return "" if self.rank is None else f"{self.rank} of {self.ranks}"


COLUMNS = tuple(field.name for field in fields(LedgerRow))


def row_from(values: Sequence[Any]) -> LedgerRow:
    """The row whose columns, in the order of COLUMNS, hold these values; SQLite keeps what is true as 1."""
    found: dict[str, Any] = dict(zip(COLUMNS, values, strict=True))
    return LedgerRow(**found | {"holds": bool(found["holds"])})


def columns_of(comparison: Comparison) -> dict[str, Any]:
    """The columns of a comparison but its id."""
    measurement, estimate = comparison.measurement, comparison.estimate
    complete = measurement.out_of_memory is None and measurement.failure is None
    figures: dict[str, object] = {}
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "process_bytes"):
        row = comparison.find(name) if complete else None
        figures[f"estimated_{name}"] = getattr(estimate, name)
        figures[f"measured_{name}"] = None if row is None else row.measured_bytes
    return {
        "measured_at": measurement.measured_at,
        "architecture": comparison.architecture,
        "class_name": comparison.class_name,
        "family": comparison.family,
        "mode": comparison.mode,
        "dtype": measurement.dtype,
        "batch": measurement.batch,
        "ranks": world_of(comparison),
        "rank": rank_of(comparison),
        "query": measurement.query,
        "device_name": measurement.device.name or measurement.device.device,
        "device_kind": measurement.device.kind,
        "torch": measurement.versions.get("torch", ""),
        "holds": comparison.holds,
        "verdict": comparison.verdict,
        **figures,
    }


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

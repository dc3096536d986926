"""A comparison in a line: what the ledger's columns hold of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from sizer.device.comparison.comparison import Comparison
from sizer.device.comparison.ranks import rank_of, world_of


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

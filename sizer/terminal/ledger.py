"""The ledger as lines of plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sizer.device.ledger.row import LedgerRow
from sizer.device.ledger.statistics import ErrorStatistics
from sizer.terminal.figures import TITLES, percent
from sizer.terminal.table import format_table

IN_STATISTICS = ("peak_allocated_bytes", "peak_reserved_bytes", "process_bytes")


def format_rows(rows: Sequence[LedgerRow]) -> Iterator[str]:
    """The ledger's rows as a table, with the errors of the three peaks."""
    header = (
        "id",
        "measured",
        "architecture",
        "mode",
        "dtype",
        "batch",
        "device",
        "torch",
        "allocated",
        "reserved",
        "process",
        "",
    )
    yield from format_table(header, map(_cells, rows), left=8)


def format_statistics(statistics: Sequence[ErrorStatistics]) -> Iterator[str]:
    """Signed errors of the figures that most is made of, per device and family."""
    header = ("error of", "device", "family", "count", "median", "worst", "bias")
    rows = (
        (
            TITLES[row.quantity],
            row.device,
            row.family,
            str(row.count),
            *(percent(error) for error in (row.median, row.worst, row.bias)),
        )
        for row in statistics
        if row.quantity in IN_STATISTICS
    )
    yield from format_table(header, rows, left=3)


def _cells(row: LedgerRow) -> tuple[str, ...]:
    pairs = (
        (row.estimated_peak_allocated_bytes, row.measured_peak_allocated_bytes),
        (row.estimated_peak_reserved_bytes, row.measured_peak_reserved_bytes),
        (row.estimated_process_bytes, row.measured_process_bytes),
    )
    errors = ("" if not measured else percent((estimated - measured) / measured) for estimated, measured in pairs)
    about = (row.architecture, row.mode, row.dtype, str(row.batch), row.device_name, row.torch)
    return str(row.id), row.measured_at[:10], *about, *errors, "" if row.holds else "WRONG"

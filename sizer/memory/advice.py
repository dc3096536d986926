"""Whether an estimate fits its device, in plain lines. What to change is answered by traces: see sizer.decision."""

from __future__ import annotations

from collections.abc import Iterator

from sizer.memory.estimate import Estimate
from sizer.memory.report import Report
from sizer.units import counted, format_bytes


def advise(report: Report, estimate: Estimate) -> tuple[str, ...]:
    """Lines on one estimate of a report, with its numbers (bytes as text): whether it fits and by how much, or where it fails."""
    return tuple(_room(report, estimate)) if estimate.fits is True else (_lack(report, estimate),)


def _lack(report: Report, estimate: Estimate) -> str:
    low, high = format_bytes(estimate.process_low_bytes), format_bytes(estimate.process_high_bytes)
    total = format_bytes(report.gpu.total_bytes)
    if estimate.fits == "uncertain":
        return f"It may or may not fit: the process needs {low} to {high}, the {report.gpu.name} has {total}."
    failed = estimate.out_of_memory
    where = f"; it stops in {failed.phase} at {failed.op} ({failed.module or 'root'})" if failed else ""
    return f"It does not fit: the process needs {low} to {high}, the {report.gpu.name} has {total}{where}."


def _room(report: Report, estimate: Estimate) -> Iterator[str]:
    left = report.gpu.total_bytes - estimate.process_bytes
    yield f"It fits: {format_bytes(left)} of {format_bytes(report.gpu.total_bytes)} stay free on the {report.gpu.name}."
    if estimate.retries:
        yield (
            "It fits only because the allocator gives cached memory back and tries again "
            f"({counted(estimate.retries, 'time')}), which is slow."
        )

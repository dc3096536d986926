"""The devices of a machine, and the demonstration, as lines of plain text."""

from __future__ import annotations

from collections.abc import Iterator

from sizer.device.machine.demonstration import Demonstration
from sizer.device.machine.inventory import Inventory
from sizer.terminal.table import format_table, to_printable
from sizer.units import format_bytes


def format_inventory(inventory: Inventory) -> Iterator[str]:
    """A table of the devices, why others are missing, and the safe line."""
    rows = (
        (
            facts.device,
            facts.name,
            ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
            facts.capability_text or "",
            _size(facts.total_bytes),
            _size(facts.free_bytes),
        )
        for facts in inventory.devices
    )
    yield from format_table(("device", "name", "versions", "capability", "memory", "free"), rows, left=3)
    yield ""
    for sentence in inventory.missing:
        yield to_printable(sentence)
    yield f"Safe here: {to_printable(inventory.line)}"


def format_demonstration(shown: Demonstration) -> Iterator[str]:
    """What the three figures did line by line of code, what an emptied cache costs, and what the driver's figure is."""
    yield to_printable(f"{shown.device} ({shown.name})")
    rows = (
        (
            stage.code or "before",
            format_bytes(stage.allocated_bytes),
            _size(stage.reserved_bytes),
            _size(stage.driver_bytes),
        )
        for stage in shown.stages
    )
    yield from format_table(("code", "allocated", "reserved", "driver"), rows)
    yield ""
    yield f"driver: {shown.driver}"
    for cost in shown.costs:
        low, median, high = (
            f"{seconds * 1e6:,.0f}"
            for seconds in (cost.spread.low_seconds, cost.spread.median_seconds, cost.spread.high_seconds)
        )
        yield f"{cost.what}: {median} µs ({low} to {high})"
    yield from shown.remarks


def _size(size: int | None) -> str:
    return "" if size is None else format_bytes(size)

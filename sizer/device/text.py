"""Devices, the demonstration and a placement as lines of plain text, for the command line."""

from __future__ import annotations

from collections.abc import Iterator

from sizer.device.demonstration import Demonstration
from sizer.device.inventory import Inventory
from sizer.device.measurement import DeviceFacts
from sizer.device.placement import Placement
from sizer.terminal import format_table, to_printable
from sizer.units import format_bytes


def capability_text(facts: DeviceFacts) -> str | None:
    """The compute capability as NVIDIA writes it ("9.0"); None where there is none."""
    return None if facts.capability is None else ".".join(map(str, facts.capability))


def inventory_rows(inventory: Inventory) -> list[dict]:
    """The devices as the JSON of `devices` has them."""
    keys = ("device", "name", "total_bytes", "free_bytes")
    return [
        {key: getattr(facts, key) for key in keys} | {"capability": capability_text(facts), "versions": facts.versions}
        for facts in inventory.devices
    ]


def format_inventory(inventory: Inventory) -> Iterator[str]:
    """A table of the devices, why others are missing, and the safe line."""
    rows = (
        (
            facts.device,
            facts.name,
            ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
            capability_text(facts) or "",
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


def format_placement(found: Placement) -> Iterator[str]:
    """The tensors by kind, device and dtype, and what is wrong, the worst first."""
    yield to_printable(f"{found.name} ({found.class_name})")
    rows = (
        (group.kind, group.device, group.dtype, f"{group.tensors:,}", f"{group.elements:,}", format_bytes(group.bytes))
        for group in found.groups
    )
    yield from format_table(("", "device", "dtype", "tensors", "elements", "size"), rows, left=3)
    yield ""
    for finding in sorted(found.findings, key=lambda one: not one.breaks):
        yield to_printable(f"{finding.problem}{'' if finding.breaks else ' (works, but)'}: {finding.what}")
        yield to_printable(f"    where: {finding.where}")
        yield to_printable(f"    why:   {finding.why}")
        yield to_printable(f"    do:    {finding.todo}")
    if not found.findings:
        yield "No placement mistakes were found."
    if found.reason is not None:
        yield to_printable(f"The forward pass was not followed to its end: {found.reason}")
    for note in found.notes:
        yield to_printable(f"Assumed: {note}")


def _size(size: int | None) -> str:
    return "" if size is None else format_bytes(size)

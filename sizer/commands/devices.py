"""The command `devices`: what PyTorch can use on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from sizer.base.units import format_bytes
from sizer.commands.job import MakeClient
from sizer.commands.text import format_table, print_list, size_text, to_printable
from sizer.device.machine.demonstration import Demonstration, demonstrate
from sizer.device.machine.inventory import Inventory, find_inventory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument("--demonstrate", metavar="DEVICE", help="show what memory does on cpu, cuda:0, mps, ...")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the devices of this machine, or what one of them shows of its allocator."""
    if options.demonstrate is not None:
        shown = demonstrate(options.demonstrate)
        print_list(options, shown.to_dict(), format_demonstration(shown))
        return 0
    inventory = find_inventory()
    data = {
        "devices": _rows(inventory),
        "missing": inventory.missing,
        "line": inventory.line,
        "versions": inventory.versions,
    }
    print_list(options, data, format_inventory(inventory))
    return 0


def _rows(inventory: Inventory) -> list[dict]:
    """The devices as the JSON of `devices` has them."""
    keys = ("device", "name", "total_bytes", "free_bytes")
    return [
        {key: getattr(facts, key) for key in keys} | {"capability": facts.capability_text, "versions": facts.versions}
        for facts in inventory.devices
    ]


def format_inventory(inventory: Inventory) -> Iterator[str]:
    """A table of the devices, why others are missing, and the safe line."""
    rows = (
        (
            facts.device,
            facts.name,
            ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
            facts.capability_text or "",
            size_text(facts.total_bytes),
            size_text(facts.free_bytes),
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
            size_text(stage.reserved_bytes),
            size_text(stage.driver_bytes),
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

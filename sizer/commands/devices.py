"""The command `devices`: what PyTorch can use on this machine."""

from __future__ import annotations

import argparse

from sizer.commands.job import MakeClient
from sizer.commands.output import print_list
from sizer.device.machine.demonstration import demonstrate
from sizer.device.machine.inventory import Inventory, find_inventory
from sizer.terminal.devices import format_demonstration, format_inventory


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Prints the devices of this machine, or what one of them shows of its allocator."""
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

"""The command `gpus`: the devices that an estimate can be made for."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from sizer.catalogue.gpus import GPUS
from sizer.commands.job import MakeClient
from sizer.commands.text import format_table, print_list
from sizer.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the catalogue."""
    header = ("key", "name", "memory", "outside the allocator")
    rows = (
        (gpu.key, gpu.name, format_bytes(gpu.total_bytes), format_bytes(gpu.context_bytes)) for gpu in GPUS.values()
    )
    print_list(options, {"gpus": [asdict(gpu) for gpu in GPUS.values()]}, format_table(header, rows, left=2))
    return 0

"""The command `gpus`: the devices that an estimate can be made for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict

from sizer.base.units import format_bytes
from sizer.catalogue.gpu_keys import EXAMPLE
from sizer.catalogue.gpus import GPUS, Gpu
from sizer.commands.job import MakeClient
from sizer.commands.text import format_table, print_list


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the catalogue."""
    print_list(options, {"gpus": [asdict(gpu) for gpu in GPUS.values()]}, _lines())
    return 0


def _lines() -> Iterator[str]:
    """The catalogue by maker, and how to write a device of one's own."""
    header = ("key", "name", "maker", "memory", "outside the allocator")
    yield from format_table(header, map(_row, GPUS.values()), left=3)
    yield ""
    yield f"A device of your own, by its memory as PyTorch reports it and its compute capability: gpu={EXAMPLE}"


def _row(gpu: Gpu) -> tuple[str, ...]:
    return gpu.key, gpu.name, gpu.maker, format_bytes(gpu.total_bytes), format_bytes(gpu.context_bytes)

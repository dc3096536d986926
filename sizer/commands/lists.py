"""The commands `gpus`, `models`, `devices` and `cache`: the devices and models that can be estimated, and what this machine has."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from sizer.base.units import format_bytes, format_count
from sizer.catalogue.gpu_keys import EXAMPLE
from sizer.catalogue.gpus import GPUS, Gpu
from sizer.catalogue.presets import list_presets
from sizer.commands.terminal import format_table, print_list, size_text, to_printable
from sizer.commands.waiting import MakeClient, wait
from sizer.device.machine.demonstration import Demonstration, demonstrate
from sizer.device.machine.inventory import Inventory, find_inventory
from sizer.service.stored_reports import StoredReports
from sizer.service.variables import FOLDER_VARIABLE, default_folder


def add_gpus_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run_gpus(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the catalogue."""
    print_list(options, {"gpus": [asdict(gpu) for gpu in GPUS.values()]}, _gpu_lines())
    return 0


def _gpu_lines() -> Iterator[str]:
    """Yield the catalogue by maker, and the syntax for a custom device."""
    header = ("key", "name", "maker", "memory", "outside the allocator")
    yield from format_table(header, map(_gpu_row, GPUS.values()), left=3)
    yield ""
    yield f"A device of your own, by its memory as PyTorch reports it and its compute capability: gpu={EXAMPLE}"


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    return gpu.key, gpu.name, gpu.maker, format_bytes(gpu.total_bytes), format_bytes(gpu.context_bytes)


# -------------------------------------------------------------------------------------------------------------- models


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run_models(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the presets with the parameters that their heads have, and the names of the sources' packages."""
    kept = StoredReports(default_folder())
    if (named := kept.find_names()) is None:
        with contextlib.closing(make_client()) as client:
            named = wait(client.submit_models())
        kept.keep_names(named)
    keys = ("key", "title", "family", "modality", "hub_id", "head", "published_parameters", "published_as")
    presets = [
        {key: getattr(preset, key) for key in keys} | {"parameters": preset.expected_parameters}
        for preset in list_presets()
    ]
    header = ("arch", "family", "parameters")
    lines = [(f"hf:{row['key']}", row["family"], format_count(row["parameters"])) for row in presets]
    lines += [(f"{source}:{row['name']}", row["family"], "") for source, rows in named.items() for row in rows]
    print_list(options, {"presets": presets, **named}, format_table(header, lines, left=2))
    return 0


# ------------------------------------------------------------------------------------------------------------- devices


def add_devices_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument("--demonstrate", metavar="DEVICE", help="demonstrate the allocator on cpu, cuda:0, mps, ...")


def run_devices(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the devices of this machine, or a demonstration of one device's allocator."""
    if options.demonstrate is not None:
        shown = demonstrate(options.demonstrate)
        print_list(options, shown.to_dict(), format_demonstration(shown))
        return 0
    inventory = find_inventory()
    data = {
        "devices": _device_rows(inventory),
        "missing": inventory.missing,
        "line": inventory.line,
        "versions": inventory.versions,
    }
    print_list(options, data, format_inventory(inventory))
    return 0


def _device_rows(inventory: Inventory) -> list[dict]:
    """Return the devices as in the JSON of `devices`."""
    keys = ("device", "name", "total_bytes", "free_bytes")
    return [
        {key: getattr(facts, key) for key in keys} | {"capability": facts.capability_text, "versions": facts.versions}
        for facts in inventory.devices
    ]


def format_inventory(inventory: Inventory) -> Iterator[str]:
    """Yield a table of the devices, why others are missing, and the safe line."""
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
    """Yield the three figures by line of code, the cost of emptying the cache, and a note on the driver's figure."""
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


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--clear", action="store_true", help="remove all files first")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run_cache(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the folder, the number of files and their bytes."""
    given = default_folder()
    if options.clear and given:
        for path in Path(given).glob("*/"):
            shutil.rmtree(path)
    files = [path for path in Path(given).rglob("*") if path.is_file()] if given else []
    size_bytes = sum(path.stat().st_size for path in files)
    lines = [
        given or f"Nothing is kept on disk: {FOLDER_VARIABLE} is empty.",
        *([f"{len(files):,} files, {format_bytes(size_bytes)}"] if given else []),
    ]
    print_list(options, {"folder": given, "files": len(files), "bytes": size_bytes}, lines)
    return 0


COMMANDS = {
    "gpus": (add_gpus_arguments, run_gpus),
    "models": (add_models_arguments, run_models),
    "devices": (add_devices_arguments, run_devices),
    "cache": (add_cache_arguments, run_cache),
}

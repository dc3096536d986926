"""The command `models`: the architectures known by name."""

from __future__ import annotations

import argparse
import contextlib

from sizer.catalogue.presets import list_presets
from sizer.commands.job import MakeClient, wait
from sizer.commands.text import format_table, print_list
from sizer.units import format_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the presets with the parameters that their heads have, and torchvision's names."""
    with contextlib.closing(make_client()) as client:
        vision = wait(client.submit_models())["torchvision"]
    keys = ("key", "title", "family", "modality", "hub_id", "head", "published_parameters", "published_as")
    presets = [
        {key: getattr(preset, key) for key in keys} | {"parameters": preset.expected_parameters}
        for preset in list_presets()
    ]
    header = ("arch", "family", "parameters")
    rows = [(f"hf:{row['key']}", row["family"], format_count(row["parameters"])) for row in presets]
    rows += [(f"torchvision:{row['name']}", row["family"], "") for row in vision]
    print_list(options, {"presets": presets, "torchvision": vision}, format_table(header, rows, left=2))
    return 0

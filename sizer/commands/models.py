"""The command `models`: the architectures known by name."""

from __future__ import annotations

import argparse
import contextlib

from sizer.base.units import format_count
from sizer.catalogue.presets import list_presets
from sizer.commands.job import MakeClient, wait
from sizer.commands.text import format_table, print_list


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Print the presets with the parameters that their heads have, and the names of the sources' packages."""
    with contextlib.closing(make_client()) as client:
        named = wait(client.submit_models())
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

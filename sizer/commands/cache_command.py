"""The command `cache`: the folder of kept traces and reports, its size, and how to clear it."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from sizer.base.units import format_bytes
from sizer.commands.terminal import print_list
from sizer.commands.waiting import MakeClient
from sizer.service.tape_folder import FOLDER_VARIABLE, default_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--clear", action="store_true", help="remove all files first")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
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


COMMANDS = {"cache": (add_arguments, run)}

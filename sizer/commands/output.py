"""What the commands that list something print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable


def print_list(options: argparse.Namespace, data: dict, lines: Iterable[str]) -> None:
    """Prints `data` where JSON was asked for, else the lines."""
    print(json.dumps(data) if options.json else "\n".join(lines))

"""The command `placement`: whether a model's tensors would all be where they must."""

from __future__ import annotations

import argparse
import contextlib

from sizer.commands.job import MakeClient, wait
from sizer.commands.output import print_list
from sizer.commands.query import query_of
from sizer.terminal.placement import format_placement


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Prints the tensors by device and dtype, and the mistakes that were found."""
    query = query_of(options)
    with contextlib.closing(make_client()) as client:
        found = wait(client.submit_placement(query))
    print_list(options, found.to_dict(), format_placement(found))
    return 0

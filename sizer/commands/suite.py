"""The command `suite`: measure a list of models on a device, one process each; can be repeated."""

from __future__ import annotations

import argparse
from pathlib import Path

from sizer.base.units import counted
from sizer.commands.arguments import minutes
from sizer.commands.job import MakeClient
from sizer.commands.text import to_printable
from sizer.device.suite.suite import (
    Runner,
    choose_cases,
    delete_failures,
    find_device,
    folder_for,
    run_suite,
    split_by_places,
)
from sizer.device.trial.launch_ranks import PLACES, count_places


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--device", default="cuda:0", help="cuda:0, mps or cpu (small models); by default cuda:0")
    parser.add_argument(
        "--record", action="store_true", help="also record what the allocator did, and kernels' workspaces"
    )
    parser.add_argument("--only", metavar="SUBSTRING", default="", help="only the cases with this in their name")
    parser.add_argument("--minutes", type=minutes, default=9.0, help="start nothing that would end later; by default 9")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="by default tests/measured/<device>-<torch>-<date>")
    parser.add_argument("--again", action="store_true", help="measure once more what failed")
    parser.add_argument("--list", action="store_true", help="print the cases and measure nothing")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Measure the cases that the folder lacks, or list them."""
    if options.list:
        for case in choose_cases(options.device.partition(":")[0], options.only):
            print(f"{case.name:46} {case.query}")
        return 0
    inventory, facts = find_device(options.device)
    cases = choose_cases(facts.kind, options.only)
    cases, lacking = split_by_places(cases, count_places(facts.kind) if facts.kind in PLACES else 1)
    runner = Runner(device=facts.device, record=options.record)
    folder = options.out or folder_for(inventory, facts, runner.date())
    print(f"{facts.name}: {counted(len(cases), 'case')}, to {folder}", flush=True)
    for case in lacking:
        print(f"{case.name:46} left out: it needs {case.ranks} {PLACES.get(facts.kind, 'devices')}", flush=True)
    if options.again:
        delete_failures(cases, folder)
    left = run_suite(
        cases,
        facts,
        folder,
        runner,
        record=options.record,
        seconds=60 * options.minutes,
        say=lambda text: print(to_printable(text), flush=True),
    )
    print(f"left for the same command again: {', '.join(left)}" if left else "nothing is left")
    return 0

"""The figures of README's section on reliability: each benchmark of the service writes its own (`--record`)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks.tables import replace_rows

SERVICE = Path(__file__).parent / "service.csv"


def add_record(parser: argparse.ArgumentParser) -> None:
    """Add the option --record."""
    parser.add_argument("--record", action="store_true", help=f"write the figures to tests/benchmarks/{SERVICE.name}")


def record(benchmark: str, figures: Mapping[str, str]) -> None:
    """Write the figures of a benchmark, by what they are of, in the place of those of the same."""
    rows = [{"what": what, "figure": figure, "with": benchmark} for what, figure in figures.items()]
    replace_rows(SERVICE, rows, ("what",))

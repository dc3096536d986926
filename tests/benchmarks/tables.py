"""Small CSV files that benchmarks write and README's figures are taken from."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a file, as text."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def replace_rows(path: Path, rows: Sequence[Mapping[str, str]], key: Sequence[str]) -> None:
    """Write the rows in the place of those of the file with the same `key`; the others stay where they are."""
    table = {tuple(row[name] for name in key): row for row in (*read_table(path), *rows)}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table.values())

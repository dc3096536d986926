"""Published GPU measurements by others, each figure with its estimate: `published.csv`, which ships with Sizer.

A run is repeated as in its source, by the rules of its PyTorch and with the code of the installed libraries; `python -m
tests.benchmarks.bench_published --write` writes the file. `tests/measured/published/README.md` describes every set, omissions,
and the causes of large errors. The runs of fitcheck-llm are under the MIT licence in that folder.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("published.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published figure, in bytes, and its estimate.

    `quantity` is the measured figure, a word of that README. `device` is the GPU's name, `gpu` its key in the catalogue, or the
    key of a GPU with the same rules. `torch` is the PyTorch of the run, `estimated_with` the versions of the traced libraries.
    `source` is an address.
    """

    work: str
    device: str
    gpu: str
    quantity: str
    measured_bytes: int
    estimated_bytes: int
    torch: str
    estimated_with: str
    source: str

    @property
    def error(self) -> float:
        """Difference as a signed fraction of the measured figure; positive if the estimate was too high."""
        return (self.estimated_bytes - self.measured_bytes) / self.measured_bytes


@functools.cache
def read_published() -> tuple[Published, ...]:
    """Return every figure, in the file's order."""
    with DATA.open(encoding="utf-8", newline="") as file:
        return tuple(map(_row, csv.DictReader(file)))


def _row(row: dict[str, str]) -> Published:
    values: dict[str, Any] = {**row}
    values |= {name: int(row[name]) for name in ("measured_bytes", "estimated_bytes")}
    return Published(**values)

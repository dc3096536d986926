"""How many of a package's models are counted and traced: `tests/measured/shares.csv`, written by bench_transformers_types and
bench_timm_names (`--write`). README's figures are taken from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.tables import read_table, replace_rows

SHARES = Path(__file__).parent.parent / "measured" / "shares.csv"
KEY = ("package", "dtype", "mode", "configs")


def summarize(outcomes: Sequence[str], own_code: str) -> dict[str, str]:
    """Of outcomes ("no defaults: …", "not built: …", "counted: …" or "traced") how many models are counted, how many and which
    part of those trace, and how many of the others fail by their own code, which says `own_code`."""
    counted = [text for text in outcomes if not text.startswith(("no defaults", "not built"))]
    traced = counted.count("traced")
    return {
        "names": str(len(outcomes)),
        "counted": str(len(counted)),
        "traced": str(traced),
        "traced_percent": f"{100 * traced / max(1, len(counted)):.1f}",
        "own_code": str(sum(own_code in text for text in counted)),
    }


def write_share(package: str, version: str, dtype: str, mode: str, configs: str, summary: dict[str, str]) -> None:
    """Write a summary in the place of that of the same package, dtype, mode and configs."""
    told = {"package": package, "version": version, "dtype": dtype, "mode": mode, "configs": configs}
    replace_rows(SHARES, [told | summary], KEY)


def read_share(*key: str) -> dict[str, str]:
    """The row of a package, dtype, mode and kind of configs. Raises KeyError."""
    return {tuple(row[name] for name in KEY): row for row in read_table(SHARES)}[key]

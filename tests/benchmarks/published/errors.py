"""The errors of the repeated runs as they were found: `tests/measured/published/errors.csv`, written by `bench_published --write`.

One row per kind of run, quantity and LIBRARIES: those of the day when it was written, or those of the runs' time. Percents are
signed (positive: the estimate was too high). README's table and the one beside the file are made of it (`python -m tests.readme`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

import torch
import transformers

from tests.benchmarks.bench_outside import PUBLISHED
from tests.benchmarks.published.held import Held
from tests.benchmarks.published.rows import Run, read_arguments
from tests.benchmarks.tables import read_table, replace_rows

ERRORS = PUBLISHED / "errors.csv"
LIBRARIES = ("today", "of their time")
KEY = ("set", "run", "quantity", "libraries")
_QLORA = "QLoRA, "  # begins a kind of run of a set that holds LoRA's, too
TITLES = {
    "attention_tables": "transformers' tables, float16, SDPA and eager; L40S, A100, RTX 3080 Ti, RTX 2060",
    "gpumemnet": "torchvision's networks, float32, from batch 32 to 128; A100",
    "liger_operators": "Liger Kernel's operators; A100, H100, RTX 4090, B200",
    "llama_forward": "Llama-2 7B, float16, forward pass; A100",
    "t4_adapters": "LoRA with `peft`, float16; T4",
    "t4_adapters, QLoRA": "QLoRA with `peft` and `bitsandbytes`, float16; T4",
    "trainer_guide": "BERT-large, Trainer of 2022; V100",
    "vit_large": "ViT-L/16, float32 and 16-bit; A100",
    "xmem": "torchvision's networks, float32, large batches; RTX 3060",
}


def kind_of(run: Run) -> str:
    """What its set tells runs apart by: the model and attention, the dtype, or checkpointing; "" where nothing does."""
    arguments = read_arguments(run.arguments)
    match run.set:
        case "attention_tables":
            return f"{arguments['model']}, {arguments['attention']}"
        case "t4_adapters":
            return f"{_QLORA if run.case == 'qlora_training' else ''}{arguments['attention']}"
        case "trainer_guide":
            return "checkpointing" if arguments["checkpointing"] else "no checkpointing"
        case "vit_large":
            return "float32" if arguments["precision"] == "32" else "16-bit"
    return ""


def summarize(held: Sequence[Held]) -> dict[str, str]:
    """Figures, median and worst error in percent, and how many figures are in the estimate's range, as text."""
    errors = [one.error for one in held]
    within = [one.within for one in held if one.within is not None]
    return {
        "figures": str(len(held)),
        "median_percent": _percent(median(errors)),
        "worst_percent": _percent(max(errors, key=abs)),
        "in_range": f"{sum(within)} of {len(within)}" if within else "",
    }


def write_errors(held: Iterable[Held], libraries: str) -> None:
    """Write the errors in the place of those of the same runs and libraries."""
    groups: dict[tuple[str, ...], list[Held]] = {}
    for one in held:
        groups.setdefault((one.run.set, kind_of(one.run), one.run.quantity, libraries), []).append(one)
    versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    replace_rows(
        ERRORS,
        [dict(zip(KEY, group, strict=True)) | versions | summarize(found) for group, found in groups.items()],
        KEY,
    )


def read_errors(libraries: str = LIBRARIES[0]) -> list[dict[str, str]]:
    """The rows of errors.csv with such libraries."""
    return [row for row in read_table(ERRORS) if row["libraries"] == libraries]


def in_range(rows: Iterable[Mapping[str, str]]) -> tuple[int, int]:
    """How many of how many figures are in the range that the estimate gives for them."""
    counts = [tuple(map(int, row["in_range"].split(" of "))) for row in rows if row["in_range"]]
    held, ranged = zip(*counts, strict=True)
    return sum(held), sum(ranged)


def table_by_set() -> Iterator[str]:
    """README's table: a line per set and quantity, the medians of its kinds of runs from the lowest to the highest."""
    yield "| run, GPU | what was read | figures | today's libraries | libraries of its time |"
    yield "|---|---|---|---|---|"
    today, then = map(_by_set, map(read_errors, LIBRARIES))
    for (name, quantity), rows in today.items():
        figures = sum(int(row["figures"]) for row in rows)
        errors = (_spread(found.get((name, quantity), [])) for found in (today, then))
        yield f"| {' | '.join((TITLES[name], quantity.replace('_', ' '), str(figures), *errors))} |"


def table_by_kind() -> Iterator[str]:
    """The table beside errors.csv: a line per kind of run and quantity."""
    names = ("set", "run", "quantity", "figures", "today: median, worst", "in range", "of their time", "transformers")
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    then = {tuple(row[name] for name in KEY[:3]): row for row in read_errors(LIBRARIES[1])}
    for row in read_errors():
        told = tuple(row[name] for name in KEY[:3])
        other = [_both(then[told]), then[told]["transformers"]] if told in then else ["", ""]
        yield f"| {' | '.join((*told, row['figures'], _both(row), row['in_range'], *other))} |"


def _by_set(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], list[Mapping[str, str]]]:
    groups: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for row in rows:
        name = f"{row['set']}, QLoRA" if row["run"].startswith(_QLORA) else row["set"]
        groups.setdefault((name, row["quantity"]), []).append(row)
    return groups


def _both(row: Mapping[str, str]) -> str:
    return ", ".join(row[name].replace("-", "−") for name in ("median_percent", "worst_percent"))


def _spread(rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return ""
    medians = sorted(float(row["median_percent"]) for row in rows)
    worst = max((float(row["worst_percent"]) for row in rows), key=abs)
    spread = " to ".join(dict.fromkeys(map(_signed, (medians[0], medians[-1]))))
    return f"{spread} %, worst {_signed(worst)} %"


def _percent(error: float) -> str:
    return f"{round(100 * error, 2) + 0.0:+.2f}"  # no "-0.00"


def _signed(percent: float) -> str:
    """Two digits with their sign: "−0.03", "+11"; "0"."""
    return f"{percent:+.2g}".replace("-", "−") if percent else "0"

"""Compare reports with those of another checkout: `python -m tests.benchmarks.compare_reports FOLDER [--every 10]`.

One cell of every nth preset and torchvision model, in training or inference in turn. This checkout answers as the command line
does, with placeholders (`sizer.service.local`); the other one answers in a plain process. Exit status 1 if any report differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parents[2]
# Queries on stdin; for each the JSON of its report on a line, or its error.
ANSWER = """
import sys
import torch
if sys.argv[1] == "new":
    from sizer.service.local import placeholders
    placeholders.install()
from sizer.base.errors import SizerError
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
for line in sys.stdin:
    try:
        print(estimate(parse_query(line.strip())).to_json(), flush=True)
    except SizerError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


def queries(every: int) -> Iterator[str]:
    """Yield the queries that are compared."""
    from torchvision.models import list_models

    from sizer.catalogue.presets import PRESETS

    names = [*(f"hf:{key}" for key in PRESETS), *(f"torchvision:{name}" for name in list_models())]
    works = ("dtype=bfloat16&batch=2", "mode=inference&dtype=float32&batch=1", "dtype=amp-float16&batch=2&gpu=rtx-4090")
    for name, work in zip(names[::every], itertools.cycle(works), strict=False):
        yield f"arch={name}&{work}"


def answers(checkout: Path, version: str, asked: list[str]) -> Iterator[str]:
    """Yield the answer of a checkout to each query."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", ANSWER, version],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(checkout), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    process.stdin.write("\n".join(asked) + "\n")
    process.stdin.close()
    yield from (line.rstrip("\n") for line in process.stdout)
    process.wait()


def main() -> int:
    """Print for each query what differs, and how many answers were compared."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args()
    asked = [*queries(options.every)]
    same = refused = 0
    both = zip(answers(options.folder.resolve(), "old", asked), answers(HERE, "new", asked), strict=True)
    for query, (before, after) in zip(asked, both, strict=True):
        same += before == after
        refused += not before.startswith("{")
        print(f"{query}: {'equal' if before == after else differences(before, after)}", flush=True)
    print(f"{same} of {len(asked)} answers are equal, {refused} of them errors")
    return 0 if same == len(asked) else 1


def differences(before: str, after: str) -> str:
    """Return the keys whose values differ, or both texts if one is no report."""
    if not (before.startswith("{") and after.startswith("{")):
        return f"{before[:200]} / {after[:200]}"
    old, new = json.loads(before), json.loads(after)
    return ", ".join(key for key in old if old[key] != new.get(key))


if __name__ == "__main__":
    sys.exit(main())

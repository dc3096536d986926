"""Holds levers, sets and limits of 22 questions against what asking each of them anew gives.

    python -m tests.benchmarks.prove_decision [--only SUBSTRING]

For each question: every lever's figures equal the estimate of the question that it makes; the smallest set fits by its own trace;
the largest batch, sequence and image fit by their own traces, and one more does not. Prints a line for each, exits with 1 where
one does not hold. Takes some twenty minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from sizer.decision.cells import CANNOT, Cells
from sizer.decision.levers import levers
from sizer.decision.limits import limits
from sizer.estimating.estimator import estimate
from sizer.query.request import Request
from sizer.query.text import parse_query
from sizer.report.decision import Cell, Limit, cell_of

DEVICES = ("rtx-4060-8gb", "t4", "rtx-4090", "a100-80gb")
WORK = (
    "arch=torchvision:resnet50&dtype=float32&batch=128",
    "arch=torchvision:efficientnet_b0&dtype=amp-bfloat16&batch=256",
    "arch=torchvision:vit_b_16&dtype=float32&batch=256",
    "arch=torchvision:convnext_tiny&dtype=bfloat16&batch=128&mode=inference",
    "arch=hf:bert-base-uncased&seq=512&dtype=float32&batch=64",
    "arch=hf:gpt2&seq=1024&dtype=float32&batch=8&attention=eager",
    "arch=hf:llama-3.2-1b&seq=2048&dtype=bfloat16&batch=4",
    "arch=hf:llama-3.2-1b&seq=4096&dtype=bfloat16&batch=16&mode=inference",
    "arch=hf:t5-small&seq=512&dtype=float32&batch=32&optimizer=adafactor",
    "arch=hf:whisper-tiny&dtype=float32&batch=16",
    "arch=torchvision:fasterrcnn_mobilenet_v3_large_320_fpn&dtype=float32&batch=4",
)
# Each kind of work on two of the four devices.
QUESTIONS = tuple(
    f"{work}&gpu={DEVICES[(place + turn) % len(DEVICES)]}" for place, work in enumerate(WORK) for turn in (0, 2)
)


def check(query: str) -> Iterator[tuple[str, bool]]:
    """What is claimed of a question, and whether it holds."""
    request = parse_query(query)
    cells = Cells(request)
    found = list(levers(request))[-1]
    yield "the question itself", found.base == _anew(query)
    for row in found.rows:
        if row.cell is not None:
            yield f"lever {row.key}", row.cell == _anew(row.query)
    if found.smallest is not None:
        own = cells.fits(parse_query(found.smallest.query)) is True
        yield (
            f"smallest set {'+'.join(found.smallest.keys)}",
            own and found.smallest.cell == _anew(found.smallest.query),
        )
    for limit in list(limits(request))[-1].limits:
        yield f"{limit.title.lower()} {limit.value}", _holds(limit, request, cells)


def _anew(query: str) -> Cell | None:
    rows = estimate(parse_query(query)).estimates
    return cell_of(rows[0]) if rows else None


def _holds(limit: Limit, request: Request, cells: Cells) -> bool:
    """Whether a limit fits by its own trace and one more does not; a model that refuses more has said so."""

    def fits(value: int) -> object:
        field, wrapped = {
            "batch": ("batches", (value,)),
            "seq": ("sequence_length", value),
            "image": ("image_size", (value, value)),
        }[limit.key]
        try:
            return cells.fits(replace(request, **{field: wrapped}))
        except CANNOT:
            return False

    if limit.value is None:
        return bool(limit.reason)
    more = fits(limit.value + 1) is not True or limit.reason.startswith(("searched", "only the separately traced batches"))
    return fits(limit.value) is True and more


def main() -> int:
    """Check all questions; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    failed = total = 0
    for query in QUESTIONS:
        if only not in query:
            continue
        began = time.monotonic()
        claims = list(check(query))
        wrong = [claim for claim, holds in claims if not holds]
        total, failed = total + len(claims), failed + len(wrong)
        print(
            f"{query}: {len(claims)} claims, {', '.join(wrong) or 'all hold'} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    print(f"{total} claims, {failed} do not hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Events per second of the allocator replays, on a tape shaped like a training step.

    python tests/benchmarks/bench_allocator.py [events]

Target: 20,000 events of the CUDA replay in under 0.1 s on one core.
"""

from __future__ import annotations

import random
import sys
import time
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from sizer.allocator.allocator import replay_events
from sizer.allocator.timeline import read_timeline
from sizer.tape.tape import CATEGORIES, Tape


def training_tape(events: int, seed: int = 0) -> Tape:
    """Parameters, a forward pass of kept and short-lived blocks, a backward pass that frees them and leaves gradients."""
    rng = random.Random(seed)
    widths = [2**k * rng.randint(1, 31) for k in range(8, 22)]
    order, sizes, categories = array("q"), array("q"), bytearray()

    def allocate(category: str) -> int:
        block = len(sizes)
        order.append(block)
        sizes.append(rng.choice(widths))
        categories.append(CATEGORIES.index(category))
        return block

    layers = max(1, events // 12)
    for _ in range(layers):
        allocate("parameter")
    saved = []
    for _ in range(2 * layers):
        scratch = allocate("temporary")
        saved.append(allocate("activation"))
        order.append(~scratch)
    for index, block in enumerate(reversed(saved)):
        passed = allocate("temporary")
        order.append(~block)
        if index % 2:
            allocate("gradient")
        order.append(~passed)
    marks = ((layers, "load"), (7 * layers, "forward"), (len(order), "backward"))
    zeros = array("l", [0] * len(sizes))
    return Tape(
        batch=1, order=order, sizes=sizes, categories=bytes(categories), ops=zeros, modules=zeros,
        op_names=("op",), module_names=("",), marks=marks,
    ).validate()  # fmt: skip


def main(events: int = 20_000) -> None:
    """Print one row per allocator: events, best of five in milliseconds, events per second."""
    tape = training_tape(events)
    print(f"{'allocator':<24}{'events':>8}{'place ms':>10}{'total ms':>10}{'events/s':>12}")
    for name, backend, expandable in (
        ("cuda", "cuda", False), ("cuda expandable", "cuda", True), ("mps", "mps", False), ("cpu", "cpu", False),
    ):  # fmt: skip
        best, best_total = float("inf"), float("inf")
        for _ in range(5):
            start = time.perf_counter()
            placement = replay_events(tape, backend, None, expandable)
            middle = time.perf_counter()
            read_timeline(tape, placement)
            best = min(best, middle - start)
            best_total = min(best_total, time.perf_counter() - start)
        count = len(tape.order)
        print(f"{name:<24}{count:>8}{best * 1e3:>10.1f}{best_total * 1e3:>10.1f}{count / best_total:>12,.0f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

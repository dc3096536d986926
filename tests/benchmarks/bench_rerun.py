"""How much CPU the app's own process takes to show an answer that is known, to one visitor who looks at it again and again.

    python -m tests.benchmarks.bench_rerun [--record]

A real app on the loopback interface and a visitor who speaks Streamlit's protocol. The CPU is that of all threads of the process
that serves the pages, job servers apart, by the system's account of it (ticks of 10 ms, over all reruns together).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

from tests.benchmarks.service_figures import add_record, record
from tests.benchmarks.visitor import Visitor, ask_until
from tests.browser.conftest import running_app

RERUNS = 100
DRAWN = "Memory over one step"  # what only a page with an answer says
QUERIES = (
    "arch=torchvision:resnet50",
    "arch=torchvision:resnet50&focus=bfloat16:64",
    "arch=torchvision:resnet18&dtype=float32&batch=1,2,4",
)


def cpu_seconds(process: int) -> float:
    """What a process has used so far, its children apart. Linux."""
    numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime: proc(5)


async def measure(address: str, process: int, query: str) -> float:
    """The milliseconds of CPU that one query takes, which are printed."""
    async with Visitor(address) as visitor:
        await ask_until(visitor, query, DRAWN)
        await visitor.run(query)
        before = cpu_seconds(process)
        shown = [await visitor.run(query) for _ in range(RERUNS)]
        took = 1000 * (cpu_seconds(process) - before) / RERUNS
    alike = len({one.digest() for one in shown}) == 1
    text = f"{query}: {took:.0f} ms of CPU, {len(shown[-1].elements)} elements, {'alike' if alike else 'NOT alike'}"
    print(text, flush=True)
    return took


def main() -> None:
    """Print a line for each query."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_rerun")
    add_record(parser)
    recorded = parser.parse_args().record
    with tempfile.TemporaryDirectory() as folder, running_app(Path(folder)) as (address, process):
        took = [asyncio.run(measure(address, process.pid, query)) for query in QUERIES]
    if recorded:
        figure = f"{min(took):.0f} to {max(took):.0f} ms"
        record("bench_rerun", {"a page whose answer is known, in the processor's time": figure})


if __name__ == "__main__":
    main()

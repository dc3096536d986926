"""How long new small questions take: of a crowd that asks at once, and beside tabs that ask large questions over and over.

    python -m tests.benchmarks.bench_crowd [--crowds 1,10,50,100] [--small 15] [--record]

A real app in public mode on the loopback interface. Each person asks a question that nobody has asked before, and waits for the
drawing of its answer. Nothing is kept from an earlier run. The visitors take a part of this machine's CPU themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import websockets

from tests.benchmarks.bench_load import DRAWN, quantile, resident_mib
from tests.benchmarks.service_figures import add_record, record
from tests.benchmarks.visitor import Visitor, ask_until
from tests.browser.conftest import running_app

CROWDS = "1,10,50,100"
ROUNDS = {1: 10, 10: 3}  # of each crowd; of the others one
SMALL = (
    f"arch=torchvision:{name}&dtype={dtype}&batch=1,2,4&image={image}"
    for image in itertools.count(64)
    for name in ("resnet18", "squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5")
    for dtype in ("float32", "bfloat16", "float16")
)
TABS = 8
LARGE = (f"arch=hf:llama-3.1-70b&train=adapter&seq={length}" for length in itertools.count(1024, 8))
BEFORE_SECONDS = 15.0  # that the tabs have asked when the small questions come


def busy_seconds(process: int) -> float:
    """The processor's time that a process has taken, without its children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def answer(visitor: Visitor) -> float | None:
    """The seconds until a new small question is answered; None where it was refused."""
    began = time.monotonic()
    shown = await visitor.run(next(SMALL))
    return time.monotonic() - began if DRAWN in shown.texts else None


async def crowd(address: str, people: int) -> list[float | None]:
    """The seconds of so many people who ask at the same moment, in pages that are open."""
    visitors = [await Visitor(address).__aenter__() for _ in range(people)]
    for visitor in visitors:
        await visitor.run("")
    seconds: list[float | None] = []
    for _ in range(ROUNDS.get(people, 1)):
        seconds += await asyncio.gather(*map(answer, visitors))
    for visitor in visitors:
        await visitor.__aexit__()
    return seconds


async def ask_large(address: str) -> None:
    """Ask a large question, and the next one as soon as it is answered."""
    async with Visitor(address) as visitor:
        while True:
            with suppress(websockets.WebSocketException, OSError, TimeoutError):
                await visitor.run(next(LARGE))


async def beside_tabs(address: str, count: int) -> list[float | None]:
    """The seconds of so many small questions of one visitor, one after the other."""
    tabs = [asyncio.create_task(ask_large(address)) for _ in range(TABS)]
    await asyncio.sleep(BEFORE_SECONDS)
    async with Visitor(address) as visitor:
        await visitor.run("")
        seconds = [await answer(visitor) for _ in range(count)]
    for tab in tabs:
        tab.cancel()
    await asyncio.gather(*tabs, return_exceptions=True)
    return seconds


async def measure(address: str, process: int, crowds: list[int], small: int) -> dict[str, str]:
    """The figures of README, by what they are of; a line for each of the loads is printed."""
    async with Visitor(address) as visitor:
        await ask_until(visitor, next(SMALL), DRAWN)
    figures, slow, refused = {}, [], 0
    print(f"the app's process holds {resident_mib(process):.0f} MiB", flush=True)
    for people in crowds:
        before, began = busy_seconds(process), time.monotonic()
        found = await crowd(address, people)
        seconds, busy = [one for one in found if one is not None], busy_seconds(process) - before
        refused += len(found) - len(seconds)
        slow.append(f"{quantile(seconds, 0.95):.1f}")
        print(
            f"{people} at once: half within {quantile(seconds, 0.5):.2f} s, 95 % within {quantile(seconds, 0.95):.2f} s, "
            f"refused {len(found) - len(seconds)}; the app took {busy / len(found):.3f} s of a processor for each of "
            f"{len(found)} in {time.monotonic() - began:.1f} s, and holds {resident_mib(process):.0f} MiB",
            flush=True,
        )
    if crowds:
        what = f"new small questions of {', '.join(map(str, crowds))} people at once: 95 % are answered within"
        figures[what] = f"{', '.join(slow)} s; {refused} refused"
    if small:
        found = [one for one in await beside_tabs(address, small) if one is not None]
        half, most = quantile(found, 0.5), max(found)
        print(
            f"beside {TABS} tabs: half within {half:.1f} s, all {len(found)} of {small} within {most:.1f} s", flush=True
        )
        figures[f"a new small question beside {TABS} tabs that ask for LoRA on 70B over and over: half and worst"] = (
            f"{half:.1f} and {most:.1f} s"
        )
    return figures


def main() -> None:
    """Start the app and measure."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_crowd")
    parser.add_argument(
        "--crowds", default=CROWDS, help="how many people ask at once, with commas between; empty for none"
    )
    parser.add_argument("--small", type=int, default=15, help="small questions beside the tabs")
    add_record(parser)
    arguments = parser.parse_args()
    crowds = [int(one) for one in arguments.crowds.split(",") if one]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_app(Path(folder), SIZER_SESSIONS="400", SIZER_PUBLIC="1", SIZER_TAPES="") as (address, process),
    ):
        figures = asyncio.run(measure(address, process.pid, crowds, arguments.small))
    if arguments.record:
        record("bench_crowd", figures)


if __name__ == "__main__":
    main()

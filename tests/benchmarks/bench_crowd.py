"""How soon new small questions have figures: of a crowd that asks at once, and beside tabs that ask large questions over and over.

    python -m tests.benchmarks.bench_crowd [--crowds 1,10,50,100] [--small 15] [--record]

Start an app in public mode on the loopback interface. Each person asks a new question. Measure the seconds until the headline has
figures, and until the whole answer is drawn. No answer is kept from an earlier run. The visitors use CPU time of the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import websockets

from sizer.query.text import parse_query
from tests.benchmarks.bench_load import DRAWN, quantile, resident_mib
from tests.benchmarks.service_figures import add_record, record
from tests.benchmarks.visitor import Shown, Visitor, ask_until
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


@dataclass(frozen=True, slots=True)
class Waited:
    """Seconds until the first figures of an answer, and until all of it."""

    first: float
    whole: float


async def answer(visitor: Visitor) -> Waited | None:
    """The seconds that a new small question takes; None where it was refused."""
    query, began, first = next(SMALL), time.monotonic(), list[float]()
    name = parse_query(query).name

    def look(shown: Shown) -> None:
        if not first and name in shown.title.replace("\\", ""):
            first.append(time.monotonic() - began)

    shown = await visitor.run(query, look)
    return Waited(first[0], time.monotonic() - began) if first and DRAWN in shown.texts else None


async def crowd(address: str, people: int) -> list[Waited | None]:
    """The seconds of so many people who ask at the same moment, in pages that are open."""
    visitors = [await Visitor(address).__aenter__() for _ in range(people)]
    for visitor in visitors:
        await visitor.run("")
    seconds: list[Waited | None] = []
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


async def beside_tabs(address: str, count: int) -> list[Waited | None]:
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
    figures, soon, slow, refused = {}, [], [], 0
    print(f"the app's process holds {resident_mib(process):.0f} MiB", flush=True)
    for people in crowds:
        before, began = busy_seconds(process), time.monotonic()
        found = await crowd(address, people)
        answered, busy = [one for one in found if one is not None], busy_seconds(process) - before
        refused += len(found) - len(answered)
        first, whole = [one.first for one in answered], [one.whole for one in answered]
        soon.append(f"{quantile(first, 0.95):.1f}")
        slow.append(f"{quantile(whole, 0.95):.1f}")
        print(
            f"{people} at once: half have figures within {quantile(first, 0.5):.2f} s, 95 % within {quantile(first, 0.95):.2f} s, "
            f"whole answers {quantile(whole, 0.5):.2f} and {quantile(whole, 0.95):.2f} s, "
            f"refused {len(found) - len(answered)}; the app took {busy / len(found):.3f} s of a processor for each of "
            f"{len(found)} in {time.monotonic() - began:.1f} s, and holds {resident_mib(process):.0f} MiB",
            flush=True,
        )
    if crowds:
        what = f"new small questions of {', '.join(map(str, crowds))} people at once: 95 % have"
        figures[f"{what} first figures within"] = f"{', '.join(soon)} s; {refused} refused"
        figures[f"{what} their whole answer within"] = f"{', '.join(slow)} s"
    if small:
        found = [one.first for one in await beside_tabs(address, small) if one is not None]
        half, most = quantile(found, 0.5), max(found)
        print(
            f"beside {TABS} tabs: half within {half:.1f} s, all {len(found)} of {small} within {most:.1f} s", flush=True
        )
        figures[f"first figures of a small question beside {TABS} tabs that ask for LoRA on 70B over and over: half and worst"] = (
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

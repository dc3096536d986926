"""What many visitors at once wait for, and what the app's process holds after them.

    python -m tests.benchmarks.bench_load [--minutes 5] [--record]

A real app on the loopback interface and visitors who speak Streamlit's protocol, all on this machine: they take a part of its CPU
themselves. Bursts: so many people ask at the same moment, each one of a dozen questions whose answers are known. Then a hundred
people look around, with twenty seconds between two looks, beside others who send nonsense, hang up in the middle, or come from
elsewhere. Every answer is checked to be the one that was asked for. Meanwhile /healthz is asked twenty times a second.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import websockets

from tests.benchmarks.service_figures import add_record, record
from tests.benchmarks.visitor import Visitor, ask_until
from tests.browser.conftest import running_app

CROWDS = (1, 10, 50, 100)
ROUNDS = 5  # of each burst
PEOPLE, THINK_SECONDS = 100, 20.0
STRANGERS = 6
DRAWN = "Memory over one step"
QUERIES = tuple(
    f"arch=torchvision:{name}&dtype={dtype}&batch=1,2,4"
    for name in ("resnet18", "squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5")
    for dtype in ("float32", "bfloat16", "float16")
)
NONSENSE = ("batch=-5", "arch=config:%00", "arch=hub:../etc", "v=" + "9" * 5_000, "focus=;&gpu=custom:1@x", "a=%ff%fe")


def resident_mib(process: int) -> float:
    """What a process holds in memory, shared pages included. Linux."""
    (line,) = (line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def quantile(values: list[float], share: float) -> float:
    """The value that so large a share of them does not exceed."""
    return sorted(values)[max(0, round(share * len(values)) - 1)]


class Health(threading.Thread):
    """Asks /healthz twenty times a second, and keeps how long each answer took, infinity where it was none."""

    def __init__(self, address: str):
        super().__init__(daemon=True)
        self.seconds: list[float] = []
        self._address, self._end = address, threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.05):
            began = time.monotonic()
            try:
                with urllib.request.urlopen(f"{self._address}/healthz", timeout=10) as response:
                    response.read()
                self.seconds.append(time.monotonic() - began)
            except (urllib.error.URLError, OSError):
                self.seconds.append(float("inf"))

    def end(self) -> None:
        self._end.set()
        self.join()


class Load:
    """Visitors of one app, and what they saw."""

    def __init__(self, address: str, process: int):
        self._address, self._process = address, process
        self._titles: dict[str, str] = {}  # of each query, as one visitor alone saw it
        self.answers = self.crossed = 0

    async def warm(self) -> None:
        """Have every answer made once."""
        for query in QUERIES:
            async with Visitor(self._address) as visitor:
                await ask_until(visitor, query, DRAWN)
                await visitor.run(query)
                self._titles[query] = (await visitor.run(query)).title
        assert len(set(self._titles.values())) == len(QUERIES)

    async def look(self, visitor: Visitor, query: str) -> float:
        """The seconds until a page was whole."""
        began = time.monotonic()
        shown = await visitor.run(query)
        self.answers += 1
        self.crossed += shown.title != self._titles[query]
        return time.monotonic() - began

    async def burst(self, people: int) -> list[float]:
        """The seconds of each of so many people who look at the same moment, in pages that are open."""
        visitors = [await Visitor(self._address).__aenter__() for _ in range(people)]
        for visitor in visitors:
            await self.look(visitor, random.choice(QUERIES))
        seconds = []
        for _ in range(ROUNDS):
            seconds += await asyncio.gather(*(self.look(visitor, random.choice(QUERIES)) for visitor in visitors))
        for visitor in visitors:
            await visitor.__aexit__()
        return seconds

    async def soak(self, seconds: float) -> tuple[list[float], list[float]]:
        """How long people waited, and what the process held (MiB, every five seconds)."""
        end = time.monotonic() + seconds
        waits: list[float] = []
        held: list[float] = []
        strangers = [self._until(end, self._annoy) for _ in range(STRANGERS)]
        await asyncio.gather(*(self._person(end, waits) for _ in range(PEOPLE)), *strangers, self._weigh(end, held))
        return waits, held

    async def _person(self, end: float, waits: list[float]) -> None:
        await asyncio.sleep(random.uniform(0, THINK_SECONDS))
        async with Visitor(self._address) as visitor:
            while time.monotonic() < end:
                waits.append(await self.look(visitor, random.choice(QUERIES)))
                await asyncio.sleep(random.uniform(0.5, 1.5) * THINK_SECONDS)

    async def _weigh(self, end: float, held: list[float]) -> None:
        while time.monotonic() < end:
            held.append(resident_mib(self._process))
            await asyncio.sleep(5)

    async def _until(self, end: float, do: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < end:
            with suppress(websockets.WebSocketException, OSError, TimeoutError):
                await do()
            await asyncio.sleep(1.0)

    async def _annoy(self) -> None:
        """Send nonsense, hang up in the middle of a run, or send a message that is far too long."""
        async with Visitor(self._address) as visitor, asyncio.timeout(10):
            match random.randrange(3):
                case 0:
                    await visitor.run(random.choice(NONSENSE))
                case 1:
                    await visitor.start(random.choice(QUERIES))
                case _:
                    await visitor.start("x=" + "y" * 4_000_000)
                    await asyncio.sleep(1)


async def measure(address: str, process: int, minutes: float) -> dict[str, str]:
    """The figures of README, by what they are of; a line for each of the loads is printed."""
    load = Load(address, process)
    await load.warm()
    print(f"the app's process holds {resident_mib(process):.0f} MiB with {len(QUERIES)} answers", flush=True)
    health = Health(address)
    health.start()
    bursts = []
    for people in CROWDS:
        seconds = await load.burst(people)
        half, most = (quantile(seconds, share) for share in (0.5, 0.95))
        bursts.append(f"{most:.1f}")
        print(f"{people} at once: half within {half:.2f} s, 95 % within {most:.2f} s", flush=True)
    waits, held = await load.soak(60 * minutes)
    health.end()
    looks, healthy = quantile(waits, 0.95), quantile(health.seconds, 0.99)
    print(f"{PEOPLE} people for {minutes:g} min: 95 % of {len(waits):,} looks within {looks:.2f} s")
    third = max(len(held) // 3, 1)
    first, last = max(held[:third]), max(held[-third:])
    print(f"memory: {first:.0f} MiB at most in the first third of that time, {last:.0f} in the last")
    print(f"/healthz: 99 % of {len(health.seconds):,} within {1000 * healthy:.0f} ms")
    print(f"answers that were another's: {load.crossed} of {load.answers:,}")
    crowds = ", ".join(map(str, CROWDS))
    return {
        f"{crowds} people at once, whose answers are known: 95 % have their page within": f"{', '.join(bursts)} s",
        f"{PEOPLE} people who look every {THINK_SECONDS:.0f} seconds, beside strangers who send nonsense: 95 % within": (
            f"{looks:.2f} s"
        ),
        "/healthz meanwhile: 99 % within": f"{healthy:.2f} s",
        f"the app's process at most, in the first and the last third of {minutes:g} minutes of that": (
            f"{first:.0f} and {last:.0f} MiB"
        ),
        "answers that were another's": f"{load.crossed} of {load.answers:,}",
    }


def main() -> None:
    """Start the app and measure."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_load")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long people look around")
    add_record(parser)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_app(Path(folder), SIZER_SESSIONS="400") as (address, process),
    ):
        figures = asyncio.run(measure(address, process.pid, arguments.minutes))
    if arguments.record:
        record("bench_load", figures)


if __name__ == "__main__":
    main()

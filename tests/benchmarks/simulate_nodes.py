"""500 engineers on 4 nodes, by arithmetic: how long answers take when the lines are as `sizer.service.broker` has them.

    python -m tests.benchmarks.simulate_nodes

No process is started. Each engineer asks, looks at the answer for a while, and asks again; one question in five is known to
somebody already; of the others one in twenty is long. Each node has 8 places; one of the 4 takes short questions only. Ranks are
those of `sizer/service/broker/board.py`: finish times by visitor, a line each for short and for long questions.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from statistics import quantiles

ENGINEERS, HOURS = 500, 2.0
NODES, PLACES = 4, 8
THINK_SECONDS = 120.0  # between an answer and the next question, on average
KNOWN, LONG = 0.2, 0.05  # shares of questions
KNOWN_SECONDS, SHORT_SECONDS, LONG_SECONDS = 0.05, 4.0, 60.0  # on average, of a place: taken to be so


@dataclass(slots=True)
class Line:
    """Questions by finish times."""

    waiting: list[tuple[float, int, float, float]] = field(default_factory=list)  # rank, engineer, asked at, seconds
    now: float = 0.0
    finish: dict[int, float] = field(default_factory=dict)

    def put(self, engineer: int, at: float, seconds: float) -> None:
        """Add a question."""
        rank = self.finish[engineer] = max(self.now, self.finish.get(engineer, 0.0)) + seconds
        heapq.heappush(self.waiting, (rank, engineer, at, seconds))

    def take(self) -> tuple[int, float, float] | None:
        """The engineer, the time and the seconds of the first question; None where there is none."""
        if not self.waiting:
            return None
        self.now, *question = heapq.heappop(self.waiting)
        return tuple(question)


class Nodes:
    """Engineers who ask, and places that answer, one event after the other."""

    def __init__(self, nodes: int, seed: int):
        self._random = random.Random(seed)
        self._lines = {"short": Line(), "long": Line()}
        self._free = {"any": PLACES * (nodes - 1), "short": PLACES}
        self._events: list[tuple[float, int, str, object]] = []
        self._order = 0
        self.waits: dict[str, list[float]] = {"known": [], "short": [], "long": []}
        self.busy_seconds = 0.0

    def run(self, engineers: int, seconds: float) -> None:
        """Let so many engineers ask for so many seconds."""
        for engineer in range(engineers):
            self._at(self._random.uniform(0, THINK_SECONDS), "ask", engineer)
        while self._events and self._events[0][0] < seconds:
            now, _, what, whom = heapq.heappop(self._events)
            self._ask(now, whom) if what == "ask" else self._end(now, *whom)
            self._start(now)

    def _at(self, when: float, what: str, whom: object) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, what, whom))

    def _ask(self, now: float, engineer: int) -> None:
        if self._random.random() < KNOWN:
            self.waits["known"].append(KNOWN_SECONDS)
            return self._think(now + KNOWN_SECONDS, engineer)
        kind = "long" if self._random.random() < LONG else "short"
        mean = LONG_SECONDS if kind == "long" else SHORT_SECONDS
        self._lines[kind].put(engineer, now, self._random.expovariate(1 / mean))

    def _think(self, now: float, engineer: int) -> None:
        self._at(now + self._random.expovariate(1 / THINK_SECONDS), "ask", engineer)

    def _end(self, now: float, place: str, kind: str, engineer: int, asked: float) -> None:
        self._free[place] += 1
        self.waits[kind].append(now - asked)
        self._think(now, engineer)

    def _start(self, now: float) -> None:
        for place, kinds in (("short", ("short",)), ("any", ("short", "long"))):
            while self._free[place]:
                kind, question = next(
                    ((kind, found) for kind in kinds if (found := self._lines[kind].take())), (None, None)
                )
                if question is None:
                    break
                engineer, asked, seconds = question
                self._free[place] -= 1
                self.busy_seconds += seconds
                self._at(now + seconds, "end", (place, kind, engineer, asked))


def main() -> None:
    """Print what becomes of it on 1 to 4 nodes."""
    for nodes in (2, 3, NODES):
        found = Nodes(nodes, seed=0)
        found.run(ENGINEERS, 3600 * HOURS)
        use = found.busy_seconds / (nodes * PLACES * 3600 * HOURS)
        told = []
        for kind, waits in found.waits.items():
            *_, p95 = quantiles(waits, n=20)
            told.append(f"{kind} {len(waits):,}, half within {quantiles(waits, n=2)[0]:.1f} s, 95 % within {p95:.1f} s")
        print(f"{nodes} nodes, {use:.0%} busy: {'; '.join(told)}")


if __name__ == "__main__":
    main()

"""The next job to run, jobs to pause for others, and the limits of new jobs: arithmetic only, without processes and clocks.

A job's rank is in seconds, and the lowest goes first:

    recent use of its visitor (mean of address and session) + its own run time + its size - AGEING * its waiting time

So no visitor starves: visitors with little use go before those with much, short jobs before long ones, and after a long wait a
job goes before all others. A job that has had a turn is paused for one with a far lower rank, at any point, and continues
later. A paused job keeps its memory. If there are too many, the job that loses least is stopped, and starts again from its
stored results, the cells that were done.

First figures come before whole answers. A job that has shown its first figures is paused, before its turn is over, for a job of
a lower rank that has not begun, while there is memory for both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sizer.base.errors import QueueFullError

AGEING = 0.1  # seconds of rank for each second of waiting
HALF_LIFE_SECONDS = 300.0  # after which half of a visitor's use is forgotten
CELL_SECONDS = 0.25  # of rank, for each requested dtype and batch size
# Factor by which a job's rank must be lower to pause another: for a new job; for a paused job, which costs nothing; for a stopped
# job, for which another may have to be stopped.
NEW_LEAD, PAUSED_LEAD, STOPPED_LEAD = 2.0, 1.5, 4.0
TURN_SECONDS = 2.0  # before which no job is paused
STARTED_PER_PLACE = 2  # limit of jobs in memory for each place; jobs that were paused early do not count
SESSION_JOBS = 8  # limit of one session in the queue
MAX_VISITORS = 10_000  # with remembered use


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Origin of a question: a network address, empty for this machine, and a session there, empty for a command."""

    address: str = ""
    session: str = ""


def check_room(present: Iterable[Visitor], visitor: Visitor, limit: int) -> None:
    """Raise QueueFullError if `visitor` may not add a job to those of `present`; the queue holds up to `limit` jobs.

    One address may use half of the queue, one session SESSION_JOBS. The machine's own user may use all of it.
    """
    present = list(present)
    if len(present) >= limit:
        raise QueueFullError(f"too many jobs: {len(present)} are running or waiting", todo="try again in a minute")
    todo = "wait for one of them, or close a page that you need no more"
    if visitor.session and (own := present.count(visitor)) >= SESSION_JOBS:
        raise QueueFullError(f"too many jobs: {own} of this session are running or waiting", todo=todo)
    if visitor.address and (own := sum(one.address == visitor.address for one in present)) >= max(limit // 2, 1):
        raise QueueFullError(f"too many jobs: {own} from your address are running or waiting", todo=todo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Next actions, by the numbers of jobs: jobs to pause, to start or continue, and to stop until their next turn."""

    pause: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Entry:
    visitor: Visitor
    size_seconds: float
    since: float  # when it began to wait, or its turn
    running: bool = False
    started: bool = False  # it is in memory, running or paused
    stopped: bool = False  # its memory was taken for other jobs
    wanted: bool = True
    shown: bool = False  # its first figures have been sent
    early: bool = False  # it was paused before its turn was over, for the first figures of another job
    had_seconds: float = 0.0
    unkept_seconds: float = 0.0  # part of these that would be lost if it were stopped


class FairQueue:
    """Jobs by number; at most `places` run and at most `limit` are queued. Times are seconds of any one clock."""

    def __init__(self, places: int, limit: int):
        self._places, self._limit = places, limit
        self._entries: dict[int, _Entry] = {}
        self._used: dict[
            tuple[str, ...], tuple[float, float]
        ] = {}  # seconds and when they were right, by address, session
        self._now = 0.0
        self.roomy = False  # whether there is memory to pause jobs early

    def put(self, number: int, visitor: Visitor, cells: int, now: float) -> None:
        """Add a job of `cells` cells. Raises JobError if there is no room for it."""
        check_room((entry.visitor for entry in self._entries.values() if entry.wanted), visitor, self._limit)
        self._entries[number] = _Entry(visitor=visitor, size_seconds=CELL_SECONDS * cells, since=now)

    def give_up(self, number: int) -> None:
        """Remove an abandoned job from the line; a running job keeps its place until it is removed."""
        self._entries[number].wanted = False

    def remove(self, number: int, now: float) -> None:
        """Remove a job that has ended; its visitor's use is remembered."""
        self._account(now)
        del self._entries[number]

    def keep(self, number: int, now: float) -> None:
        """Note that a job's results so far are stored."""
        self._account(now)
        self._entries[number].unkept_seconds = 0.0

    def put_back(self, number: int, now: float) -> None:
        """Have a job that ran, and has ended without an answer, wait for another turn."""
        self._account(now)
        entry = self._entries[number]
        entry.running, entry.started, entry.unkept_seconds, entry.since = False, False, 0.0, now

    def stop(self, number: int) -> None:
        """Note that a paused job has released its memory."""
        entry = self._entries[number]
        entry.started, entry.stopped, entry.unkept_seconds = False, True, 0.0

    def show(self, number: int) -> None:
        """Note that the first figures of a job have been sent."""
        self._entries[number].shown = True

    def running(self, number: int) -> bool:
        """Return whether it is this job's turn."""
        return self._entries[number].running

    def turns(self, now: float) -> Turns:
        """Return the turns now: free places are given away, and jobs are paused for those that lead them by far."""
        self._account(now)
        free = self._places - sum(entry.running for entry in self._entries.values())
        overtaken = self._overtaken(after=max(free, 0))
        begun = [*self._waiting()[: max(free, 0)], *overtaken.values()]
        for number in overtaken:
            entry = self._entries[number]
            entry.running, entry.early, entry.since = False, not self._is_over(entry), now
        for number in begun:
            entry = self._entries[number]
            entry.running, entry.started, entry.early, entry.since = True, True, False, now
        stopped = self._too_many()
        for number in stopped:
            self.stop(number)
        return Turns(pause=tuple(overtaken), start=tuple(begun), stop=tuple(stopped))

    def ahead(self, now: float) -> dict[int, int]:
        """Return how many jobs wait before each waiting job."""
        self._account(now)
        return {number: place for place, number in enumerate(self._waiting())}

    def _overtaken(self, *, after: int) -> dict[int, int]:
        """Return the jobs to pause, each with the job that gets its place. The first `after` waiting jobs get free places.

        A job is paused if its turn is over, or if its first figures have come.
        """
        running = [number for number, entry in self._entries.items() if entry.running and entry.wanted]
        waiting = self._waiting()[after:]
        found: dict[int, int] = {}
        for number in sorted(running, key=self._rank, reverse=True):
            leads = self._leads if self._is_over(self._entries[number]) else self._is_new_to
            first = next((one for one in waiting if leads(one, number)), None)
            if first is not None:
                waiting.remove(first)
                found[number] = first
        return found

    def _is_over(self, entry: _Entry) -> bool:
        """Return whether the turn of a running job is over."""
        return self._now - entry.since >= TURN_SECONDS

    def _is_new_to(self, first: int, number: int) -> bool:
        """Return whether the first job, of a lower rank, has not begun, and the other has shown its first figures."""
        entry = self._entries[first]
        new = self.roomy and not (entry.started or entry.stopped or entry.shown)
        return new and self._entries[number].shown and self._rank(first) < self._rank(number)

    def _leads(self, first: int, number: int) -> bool:
        """Return whether the first job's rank is lower by enough, without the use that both visitors share."""
        entry = self._entries[first]
        lead = PAUSED_LEAD if entry.started else STOPPED_LEAD if entry.stopped else NEW_LEAD
        both = set(_keys(entry.visitor)) & set(_keys(self._entries[number].visitor))
        shared = self._use(both)
        return lead * max(self._rank(first) - shared, 0.0) < self._rank(number) - shared

    def _too_many(self) -> list[int]:
        """Return the paused jobs that must give up their memory; jobs that lose least come first."""
        started = [number for number, entry in self._entries.items() if entry.started and not entry.early]
        count = len(started) - STARTED_PER_PLACE * self._places
        paused = [number for number in started if not self._entries[number].running]
        return sorted(paused, key=lambda number: self._entries[number].unkept_seconds)[: max(count, 0)]

    def _waiting(self) -> list[int]:
        waiting = (number for number, entry in self._entries.items() if entry.wanted and not entry.running)
        return sorted(waiting, key=self._rank)

    def _rank(self, number: int) -> float:
        entry = self._entries[number]
        waited = 0.0 if entry.running else self._now - entry.since
        return self._use(_keys(entry.visitor)) + entry.had_seconds + entry.size_seconds - AGEING * waited

    def _use(self, keys: Iterable[tuple[str, ...]]) -> float:
        return sum(map(self._use_of, keys)) / 2

    def _use_of(self, key: tuple[str, ...]) -> float:
        seconds, at = self._used.get(key, (0.0, self._now))
        return seconds * 0.5 ** ((self._now - at) / HALF_LIFE_SECONDS)

    def _account(self, now: float) -> None:
        """Charge the visitors of running jobs for the time since the last call."""
        past, self._now = self._now, now
        for entry in self._entries.values():
            if entry.running:
                seconds = now - max(past, entry.since)
                entry.had_seconds += seconds
                entry.unkept_seconds += seconds
                for key in _keys(entry.visitor):
                    self._used[key] = (self._use_of(key) + seconds, now)
        while len(self._used) > MAX_VISITORS:
            del self._used[min(self._used, key=self._use_of)]


def _keys(visitor: Visitor) -> tuple[tuple[str, ...], ...]:
    return (visitor.address,), (visitor.address, visitor.session)

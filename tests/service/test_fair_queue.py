"""The queue under a clock of the test's own: random visitors with random jobs, and the two cases that it is there for."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from sizer.base.errors import JobError
from sizer.service.fair_queue import (
    AGEING,
    CELL_SECONDS,
    SESSION_JOBS,
    STARTED_PER_PLACE,
    TURN_SECONDS,
    FairQueue,
    Visitor,
    check_room,
)

STEP = 0.25  # seconds of the simulated clock


def visitor(number: int, session: int = 0) -> Visitor:
    return Visitor(address=f"10.0.0.{number}", session=str(session))


@dataclass(kw_only=True)
class Work:
    """A job of so many cells of so many seconds; a cell in which it is stopped is begun again."""

    visitor: Visitor
    cells: int
    cell_seconds: float
    at: float = 0.0
    done: int = 0
    in_cell: float = 0.0
    lost: float = 0.0
    started: float | None = None
    shown: float | None = None  # the first cell
    ended: float | None = None


@dataclass
class Simulation:
    """A queue, the jobs that are brought to it, and what happened."""

    places: int
    works: list[Work]
    roomy: bool = False
    queue: FairQueue = field(init=False)
    running: set[int] = field(default_factory=set)
    holding: set[int] = field(default_factory=set)  # memory, running or paused
    now: float = 0.0

    def __post_init__(self):
        self.queue = FairQueue(self.places, limit=1000)
        self.queue.roomy = self.roomy

    def run(self, until: float = 10_000.0) -> None:
        there: set[int] = set()
        while self.now < until and any(work.ended is None for work in self.works):
            for number, work in enumerate(self.works):
                if work.at <= self.now and number not in there:
                    self.queue.put(number, work.visitor, work.cells, self.now)
                    there.add(number)
            self._turn()
            waiting = [n for n in there if self.works[n].ended is None and n not in self.running]
            assert len(self.running) <= self.places
            assert self.roomy or len(self.holding) <= STARTED_PER_PLACE * self.places
            assert not (waiting and len(self.running) < self.places), "a place is free while somebody waits"
            assert sorted(self.queue.ahead(self.now).values()) == list(range(len(waiting)))
            self.now += STEP
            for number in list(self.running):
                self._work(number)

    def _turn(self) -> None:
        turns = self.queue.turns(self.now)
        assert self.running >= set(turns.pause)
        self.running = self.running - set(turns.pause) | set(turns.start)
        self.holding = self.holding | set(turns.start)
        assert self.holding - self.running >= set(turns.stop)
        self.holding -= set(turns.stop)
        for number in turns.start:
            self.works[number].started = self.works[number].started or self.now
        for number in turns.stop:
            self.works[number].lost += self.works[number].in_cell
            self.works[number].in_cell = 0.0

    def _work(self, number: int) -> None:
        work = self.works[number]
        work.in_cell += STEP
        if work.in_cell >= work.cell_seconds:
            work.done, work.in_cell = work.done + 1, 0.0
            work.shown = work.shown or self.now
            self.queue.keep(number, self.now)
            self.queue.show(number)
            if work.done == work.cells:
                work.ended = self.now
                self.running.remove(number)
                self.holding.remove(number)
                self.queue.remove(number, self.now)


@pytest.mark.parametrize("roomy", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_everybody_is_served_and_no_place_is_idle(seed, roomy):
    chance = random.Random(seed)
    works = [
        Work(
            visitor=visitor(chance.randrange(6), chance.randrange(3)),
            cells=chance.choice((1, 2, 5, 40)),
            cell_seconds=chance.choice((STEP, 1.0, 4.0, 20.0)),
            at=chance.uniform(0, 60),
        )
        for _ in range(25)
    ]
    simulation = Simulation(chance.choice((1, 2, 4)), works, roomy)
    simulation.run(until=100_000)
    assert all(work.ended is not None for work in works)


def test_small_question_goes_through_beside_six_long_grids():
    # Six Mask R-CNN grids of 40 cells of 4 s on two places; a ResNet-18's grid of 3.5 s comes after a minute.
    grids = [Work(visitor=visitor(number), cells=40, cell_seconds=4.0) for number in range(6)]
    small = Work(visitor=visitor(9), cells=40, cell_seconds=0.1, at=60.0)
    Simulation(2, [*grids, small]).run(until=300)
    # A grid is paused once its turn is over. The small one takes 40 steps.
    assert small.started - small.at <= TURN_SECONDS
    assert small.ended - small.at <= TURN_SECONDS + 40 * STEP + STEP
    # What grids lose where too many are paused: little beside the 60 s.
    assert sum(work.lost for work in grids) <= 2 * 60 * 0.25


@pytest.mark.parametrize(("roomy", "seconds"), [(True, 20 * STEP), (False, 20 * 4 * STEP - 3 * STEP)])
def test_first_figures_of_all_come_before_whole_answers(roomy, seconds):
    # Twenty small questions of four cells, each of a step: a step each for the first figures. One after the other the last one
    # begins when 19 have ended.
    crowd = [Work(visitor=visitor(number), cells=4, cell_seconds=STEP) for number in range(20)]
    simulation = Simulation(1, crowd, roomy)
    simulation.run()
    assert max(work.shown for work in crowd) == seconds
    assert max(work.ended for work in crowd) == 20 * 4 * STEP
    assert sum(work.lost for work in crowd) == 0


def test_a_long_question_is_not_paused_early_for_one_that_is_longer():
    first = Work(visitor=visitor(0), cells=4, cell_seconds=STEP)
    longer = Work(visitor=visitor(1), cells=40, cell_seconds=STEP)
    Simulation(1, [first, longer], roomy=True).run()
    assert first.ended == 4 * STEP


def test_cell_that_takes_long_gets_done_beside_many_small_ones():
    whole = Work(visitor=visitor(0), cells=1, cell_seconds=60.0)
    small = [Work(visitor=visitor(1 + number), cells=1, cell_seconds=2.0, at=10.0 * number) for number in range(40)]
    Simulation(1, [whole, *small]).run()
    assert max(work.ended - work.at for work in small) <= TURN_SECONDS + 2.0 + STEP
    assert whole.lost == 0
    assert whole.ended <= 60 / (1 - 0.2) + 10  # the small ones take a fifth of the time


def test_sixty_six_tabs_do_not_shut_out_another_address():
    tabs = [Work(visitor=visitor(0, tab), cells=40, cell_seconds=1.0) for tab in range(66)]
    another = [Work(visitor=visitor(1), cells=40, cell_seconds=0.25, at=30.0 + 20 * number) for number in range(3)]
    Simulation(2, [*tabs, *another]).run(until=100)
    # 40 cells of a step each. Before, until one that runs has a rank twice as high: both begin with 40 x 0.25 = 10 s, and each
    # second of a run adds two (its visitor's, its own): (20 - 10) / 2 = 5 s at most.
    assert max(work.ended - work.at for work in another) <= 5 + 40 * STEP + STEP


def test_sixty_six_tabs_let_another_of_the_same_address_have_its_turn():
    tabs = [Work(visitor=visitor(0, tab), cells=40, cell_seconds=1.0) for tab in range(66)]
    another = Work(visitor=visitor(0, 99), cells=40, cell_seconds=1.0, at=30.0)
    Simulation(2, [*tabs, another]).run(until=200)
    assert another.started - another.at < 150  # some turns of each, not the 40 s that each asks for


def test_places_are_shared_by_visitors_not_by_jobs():
    many = [Work(visitor=visitor(0, tab), cells=20, cell_seconds=1.0) for tab in range(60)]
    few = [Work(visitor=visitor(1, tab // 8), cells=20, cell_seconds=1.0) for tab in range(20)]
    Simulation(1, [*many, *few]).run(until=300)
    seconds = sum(work.done for work in few)
    assert 300 / 3 <= seconds <= 300 * 2 / 3  # by jobs it would be a quarter


def test_who_has_waited_long_goes_before_newcomers():
    # A job of rank 20 cells x 0.25 s = 5 s: after 5 / AGEING = 50 s no newcomer goes before it.
    patient = Work(visitor=visitor(0), cells=20, cell_seconds=STEP)
    newcomers = [
        Work(visitor=visitor(1 + number), cells=1, cell_seconds=1.0, at=float(number)) for number in range(200)
    ]
    Simulation(1, [*newcomers, patient]).run()
    assert CELL_SECONDS * 20 / AGEING == 50
    assert patient.started <= 52


def test_short_question_goes_first():
    queue = FairQueue(1, limit=10)
    for number, cells in enumerate((40, 40, 1)):
        queue.put(number, visitor(number), cells, 0.0)
    assert queue.turns(0.0).start == (2,)
    assert queue.ahead(0.0) == {0: 0, 1: 1}


def test_what_a_visitor_has_used_is_forgotten_in_time():
    def first(pause: float) -> tuple[int, ...]:
        queue = FairQueue(1, limit=10)
        queue.put(0, visitor(0), 1, 0.0)
        queue.turns(0.0)
        queue.remove(0, 100.0)
        queue.put(1, visitor(0), 1, 100.0 + pause)
        queue.put(2, visitor(1), 40, 100.0 + pause)
        return queue.turns(100.0 + pause).start

    assert first(0.0) == (2,)
    assert first(3600.0) == (1,)


def test_job_that_nobody_wants_keeps_its_place_until_it_has_ended():
    queue = FairQueue(1, limit=2)
    queue.put(0, visitor(0), 1, 0.0)
    assert queue.turns(0.0).start == (0,)
    queue.give_up(0)
    queue.put(1, visitor(0), 1, 1.0)
    assert queue.turns(1.0).start == ()
    queue.remove(0, 2.0)
    assert queue.turns(2.0).start == (1,)


def test_one_visitor_cannot_fill_the_queue():
    session = [visitor(0)] * SESSION_JOBS
    with pytest.raises(
        JobError, match=r"too many jobs: 8 of this session are running or waiting; wait for one of them"
    ):
        check_room(session, visitor(0), limit=100)
    check_room(session, visitor(0, session=1), limit=100)
    address = [visitor(0, session) for session in range(50)]
    with pytest.raises(JobError, match=r"too many jobs: 50 from your address are running or waiting"):
        check_room(address, visitor(0, session=99), limit=100)
    check_room(address, visitor(1), limit=100)
    with pytest.raises(JobError, match=r"too many jobs: 100 are running or waiting; try again in a minute"):
        check_room([visitor(number) for number in range(100)], visitor(101), limit=100)


def test_the_machines_own_may_fill_the_queue():
    check_room([Visitor()] * 99, Visitor(), limit=100)
    check_room([Visitor(session=str(number)) for number in range(99)], Visitor(session="99"), limit=100)

"""Turns in drawing pages: how many are drawn at once, and that nobody waits for one who waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from sizer.processes.outcome import Outcome
from sizer.ui import compare, service, turns
from tests.ui.clients import ScriptedJob

LONG_SECONDS = 60.0


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_turns", threading.Semaphore(1))
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", LONG_SECONDS)


def drawn(work: Callable[[], object]) -> object:
    with turns.drawing():
        return work()


def test_no_more_than_so_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns, "_turns", threading.Semaphore(turns.AT_ONCE))
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", LONG_SECONDS)
    lock, drawing, most = threading.Lock(), 0, 0
    full = threading.Barrier(turns.AT_ONCE)

    def draw() -> None:
        nonlocal drawing, most
        with lock:
            drawing += 1
            most = max(most, drawing)
        full.wait(LONG_SECONDS)  # all turns are taken before one is given back
        with lock:
            drawing -= 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: drawn(draw), range(4 * turns.AT_ONCE)))
    assert most == turns.AT_ONCE


def test_who_waits_for_a_job_lets_others_draw(one_at_a_time: None):
    job = Outcome("working")
    begun = threading.Event()

    def wait() -> object:
        begun.set()
        return turns.result_of(job, LONG_SECONDS)

    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(drawn, wait)
        assert begun.wait(LONG_SECONDS)
        assert threads.submit(drawn, lambda: "drawn").result(LONG_SECONDS) == "drawn"
        job.finish("answer")
        assert waiting.result(LONG_SECONDS) == "answer"
    assert turns._turns.acquire(blocking=False)


@pytest.mark.parametrize(
    "wait",
    [
        lambda job: service._follow(service.Answer(query="asked", job=job)),
        lambda job: compare._wait({"asked": service.Answer(query="asked", job=job)}, 1),
    ],
    ids=["estimate", "compare"],
)
def test_a_page_that_waits_for_its_answer_lets_others_draw(one_at_a_time: None, wait: Callable[[ScriptedJob], object]):
    drawn_meanwhile = []

    class Job(ScriptedJob):
        def waited(self, timeout: float, *ready: Callable[[], bool]) -> bool:
            with ThreadPoolExecutor(1) as threads:
                drawn_meanwhile.append(threads.submit(drawn, lambda: True).result(5))
            return super().waited(timeout, *ready)

    with turns.drawing():
        wait(Job(dict, ["working", "working"]))
    assert drawn_meanwhile == [True] * 3
    assert turns._turns.acquire(blocking=False)


def test_a_page_that_waits_for_first_figures_lets_others_draw(one_at_a_time: None):
    class Job(ScriptedJob):
        def waited(self, timeout: float, *ready: Callable[[], bool]) -> bool:
            with ThreadPoolExecutor(1) as threads:
                return bool(threads.submit(drawn, lambda: True).result(5))

    with turns.drawing():
        assert turns.waited(Job(dict), 1.0, lambda: False)
        assert not turns._turns.acquire(blocking=False), "it draws on"
    assert turns._turns.acquire(blocking=False)


def test_a_turn_is_given_back_by_who_fails(one_at_a_time: None):
    with pytest.raises(ValueError, match="mine"), turns.drawing():
        raise ValueError("mine")
    assert drawn(lambda: "drawn") == "drawn"


def test_who_has_waited_too_long_draws_all_the_same(one_at_a_time: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", 0.01)
    with ThreadPoolExecutor(1) as threads, turns.drawing():
        assert threads.submit(drawn, lambda: "drawn").result(LONG_SECONDS) == "drawn"
    assert turns._turns.acquire(blocking=False)
    assert not turns._turns.acquire(blocking=False)  # what was drawn without a turn gave none back


def test_outside_of_a_page_a_job_is_waited_for_as_ever():
    job = Outcome("working")
    job.finish(7)
    assert turns.result_of(job) == 7

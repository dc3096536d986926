"""The replay against PyTorch's own caching allocator, event by event, at random."""

from __future__ import annotations

import json
import random
from array import array

import pytest

from sizer.memory.allocator import replay_events
from sizer.memory.tape import EMPTY_CACHE, Tape

MIB = 2**20
EVENTS = 1500


def _events(seed: int, largest: int) -> list:
    """Allocations from 1 byte to `largest`, half of them below 1 MiB, releases of random blocks, some emptied caches."""
    chance = random.Random(seed)
    events: list = []
    alive: list[int] = []
    count = 0
    while len(events) < EVENTS:
        if alive and chance.random() < 0.47:
            events.append([alive.pop(chance.randrange(len(alive)))])
            continue
        if chance.random() < 0.02:
            events.append(None)
            continue
        exponent = chance.uniform(0, 20) if chance.random() < 0.5 else chance.uniform(20, largest.bit_length() - 1)
        events.append(max(1, int(2**exponent)))
        alive.append(count)
        count += 1
    return events


def _tape(events: list) -> Tape:
    sizes = [event or 0 for event in events if not isinstance(event, list)]
    places = [number for number, event in enumerate(e for e in events if not isinstance(e, list)) if event is not None]
    numbers = iter(range(len(sizes)))
    zeros = array("l", [0] * len(sizes))
    return Tape(
        batch=1,
        order=array("q", [~places[event[0]] if isinstance(event, list) else next(numbers) for event in events]),
        sizes=array("q", sizes),
        categories=bytes(len(sizes)),
        ops=array("l", [int(not size) for size in sizes]),
        modules=zeros,
        op_names=("op", EMPTY_CACHE),
        module_names=("",),
        marks=((len(events), "forward"),),
    )


def _levels(tape: Tape, taken: array, reserved: array, end: int) -> list[tuple[int, int, int]]:
    """Allocated, reserved and requested bytes after every event."""
    levels, allocated, requested = [], 0, 0
    for position, event in enumerate(tape.order[:end]):
        block, sign = (event, 1) if event >= 0 else (~event, -1)
        allocated += sign * taken[block]
        requested += sign * tape.sizes[block]
        levels.append((allocated, reserved[position], requested))
    return levels


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))])
@pytest.mark.parametrize("expandable", [False, True])
def test_every_counter_after_every_event_is_pytorchs_own(run_on_null, seed, expandable):
    events = _events(seed, largest=192 * MIB)
    option = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"}
    truth = run_on_null(
        "tests.null_driver.allocations", json.dumps(events), gpu="h100-80gb", management=expandable, **option
    )
    assert truth["failed_at"] is None
    tape = _tape(events)
    placement = replay_events(tape, "cuda", None, expandable)
    assert _levels(tape, placement.taken, placement.reserved, EVENTS) == [tuple(row) for row in truth["rows"]]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))])
def test_where_memory_runs_out_and_how_often_the_cache_was_given_back(run_on_null, seed):
    # 1 GiB for blocks up to 192 MiB: cached segments have to go before it fails
    events = _events(seed, largest=192 * MIB)
    truth = run_on_null("tests.null_driver.allocations", json.dumps(events), gpu="h100-80gb", total_bytes=1024 * MIB)
    tape = _tape(events)
    placement = replay_events(tape, "cuda", 1024 * MIB)
    assert placement.failed_at == truth["failed_at"]
    assert placement.retries == truth["retries"] > 0
    end = len(events) if placement.failed_at is None else placement.failed_at
    assert _levels(tape, placement.taken, placement.reserved, end) == [tuple(row) for row in truth["rows"]]

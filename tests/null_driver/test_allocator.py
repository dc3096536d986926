"""The replay against PyTorch's own caching allocator, event by event, at random."""

from __future__ import annotations

import json
import random
from array import array

import pytest

from sizer.allocator.allocator import replay_events
from sizer.allocator.replay import Replay
from sizer.tape.tape import EMPTY_CACHE, Tape, streams_behind
from tests.null_driver.allocations import STREAMS

MIB = 2**20
EVENTS = 1500
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))]


def _events(seed: int, largest: int, *, streams: int = 1) -> list:
    """Allocations from 1 byte to `largest`, half of them below 1 MiB, releases of random blocks, some emptied caches; on several
    streams, each a run of events, some blocks are used by another one, too."""
    chance = random.Random(seed)
    events: list = []
    alive: list[int] = []
    count = stream = 0
    while len(events) < EVENTS:
        if streams > 1 and chance.random() < 0.2:
            stream = chance.randrange(streams)
        if streams > 1 and alive and chance.random() < 0.1:
            events.append({"block": chance.choice(alive), "stream": chance.randrange(streams)})
            continue
        if alive and chance.random() < 0.47:
            events.append({"release": alive.pop(chance.randrange(len(alive)))})
            continue
        if chance.random() < 0.02:
            events.append(None)
            continue
        exponent = chance.uniform(0, 20) if chance.random() < 0.5 else chance.uniform(20, largest.bit_length() - 1)
        size = max(1, int(2**exponent))
        events.append(size if streams == 1 else [size, stream])
        alive.append(count)
        count += 1
    return events


def _tape(events: list) -> Tape:
    """The tape of events; that another stream uses a block is no event of it, and has none of the positions."""
    order, sizes, streams, empty, places, awaited = array("q"), array("q"), bytearray(), [], [], set()
    for event in events:
        if isinstance(event, dict) and "release" in event:
            order.append(~places[event["release"]])
        elif isinstance(event, dict):
            if event["stream"] != streams[places[event["block"]]]:
                awaited.add(places[event["block"]])
        else:
            if event is not None:
                places.append(len(sizes))
            size, stream = event if isinstance(event, list) else (event or 0, 0)
            order.append(len(sizes))
            sizes.append(size)
            streams.append(stream)
            empty.append(int(event is None))
    return Tape(
        batch=1,
        order=order,
        sizes=sizes,
        categories=bytes(len(sizes)),
        ops=array("l", empty),
        modules=array("l", [0] * len(sizes)),
        op_names=("op", EMPTY_CACHE),
        module_names=("",),
        marks=((len(order), "forward"),),
        streams=bytes(streams) if any(streams) else b"",
        awaited=frozenset(awaited),
    ).validate()


def _levels(tape: Tape, taken: array, reserved: array, end: int) -> list[tuple[int, int, int]]:
    """Allocated, reserved and requested bytes after every event."""
    levels, allocated, requested = [], 0, 0
    for position, event in enumerate(tape.order[:end]):
        block, sign = (event, 1) if event >= 0 else (~event, -1)
        allocated += sign * taken[block]
        requested += sign * tape.sizes[block]
        levels.append((allocated, reserved[position], requested))
    return levels


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("expandable", [False, True])
def test_every_counter_after_every_event_is_pytorchs_own(run_on_null, seed, expandable):
    events = _events(seed, largest=192 * MIB)
    option = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"}
    truth = run_on_null(
        "tests.null_driver.allocations", json.dumps(events), gpu="h100-80gb", **option
    )
    assert truth["failed_at"] is None
    tape = _tape(events)
    placement = replay_events(tape, "cuda", None, expandable)
    assert _levels(tape, placement.block_bytes.tolist(), placement.reserved.tolist(), EVENTS) == [
        tuple(row) for row in truth["rows"]
    ]


def _rows(events: list, truth: dict) -> list[tuple[int, ...]]:
    """Allocated and reserved bytes by the device's allocator after each event of the tape.

    Requested bytes are no figure here: PyTorch counts those of a block that waits until it is asked for the next one (free_block).
    """
    uses = [isinstance(event, dict) and "block" in event for event in events[: len(truth["rows"])]]
    return [tuple(row[:2]) for row, use in zip(truth["rows"], uses, strict=True) if not use]


def _placed(tape: Tape, placement: Replay) -> list[tuple[int, ...]]:
    """The same by a replay."""
    end = len(tape.order) if placement.failed_at is None else placement.failed_at
    return [level[:2] for level in _levels(tape, placement.block_bytes.tolist(), placement.reserved.tolist(), end)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("expandable", [False, True])
def test_streams_have_pools_of_their_own(run_on_null, seed, expandable):
    events = _events(seed, largest=192 * MIB, streams=STREAMS)
    option = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"}
    truth = run_on_null(
        "tests.null_driver.allocations", json.dumps(events), gpu="h100-80gb", **option
    )
    tape = _tape(events)
    assert len(set(tape.streams)) == STREAMS and tape.awaited
    assert _placed(tape, replay_events(tape, "cuda", None, expandable)) == _rows(events, truth)


@pytest.mark.parametrize("seed", SEEDS)
def test_where_memory_of_several_streams_runs_out(run_on_null, seed):
    events = _events(seed, largest=192 * MIB, streams=STREAMS)
    truth = run_on_null("tests.null_driver.allocations", json.dumps(events), gpu="h100-80gb", total_bytes=1024 * MIB)
    tape = _tape(events)
    placement = replay_events(tape, "cuda", 1024 * MIB)
    assert placement.retries == truth["retries"] > 0
    assert _placed(tape, placement) == _rows(events, truth)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_most_that_streams_that_are_behind_reserve(run_on_null, seed):
    events = _events(seed, largest=192 * MIB, streams=STREAMS)
    truth = run_on_null("tests.null_driver.allocations", json.dumps(events), gpu="h100-80gb", NULL_EVENTS_PENDING="1")
    tape = _tape(events)
    most = max(reserved for _, reserved in _rows(events, truth))
    assert max(replay_events(streams_behind(tape), "cuda").reserved) == most
    assert max(replay_events(tape, "cuda").reserved) < most


@pytest.mark.parametrize("seed", SEEDS)
def test_where_memory_runs_out_and_how_often_the_cache_was_given_back(run_on_null, seed):
    # 1 GiB for blocks up to 192 MiB: cached segments have to go before it fails
    events = _events(seed, largest=192 * MIB)
    truth = run_on_null("tests.null_driver.allocations", json.dumps(events), gpu="h100-80gb", total_bytes=1024 * MIB)
    tape = _tape(events)
    placement = replay_events(tape, "cuda", 1024 * MIB)
    assert placement.failed_at == truth["failed_at"]
    assert placement.retries == truth["retries"] > 0
    end = len(events) if placement.failed_at is None else placement.failed_at
    assert _levels(tape, placement.block_bytes.tolist(), placement.reserved.tolist(), end) == [
        tuple(row) for row in truth["rows"]
    ]

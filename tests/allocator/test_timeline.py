"""Timelines: phases, the peak and who made it, the curve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.allocator.allocator import replay, replay_events
from sizer.allocator.timeline import CURVE_POINTS, PHASE_POINTS, live_by_category, running_bytes
from sizer.tape.tape import CATEGORIES
from tests.tape.tapes import make_tape, random_tape

STEP = [
    ("weight", 1000, "parameter"),  # load ends after 1
    ("input", 100, "input"),
    ("relu", 700),
    ("loss", 4),  # forward ends after 4
    ("grad", 1000, "gradient"),
    "-relu",
    "-loss",  # backward ends after 7
    ("state", 2000, "optimizer state"),
    ("scratch", 500, "temporary"),
    "-scratch",  # optimizer ends after 10
]
MARKS = [(1, "load"), (4, "forward"), (7, "backward"), (10, "optimizer")]


def test_phases_on_the_cpu_are_plain_sums():
    timeline = replay(make_tape(STEP, marks=MARKS), backend="cpu")
    rows = [(use.phase, use.allocated_bytes, use.peak_allocated_bytes, use.reserved_bytes) for use in timeline.phases]
    assert rows == [
        ("load", 1000, 1000, 1000),
        ("forward", 1804, 1804, 1804),  # 1000 + 100 + 700 + 4
        ("backward", 2100, 2804, 2100),  # peak with the gradient: 1804 + 1000; then - 704
        ("optimizer", 4100, 4600, 4100),  # 2100 + 2000, + 500 for a moment
    ]
    assert (timeline.peak_allocated_bytes, timeline.peak_reserved_bytes, timeline.peak_requested_bytes) == (4600,) * 3
    assert (timeline.peak_phase, timeline.peak_op, timeline.peak_module) == ("optimizer", "aten.scratch", "m.scratch")


def test_the_peak_is_split_by_category_after_rounding():
    # each block rounds to multiples of 512: 1024 weight, 512 input, 1024 gradient, 2048 state, 512 scratch
    timeline = replay(make_tape(STEP, marks=MARKS), backend="cuda")
    split = {name: size for name, size in timeline.at_peak.items() if size}
    assert split == {
        "parameter": 1024,
        "input": 512,
        "gradient": 1024,
        "optimizer state": 2048,
        "temporary": 512,
    }
    assert timeline.peak_allocated_bytes == 5120
    assert timeline.reserved_at_peak_bytes == 2 * 2**20


def test_a_phase_begins_at_the_level_of_the_one_before():
    # torch resets the peak to what is allocated: a phase that only frees has its start as its peak
    tape = make_tape([("a", 100), "-a"], marks=[(1, "forward"), (2, "backward")])
    assert replay(tape, backend="cpu").phases[1].peak_allocated_bytes == 100


def test_what_follows_the_last_mark_belongs_to_its_phase():
    timeline = replay(make_tape([("a", 100), ("b", 50)], marks=[(1, "forward")]), backend="cpu")
    assert (timeline.peak_allocated_bytes, timeline.peak_phase) == (150, "forward")
    assert timeline.phases[0].allocated_bytes == 100


def test_a_phase_without_memory_ends_where_the_work_stopped():
    timeline = replay(make_tape(STEP, marks=MARKS), backend="cpu", capacity_bytes=2500)
    assert [use.phase for use in timeline.phases] == ["load", "forward", "backward"]
    assert timeline.phases[-1].allocated_bytes == 1804
    failed = timeline.out_of_memory
    assert (failed.op, failed.phase, failed.requested_bytes, failed.allocated_bytes) == (
        "aten.grad",
        "backward",
        1000,
        1804,
    )


def test_live_tensors_by_phase_are_not_rounded():
    live = live_by_category(make_tape(STEP, marks=MARKS))
    assert live["forward"]["activation"] == 704
    assert live["backward"] == {**dict.fromkeys(CATEGORIES, 0), "parameter": 1000, "input": 100, "gradient": 1000}
    assert live["optimizer"]["optimizer state"] == 2000


def test_an_empty_tape_is_all_zero():
    timeline = replay(make_tape([], marks=[(0, "load")]), backend="cuda")
    assert timeline.peak_allocated_bytes == timeline.peak_reserved_bytes == 0
    assert timeline.phases[0].allocated_bytes == 0


@pytest.mark.parametrize("backend", ["cuda", "mps", "cpu"])
@pytest.mark.parametrize("seed", range(4))
def test_invariants(seed, backend):
    tape = random_tape(seed, events=3000)
    placement = replay_events(tape, backend)
    timeline = replay(tape, backend=backend)
    assert sum(timeline.at_peak.values()) == timeline.peak_allocated_bytes
    assert timeline.peak_requested_bytes <= timeline.peak_allocated_bytes <= timeline.peak_reserved_bytes
    assert timeline.peak_allocated_bytes == max(use.peak_allocated_bytes for use in timeline.phases)
    live = 0
    for event, reserved in zip(tape.order, placement.reserved, strict=True):
        live += placement.block_bytes[event] if event >= 0 else -placement.block_bytes[~event]
        assert 0 <= live <= reserved
    for block, taken in enumerate(placement.block_bytes):
        assert (taken == 0) if tape.sizes[block] == 0 else (taken >= tape.sizes[block])


@pytest.mark.parametrize("events", [5, 159, 160, 161, 5000])
def test_the_curve_is_short_and_keeps_the_peak_and_the_phase_ends(events):
    tape = random_tape(1, events=events)
    timeline = replay(tape, backend="cuda")
    allocated = running_bytes(tape.order, replay_events(tape, "cuda").block_bytes)
    totals = {point.position: sum(point.by_category) for point in timeline.curve}
    assert all(total == allocated[position] for position, total in totals.items())
    assert len(timeline.curve) <= CURVE_POINTS
    assert list(totals) == sorted(totals)
    assert max(totals.values()) == timeline.peak_allocated_bytes
    for (end, _), use in zip(tape.marks, timeline.phases, strict=True):
        assert totals[end] == use.allocated_bytes


def test_a_short_phase_of_long_work_has_points_of_its_own():
    tape = random_tape(1, events=5000)
    timeline = replay(replace(tape, marks=((20, "load"), (60, "prefill"), (len(tape.order), "decode"))), backend="cuda")
    points = dict(timeline.curve.phases)
    assert min(points["load"], points["prefill"]) > PHASE_POINTS // 2 and points["decode"] > 100
    assert len(timeline.curve) <= CURVE_POINTS

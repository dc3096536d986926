"""Memory without bound: replayed once, shared by equal tapes, packed and read again, and the same as without it."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

from sizer.allocator.allocator import replay_events
from sizer.catalogue.gpus import GPUS
from sizer.report import replays as replays_module
from sizer.report.bounds import with_models_twice
from sizer.report.fit import fits_in, surely_runs
from sizer.report.replays import Replays, find_peak_reserved, find_unbounded, replay_unbounded
from sizer.tape.loop_choices import keep_gradients
from sizer.tape.tape import Tape
from tests.tape.tapes import make_tape, random_tape

MIB = 2**20

# A step whose gradient of 40 MiB could be kept over the next forward pass of 30 MiB, around a workspace of 8 MiB that is a model.
STEP = make_tape(
    [
        ("weight", 40 * MIB, "parameter"),
        ("relu", 30 * MIB),
        ("_cudnn_rnn", 12 * MIB, "workspace"),
        "-_cudnn_rnn",
        ("grad", 40 * MIB, "gradient"),
        "-relu",
        "-grad",
        ("relu2", 30 * MIB),
        "-relu2",
    ],
    marks=[(1, "load"), (4, "forward"), (6, "backward"), (6, "optimizer"), (9, "step2")],
)
STEP = replace(STEP, second_forward=8)


@pytest.fixture
def replayed(monkeypatch) -> list[Tape]:
    """The tapes that are replayed without bound, in order."""
    tapes = []

    def replaying(tape, *arguments, **keywords):
        tapes.append(tape)
        return replay_unbounded(tape, *arguments, **keywords)

    monkeypatch.setattr(replays_module, "replay_unbounded", replaying)
    return tapes


def test_each_peak_is_that_of_its_own_replay():
    found = replay_unbounded(STEP, "cuda")
    # 40 + 30 + 12, the gradient takes a segment of its own of 40; then all is there again
    assert found.timeline.peak_reserved_bytes == 122 * MIB
    assert found.few_bytes == 110 * MIB
    assert found.many_bytes == 134 * MIB
    assert found.kept_bytes == 122 * MIB  # the first activation's 30 serve again
    assert found.large_bytes == 134 * MIB
    assert found.engines_limit_bytes == 0


def test_a_peak_alone_is_that_of_the_timeline_and_is_packed():
    replays = Replays()
    kept = keep_gradients(STEP)
    for tape in (STEP, kept):
        for backend in ("cuda", "mps", "cpu"):
            found = find_peak_reserved(tape, backend, replays=replays)
            assert found == replay_unbounded(tape, backend).timeline.peak_reserved_bytes
    assert find_peak_reserved(STEP, "cuda", replays=Replays(replays.pack())) == 122 * MIB


def test_equal_tapes_are_replayed_once(replayed):
    replays = Replays()
    first = find_unbounded(STEP, "cuda", replays=replays)
    assert find_unbounded(replace(STEP, batch=7), "cuda", replays=replays) is first
    assert len(replayed) == 1
    for other in (replace(STEP, sizes=STEP.sizes[:-1] + STEP.sizes[:1]), replace(STEP, second_forward=None)):
        assert find_unbounded(other, "cuda", replays=replays) is not first
    assert find_unbounded(STEP, "mps", replays=replays) is not first
    assert find_unbounded(STEP, "cuda", expandable_segments=True, replays=replays) is not first
    assert len(replayed) == 5


def test_what_was_packed_is_not_replayed_again(replayed):
    replays = Replays()
    first = find_unbounded(STEP, "cuda", replays=replays)
    packed = replays.pack()
    again = Replays(packed)
    assert find_unbounded(STEP, "cuda", replays=again) == first
    assert len(replayed) == 1
    assert replays.pack() is None
    assert again.pack() is None
    find_unbounded(STEP, "cuda", expandable_segments=True, replays=again)
    assert len(Replays(again.pack())._texts) == 2


def test_what_was_asked_for_last_is_packed(monkeypatch, replayed):
    def ask(replays: Replays, *sizes: int) -> bytes | None:
        for size in sizes:
            find_unbounded(make_tape([("a", size * MIB)]), "cuda", replays=replays)
        return replays.pack()

    three = Replays(ask(Replays(), 1, 2, 3))
    room = 3 * max(map(len, three._texts.values()))
    monkeypatch.setattr(replays_module, "KEPT_BYTES", room)
    last = ask(three, 1, 4)  # 2 has to go
    assert len(replayed) == 4
    ask(Replays(last), 3, 1, 4)
    assert len(replayed) == 4
    ask(Replays(last), 2)
    assert len(replayed) == 5


@pytest.mark.parametrize(
    "packed", [b"", b"no zlib", b"x\x9c\x03\x00\x00\x00\x00\x01", zlib.compress(b"[1]"), zlib.compress(b'{"a": 1}')]
)
def test_bytes_of_another_kind_are_replayed_again(packed, replayed):
    assert find_unbounded(STEP, "cuda", replays=Replays(packed)) == replay_unbounded(STEP, "cuda")
    assert len(replayed) == 1


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
@pytest.mark.parametrize("seed", range(4))
def test_a_verdict_is_the_same_with_it(seed, expandable):
    tape = random_tape(seed)
    known = replay_unbounded(tape, "cuda", expandable_segments=expandable)
    for share in (1.5, 1, 0.97, 0.9, 0.8, 0.5):
        total = int(share * known.large_bytes)
        gpu = replace(GPUS["t4"], total_bytes=total, context_low_bytes=0, context_bytes=0, context_high_bytes=0)
        large = replay_events(keep_gradients(with_models_twice(tape)), "cuda", total, expandable)
        assert surely_runs(tape, gpu, expandable, known.large_bytes) == (large.failed_at is None)
        assert fits_in(tape, gpu, expandable_segments=expandable, unbounded=known) == fits_in(
            tape, gpu, expandable_segments=expandable
        )

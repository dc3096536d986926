"""Does it fit, how much would nvidia-smi show, and which batch is the largest."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from sizer.allocator.allocator import replay_events
from sizer.catalogue.gpus import GPUS, Gpu
from sizer.report.estimate import Estimate, describe_range, estimate_tape, has_range
from sizer.report.fit import fit, fits_in
from sizer.report.largest_batch import LARGEST_BATCH, find_largest_batch, largest_batch, likely_largest
from sizer.report.replays import Replays
from sizer.tape.affine import fit_affine
from sizer.tape.family import TapeFamily
from sizer.tape.tape import Tape
from tests.tape.tapes import make_tape

MIB = 2**20


def card(total_mib: int, *, low: int = 10, point: int = 20, high: int = 40, backend: str = "cuda") -> Gpu:
    return Gpu(
        key="card", name="Card", total_bytes=total_mib * MIB, backend=backend, capability=(8, 0) if backend == "cuda" else None,
        context_low_bytes=low * MIB, context_bytes=point * MIB, context_high_bytes=high * MIB, source="made up",
    )  # fmt: skip


def work(batch: int = 1, *, workspace: int = 64):
    """Weights of 100 MiB, activations of 50 MiB a sample, and around them a workspace that is a model."""
    return make_tape(
        [
            ("weight", 100 * MIB, "parameter"),
            ("relu", 50 * MIB * batch),
            ("_cudnn_rnn", workspace * MIB, "workspace"),
            "-_cudnn_rnn",
            "-relu",
        ],
        batch=batch,
        marks=[(1, "load"), (5, "forward")],
    )


def heavier(batch: int) -> Tape:
    """The same with activations of 80 MiB a sample."""
    tape = work(batch)
    return replace(
        tape, sizes=array("q", [size // 50 * 80 if size == 50 * MIB * batch else size for size in tape.sizes])
    )


def family(first: Tape, second: Tape) -> TapeFamily:
    return TapeFamily(lines=((1, fit_affine(first, second)),))


FAMILY = family(work(2), work(3))


def test_the_process_is_reserved_memory_and_context():
    result = fit(work(), card(1000))
    # reserved 100 + 50 + 64; low: without the 64, context 10; high: the 64 once more, context 40
    assert result.process_bytes == (214 + 20) * MIB
    assert result.process_low_bytes == (150 + 10) * MIB
    assert result.process_high_bytes == (214 + 64 + 40) * MIB
    assert result.fits is True


@pytest.mark.parametrize(
    ("total", "fits"),
    [
        (318, True),  # exactly the high end
        (317, "uncertain"),
        (160, "uncertain"),  # exactly the low end
        (159, False),
    ],
)
def test_the_verdict_turns_at_the_ends_of_the_range(total, fits):
    found = fit(work(), card(total))
    assert found.fits == fits
    assert found.verdict == {True: "fits", "uncertain": "may not fit", False: "does not fit"}[fits]
    assert (found.process_high_bytes <= card(total).total_bytes) == (found.verdict == "fits")
    assert fits_in(work(), card(total)) == fits


def test_what_would_fail_is_told_beside_the_roomy_numbers():
    result = fit(work(), card(200))  # 200 - 20 = 180 < 214
    assert result.timeline.out_of_memory.op == "aten._cudnn_rnn"
    assert result.timeline.peak_reserved_bytes == 214 * MIB
    assert result.process_bytes == 234 * MIB


def test_a_workspace_that_pytorch_itself_sizes_does_not_widen_the_range():
    tape = make_tape([("weight", 100 * MIB, "parameter"), ("mm", 64 * MIB, "workspace"), "-mm"])
    result = fit(tape, card(1000))
    # reserved 164; the context alone is uncertain: 10 to 40
    assert (result.process_low_bytes, result.process_high_bytes) == ((164 + 10) * MIB, (164 + 40) * MIB)


def test_work_that_fits_by_giving_cached_memory_back_counts_what_it_holds_then():
    # 300 freed before 310 is asked: 610 where there is room, 310 where there is not
    tape = make_tape([("a", 300 * MIB), "-a", ("b", 310 * MIB)])
    roomy, tight = fit(tape, card(1000)), fit(tape, card(400))
    assert (roomy.process_bytes, roomy.timeline.retries) == (630 * MIB, 0)
    assert (tight.process_bytes, tight.timeline.retries, tight.fits) == (330 * MIB, 1, True)
    # the range is that of a device with room, up to 610 and the largest context of 40: what is past this device is returned
    assert (tight.process_high_bytes, tight.returned_bytes, tight.verdict) == (650 * MIB, 250 * MIB, "tight")
    barely = fit(tape, card(640))
    assert (barely.process_bytes, barely.process_high_bytes, barely.fits) == (630 * MIB, 650 * MIB, True)
    assert (barely.returned_bytes, barely.verdict, roomy.verdict) == (10 * MIB, "tight", "fits")
    assert tight.process_low_bytes <= tight.process_bytes <= tight.process_high_bytes


def test_the_cpu_holds_the_tensors_alone():
    result = fit(work(), card(1000, low=0, point=0, high=0, backend="cpu"))
    assert result.process_bytes == 214 * MIB


def test_the_largest_batch_is_exact():
    # surely: 100 + 50 * batch + 64 + 64 + 40 <= 1018 -> batch 15; may: 100 + 50 * batch + 10 <= 1018 -> batch 18
    found = largest_batch(FAMILY, card(1018), dtype="float32")
    assert (found.batch, found.possible_batch, found.reason, str(found.interval)) == (15, 18, "", "15 to 18")
    assert fits_in(FAMILY.evaluate(15), card(1018)) is True
    assert fits_in(FAMILY.evaluate(16), card(1018)) == "uncertain"
    assert fits_in(FAMILY.evaluate(19), card(1018)) is False


@pytest.mark.parametrize("total", [319, 1000, 16_000, 143_156])
def test_the_search_agrees_with_trying_every_batch_near_it(total):
    found = largest_batch(FAMILY, card(total), dtype="float32")
    verdicts = {
        batch: fits_in(FAMILY.evaluate(batch), card(total)) for batch in range(max(1, found.batch - 3), found.batch + 4)
    }
    assert found.batch == max(batch for batch, fits in verdicts.items() if fits is True)


@pytest.mark.parametrize("known", [(), (1,), (956, 957), (64, 128), (800, 1200, 2000)])
def test_the_answer_does_not_depend_on_what_was_asked(known):
    # surely: 100 + 50 * batch + 64 + 64 + 40 <= 48,118 -> batch 957; may: 100 + 50 * batch + 10 <= 48,118 -> 960
    verdicts = {batch: fits_in(FAMILY.evaluate(batch), card(48_118)) for batch in known}
    found = largest_batch(FAMILY, card(48_118), dtype="float32", known=verdicts)
    assert (found.batch, found.possible_batch) == (957, 960)


def test_each_line_answers_for_its_batches():
    # up to 9 samples 50 MiB each, from 10 on 80: 100 + 80 * 11 + 128 + 40 = 1148 fit, 12 do not
    more = family(heavier(10), heavier(11)).lines[0][1]
    both = TapeFamily(lines=(*FAMILY.lines, (10, more)))
    assert [sum(both.evaluate(batch).sizes) // MIB for batch in (9, 10)] == [164 + 9 * 50, 164 + 10 * 80]
    assert largest_batch(both, card(1150), dtype="").batch == 11
    # where not even 10 fit, the line before it holds: 100 + 50 * 9 + 128 + 40 = 718
    assert largest_batch(both, card(900), dtype="").batch == 9


def test_no_batch_below_the_smallest_that_the_model_takes():
    # 1 sample: 100 + 50 + 128 + 40 = 318, 2 samples 368; perhaps 100 + 50 + 10 = 160 and 210
    two = replace(FAMILY, smallest=2)
    assert [largest_batch(two, card(total), dtype="").batch for total in (367, 368)] == [None, 2]
    assert largest_batch(two, card(200), dtype="").reason == "not even a batch of 2 fits the Card"


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """The batches that are replayed, in order."""
    batches = []

    def asking(tape, *arguments):
        batches.append(tape.batch)
        return replay_events(tape, *arguments)

    for module in ("fit", "replays"):
        monkeypatch.setattr(f"sizer.report.{module}.replay_events", asking)
    return batches


def test_known_verdicts_are_not_asked_again(asked):
    known = {batch: fits_in(FAMILY.evaluate(batch), card(1018)) for batch in range(1, 30)}
    asked.clear()
    found = largest_batch(FAMILY, card(1018), dtype="float32", known=known)
    assert (found.batch, found.possible_batch) == (15, 18)
    assert asked == []


def test_few_replays_find_the_answer(asked):
    # from the bound (1018 - 40 - 100 - 64) // 50 = 16 on, both sides of 15 and of 18
    largest_batch(FAMILY, card(1018), dtype="float32")
    assert len(asked) <= 6


def test_few_replays_find_a_large_batch(asked):
    small = family(
        make_tape([("weight", MIB, "parameter"), ("relu", 2 * 700)], batch=2),
        make_tape([("weight", MIB, "parameter"), ("relu", 3 * 700)], batch=3),
    )
    found = largest_batch(small, card(500), dtype="float32")
    # 2 MiB segment + round up(700 * batch, 2 MiB) + 40 <= 500 MiB: 458 MiB // 700 = 686,063
    assert found.batch == 458 * MIB // 700
    assert len(asked) < 50  # two searches, each some ten steps to pass it and as many to bisect


def test_the_same_search_is_done_once(asked):
    replays = Replays()

    def found(family: TapeFamily = FAMILY, total: int = 1018, **keywords) -> tuple[int | None, int | None]:
        one = find_largest_batch(family, card(total), **({"dtype": "float32", "replays": replays} | keywords))
        return one.batch, one.possible_batch

    assert found() == (15, 18)
    asked.clear()
    assert found() == found(replays=Replays(replays.pack())) == (15, 18)
    assert asked == []
    # 100 + 80 * batch + 128 + 40 <= 1018 -> 9; + 10 alone -> 11; one MiB less changes nothing, but is another device
    assert found(family(heavier(10), heavier(11))) == (9, 11)
    for other in ({"total": 1017}, {"oracle_name": "another"}, {"dtype": "bfloat16"}, {"expandable_segments": True}):
        asked.clear()
        found(**other)
        assert asked, other


def test_nothing_fits():
    found = largest_batch(FAMILY, card(100), dtype="float32")
    assert (found.batch, found.possible_batch, found.reason) == (None, None, "not even a batch of 1 fits the Card")


def test_perhaps_a_batch_of_one():
    found = largest_batch(FAMILY, card(161), dtype="float32")
    assert (found.batch, found.possible_batch) == (None, 1)
    assert found.reason == "a batch of 1 may or may not fit the Card"


@pytest.mark.parametrize("total", [100, 319, 1000, 16_000])
def test_what_likely_fits_holds_all_that_does(total):
    batches = (1, 2, 4, 8, 64, 512)
    likely = likely_largest(FAMILY, batches, card(total), None)
    assert list(likely) == sorted(likely, reverse=True)
    fitting = {batch for batch in batches if fits_in(FAMILY.evaluate(batch), card(total)) is True}
    assert fitting.issubset(likely) and len(likely) <= max(1, len(fitting) + 1)


def test_the_search_has_an_end():
    still = family(make_tape([("a", 512)], batch=2), make_tape([("a", 512)], batch=3))
    found = largest_batch(still, GPUS["cpu"], dtype="float32")
    assert (found.batch, found.reason) == (LARGEST_BATCH, f"searched up to {LARGEST_BATCH}")
    assert str(found.interval) == "at least 1,048,576"


def test_batches_traced_one_by_one():
    found = largest_batch(
        TapeFamily(), card(1000), dtype="float16", known={1: True, 8: True, 16: "uncertain", 32: False}
    )
    assert (found.dtype, found.batch, found.possible_batch) == ("float16", 8, 16)
    assert found.reason.endswith("were tested: 1, 8, 16, 32")
    assert str(found.interval) == "8 to 31"
    assert str(largest_batch(TapeFamily(), card(1000), dtype="float16", known={1: False}).interval) == "none"
    nothing = largest_batch(TapeFamily(), card(1000), dtype="float16")
    assert nothing.batch is None and not nothing.interval.is_known


def test_the_range_says_where_it_ends_and_where_there_is_none():
    def row(tape: Tape, gpu: Gpu) -> Estimate:
        return estimate_tape(tape, dtype="float32", gpu=gpu)

    # 610 MiB and a context of up to 40 where there is room, 640 on this device; no context and no range on the CPU
    barely = row(make_tape([("a", 300 * MIB), "-a", ("b", 310 * MIB)]), card(640))
    assert next(iter(describe_range([barely]))).endswith(
        "up to 10.00 MiB of it is cache that the allocator returns to the device"
    )
    without = row(make_tape([("a", MIB)]), card(1000, low=0, point=0, high=0, backend="cpu"))
    roomy = row(work(), card(1000))
    assert "cache" not in next(iter(describe_range([roomy])))
    assert [has_range(one) for one in (barely, roomy, without)] == [True, True, False]
    assert next(iter(describe_range([without]))).endswith("no range is known for this device")

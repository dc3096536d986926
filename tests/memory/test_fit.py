"""Does it fit, how much would nvidia-smi show, and which batch is the largest."""

from __future__ import annotations

import pytest

from sizer.catalogue.gpus import GPUS, Gpu
from sizer.memory.allocator import place
from sizer.memory.fit import LARGEST_BATCH, fit, fits_in, largest_batch, largest_traced_batch
from sizer.memory.tape import fit_affine
from tests.memory.tapes import make_tape

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


AFFINE = fit_affine(work(2), work(3))


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
    assert fit(work(), card(total)).fits == fits
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
    assert tight.process_low_bytes <= tight.process_bytes <= tight.process_high_bytes


def test_the_cpu_holds_the_tensors_alone():
    result = fit(work(), card(1000, low=0, point=0, high=0, backend="cpu"))
    assert result.process_bytes == 214 * MIB


def test_the_largest_batch_is_exact():
    # surely: 100 + 50 * batch + 64 + 64 + 40 <= 1018 -> batch 15; may: 100 + 50 * batch + 10 <= 1018 -> batch 18
    found = largest_batch(AFFINE, card(1018), dtype="float32")
    assert (found.batch, found.possible_batch, found.reason) == (15, 18, "")
    assert fits_in(AFFINE.at(15), card(1018)) is True
    assert fits_in(AFFINE.at(16), card(1018)) == "uncertain"
    assert fits_in(AFFINE.at(19), card(1018)) is False


@pytest.mark.parametrize("total", [319, 1000, 16_000, 143_156])
def test_the_search_agrees_with_trying_every_batch_near_it(total):
    found = largest_batch(AFFINE, card(total), dtype="float32")
    verdicts = {
        batch: fits_in(AFFINE.at(batch), card(total)) for batch in range(max(1, found.batch - 3), found.batch + 4)
    }
    largest = max(batch for batch, fits in verdicts.items() if fits is True)
    assert found.batch in verdicts and verdicts[found.batch] is True
    assert largest - found.batch <= found.batch // 128  # within 1 % above 128, exact below


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """The batches that are replayed, in order."""
    batches = []

    def asking(tape, *arguments):
        batches.append(tape.batch)
        return place(tape, *arguments)

    monkeypatch.setattr("sizer.memory.fit.place", asking)
    return batches


def test_known_verdicts_are_not_asked_again(asked):
    known = {8: True, 15: True, 16: "uncertain", 18: "uncertain", 19: False}
    found = largest_batch(AFFINE, card(1018), dtype="float32", known=known)
    assert (found.batch, found.possible_batch) == (15, 18)
    assert asked == [16]  # one replay for the first guess of where to look


def test_few_replays_find_the_answer(asked):
    # one replay at the bound (1018 - 40 - 100 - 64) // 50 = 16 for the first guess, then both sides of 15 and of 18
    largest_batch(AFFINE, card(1018), dtype="float32")
    assert len(asked) <= 7


def test_few_replays_find_a_large_batch(asked):
    small = fit_affine(
        make_tape([("weight", MIB, "parameter"), ("relu", 2 * 700)], batch=2),
        make_tape([("weight", MIB, "parameter"), ("relu", 3 * 700)], batch=3),
    )
    found = largest_batch(small, card(500), dtype="float32")
    # 2 MiB segment + round up(700 * batch, 2 MiB) + 40 <= 500 MiB: 458 MiB // 700 = 686,063
    assert 0.99 * (458 * MIB // 700) <= found.batch <= 458 * MIB // 700
    assert len(asked) < 35


def test_nothing_fits():
    found = largest_batch(AFFINE, card(100), dtype="float32")
    assert (found.batch, found.possible_batch, found.reason) == (None, None, "not even a batch of 1 fits the Card")


def test_perhaps_a_batch_of_one():
    found = largest_batch(AFFINE, card(161), dtype="float32")
    assert (found.batch, found.possible_batch) == (None, 1)
    assert found.reason == "a batch of 1 may or may not fit the Card"


def test_the_search_has_an_end():
    still = fit_affine(make_tape([("a", 512)], batch=2), make_tape([("a", 512)], batch=3))
    found = largest_batch(still, GPUS["cpu"], dtype="float32")
    assert (found.batch, found.reason) == (LARGEST_BATCH, f"searched up to {LARGEST_BATCH}")


def test_batches_traced_one_by_one():
    found = largest_traced_batch({1: True, 8: True, 16: "uncertain", 32: False}, dtype="float16")
    assert (found.dtype, found.batch, found.possible_batch) == ("float16", 8, 16)
    assert found.reason.endswith("were tried: 1, 8, 16, 32")
    assert largest_traced_batch({}, dtype="float16").batch is None

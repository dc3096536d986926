"""Questions on tapes: numbers on a line, answers on none, and what stands where nobody answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sizer.allocator.allocator import replay_events
from sizer.catalogue.gpus import GPUS
from sizer.report.largest_batch import largest_batch
from sizer.tape.affine import NotAffineError, fit_affine
from sizer.tape.family import TapeFamily
from sizer.tape.size_queries import SizeQuery, SizeQueryKey
from sizer.tape.tape import Tape
from tests.tape.tapes import make_tape

MIB = 2**20


def asking(batch: int, *, steps: int = 2, numbers: tuple[int, ...] | None = None, word: str = "bfloat16") -> Tape:
    """A weight, and in each step an activation of 1 MiB a sample around a workspace, by a model 100 bytes a sample."""
    step = [("relu", MIB * batch), ("conv", 100 * batch, "workspace"), "-conv", "-relu"]
    again = [("relu2", MIB * batch), ("conv2", 100 * batch, "workspace"), "-conv2", "-relu2"]
    marks = [(1, "load"), (5, "forward"), (9, "step2")]
    tape = make_tape(
        [("weight", 4000, "parameter"), *step, *(again if steps == 2 else [])], batch=batch, marks=marks[: steps + 1]
    )
    # the second step repeats operators and modules of the first
    rows = tape.ops[:3] + tape.ops[1:3]
    tape = replace(tape, ops=rows[: len(tape.sizes)], modules=rows[: len(tape.sizes)])
    asked = SizeQuery(kind="square", words=(word,), numbers=numbers or (7, 3 * batch), blocks=(2, 4)[:steps])
    return replace(tape, size_queries=(asked,))


def square(asked: Sequence[SizeQueryKey]) -> list[int | None]:
    assert {(kind, numbers[0]) for kind, _, numbers in asked} == {("square", 7)}
    return [numbers[1] ** 2 for _, _, numbers in asked]


LINE = fit_affine(asking(2), asking(3, steps=1))
FAMILY = TapeFamily(lines=((1, LINE),))


def test_answers_are_on_no_line() -> None:
    # numbers (7, 3 b): at batch 10 the answer is 30 squared; MiB * 10 stays on its line
    tape = FAMILY.evaluate(10, square)
    assert list(tape.sizes) == [4000, 10 * MIB, 900, 10 * MIB, 900]
    assert tape.resolved == {2, 4}
    assert tape.size_queries == (SizeQuery(kind="square", words=("bfloat16",), numbers=(7, 30), blocks=(2, 4)),)


def test_the_model_stands_where_nobody_answers() -> None:
    for tape in (FAMILY.evaluate(10), FAMILY.evaluate(10, lambda asked: [None] * len(asked))):
        assert list(tape.sizes) == [4000, 10 * MIB, 1000, 10 * MIB, 1000]
        assert tape.resolved == frozenset()


def test_a_third_trace_is_checked_by_its_questions() -> None:
    assert LINE.check(asking(5)) is None
    with pytest.raises(
        NotAffineError, match=r"conv in m\.conv.*has the size query \('square', \('bfloat16',\), \(7, 16\)\) at batch 5"
    ):
        LINE.check(asking(5, numbers=(7, 16)))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            asking(4, steps=1, numbers=(7, 9)),
            r"has the size query square .*\(7, 6\) at batch 2 and square .*\(7, 9\) at batch 4",
        ),
        (asking(4, steps=1, numbers=(7, 12, 1)), r"\(7, 12, 1\) at batch 4"),
        (asking(4, steps=1, word="float16"), r"\('float16',\) \(7, 12\) at batch 4"),
        (replace(asking(4, steps=1), size_queries=()), "block 2 has a size query at only one of the batches 2 and 4"),
    ],
)
def test_questions_that_are_not_the_same(other: Tape, message: str) -> None:
    with pytest.raises(NotAffineError, match=message):
        fit_affine(asking(2), other)


def test_the_second_step_asks_what_the_first_does() -> None:
    first = asking(2)
    strange = SizeQuery(kind="square", words=("bfloat16",), numbers=(7, 5), blocks=(4,))
    first = replace(first, size_queries=(replace(first.size_queries[0], blocks=(2,)), strange))
    with pytest.raises(NotAffineError, match=r"conv in m\.conv \(block 4\) has another size query in the second step"):
        fit_affine(first, asking(3, steps=1))


def test_what_the_optimizer_asks_is_the_same_at_every_batch() -> None:
    # the short trace ends before the optimizer, whose blocks are 2 and, in the second step, 4
    def stepping(batch: int, *, short: bool = False) -> Tape:
        step = [("relu", MIB * batch), "-relu", ("norm", 100, "temporary"), "-norm"]
        again = [("relu2", MIB * batch), "-relu2", ("norm2", 100, "temporary"), "-norm2"]
        marks = [(1, "load"), (3, "forward"), (5, "optimizer"), (9, "step2")]
        events = [("weight", 4000, "parameter"), *step, *again]
        tape = make_tape(events[:3] if short else events, batch=batch, marks=marks[: 2 if short else 4])
        rows = tape.ops if short else tape.ops[:3] + tape.ops[1:3]
        asked = SizeQuery(kind="square", words=("float32",), numbers=(7, 6), blocks=(2, 4))
        return replace(tape, ops=rows, modules=rows, size_queries=() if short else (asked,))

    line = fit_affine(stepping(2), stepping(3, short=True))
    assert list(TapeFamily(lines=((1, line),)).evaluate(10, square).sizes) == [4000, 10 * MIB, 36, 10 * MIB, 36]
    assert line.evaluate(10) == fit_affine(stepping(2), stepping(3)).evaluate(10)


def test_words_change_together() -> None:
    def by_word(asked: Sequence[SizeQueryKey]) -> list[int | None]:
        return [{"bfloat16": 512, "float16": 1024}[words[0]] for _, words, _ in asked]

    family = replace(FAMILY, exact=(asking(1),))
    other = family.with_dtype("float16", instead_of="bfloat16")
    sizes = [list(one.evaluate(batch, by_word).sizes)[2] for one in (family, other) for batch in (1, 8)]
    assert sizes == [512, 512, 1024, 1024]
    silent = TapeFamily(
        lines=((1, fit_affine(replace(asking(2), size_queries=()), replace(asking(3), size_queries=()))),)
    )
    assert silent.with_dtype("float16", instead_of="bfloat16") is silent


def test_a_workspace_of_nothing_takes_nothing() -> None:
    tape = FAMILY.evaluate(4, lambda asked: [0] * len(asked))
    # 4000 bytes are 4096 in blocks of 512; 4 MiB beside them
    assert max(replay_events(tape, "cuda").block_bytes) == 4 * MIB
    assert [replay_events(tape, "cuda").block_bytes[block] for block in (0, 2, 4)] == [4096, 0, 0]


def test_the_largest_batch_is_found_by_few_answers() -> None:
    tried: set[int] = set()

    def doubled(asked: Sequence[SizeQueryKey]) -> list[int | None]:
        batches = [numbers[1] // 3 for _, _, numbers in asked]
        tried.update(batches)
        return [batch * MIB + 5 for batch in batches]

    gpu = replace(GPUS["t4"], total_bytes=1000 * MIB, context_low_bytes=0, context_bytes=0, context_high_bytes=0)
    found = largest_batch(FAMILY, gpu, dtype="", oracle=doubled)
    # per sample 1 MiB and as much again while it is worked on; 5 bytes and the weight take 2 MiB each: 2 b + 4 <= 1000
    assert (found.batch, found.possible_batch) == (498, 498)
    # the bound, 999 samples, knows nothing of the answers: ten steps that double and nine halves lead down from it
    assert len(tried) <= 20

"""Questions on tapes: numbers on a line, answers on none, and what stands where nobody answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.catalogue.gpus import GPUS
from sizer.memory.allocator import place
from sizer.memory.fit import fit, largest_batch
from sizer.memory.size_queries import SizeQuery
from sizer.memory.tape import AffineTape, NotAffineError, Tape, fit_affine
from tests.memory.tapes import make_tape

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


def square(kind: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    assert (kind, numbers[0]) == ("square", 7)
    return numbers[1] ** 2


def fitted(answer=square) -> AffineTape:  # type: ignore[no-untyped-def]
    return fit_affine(asking(2), asking(3, steps=1), answer=answer)


def test_answers_are_on_no_line() -> None:
    # numbers (7, 3 b): at batch 10 the answer is 30 squared; MiB * 10 stays on its line
    assert list(fitted().at(10).sizes) == [4000, 10 * MIB, 900, 10 * MIB, 900]
    assert fitted().at(10).resolved == {2, 4}
    assert fitted().at(10).size_queries == (
        SizeQuery(kind="square", words=("bfloat16",), numbers=(7, 30), blocks=(2, 4)),
    )


def test_the_model_stands_where_nobody_answers() -> None:
    for tape in (fitted(None).at(10), fitted(lambda *question: None).at(10)):
        assert list(tape.sizes) == [4000, 10 * MIB, 1000, 10 * MIB, 1000]
        assert tape.resolved == frozenset()


def test_a_third_trace_is_checked_by_its_questions() -> None:
    assert fitted().check(asking(5)) is None
    with pytest.raises(
        NotAffineError, match=r"conv in m\.conv.*asks \('square', \('bfloat16',\), \(7, 16\)\) at batch 5"
    ):
        fitted().check(asking(5, numbers=(7, 16)))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (asking(4, steps=1, numbers=(7, 9)), r"asks square .*\(7, 6\) at batch 2 and square .*\(7, 9\) at batch 4"),
        (asking(4, steps=1, numbers=(7, 12, 1)), r"\(7, 12, 1\) at batch 4"),
        (asking(4, steps=1, word="float16"), r"\('float16',\) \(7, 12\) at batch 4"),
        (replace(asking(4, steps=1), size_queries=()), "block 2 is asked for at only one of the batches 2 and 4"),
    ],
)
def test_questions_that_are_not_the_same(other: Tape, message: str) -> None:
    with pytest.raises(NotAffineError, match=message):
        fit_affine(asking(2), other)


def test_the_second_step_asks_what_the_first_does() -> None:
    first = asking(2)
    strange = SizeQuery(kind="square", words=("bfloat16",), numbers=(7, 5), blocks=(4,))
    first = replace(first, size_queries=(replace(first.size_queries[0], blocks=(2,)), strange))
    with pytest.raises(NotAffineError, match=r"conv in m\.conv \(block 4\) asks another question in the second step"):
        fit_affine(first, asking(3, steps=1))


def test_words_change_together() -> None:
    def by_word(kind: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
        return {"bfloat16": 512, "float16": 1024}[words[0]]

    tape = replace(fitted(by_word), exact=(asking(1),))
    other = tape.in_words({"bfloat16": "float16"})
    assert [list(one.at(batch).sizes)[2] for one in (tape, other) for batch in (1, 8)] == [512, 512, 1024, 1024]
    silent = replace(tape, size_queries=(), exact=())
    assert silent.in_words({"bfloat16": "float16"}) is silent


def test_a_workspace_of_nothing_takes_nothing() -> None:
    tape = fitted(lambda *question: 0).at(4)
    # 4000 bytes are 4096 in blocks of 512; 4 MiB beside them
    assert max(place(tape, "cuda").taken) == 4 * MIB
    assert [place(tape, "cuda").taken[block] for block in (0, 2, 4)] == [4096, 0, 0]


def test_the_largest_batch_is_found_by_few_answers() -> None:
    asked: list[int] = []

    def doubled(kind: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
        asked.append(numbers[1] // 3)
        return numbers[1] // 3 * MIB + 5

    gpu = replace(GPUS["t4"], total_bytes=1000 * MIB, context_low_bytes=0, context_bytes=0, context_high_bytes=0)
    tape = fitted(doubled)
    known = {batch: fit(tape.at(batch), gpu).fits for batch in (64, 128)}
    asked.clear()
    found = largest_batch(tape, gpu, dtype="", known=known)
    # per sample 1 MiB and as much again while it is worked on; 5 bytes and the weight take 2 MiB each: 2 b + 4 <= 1000
    # found within 1 % below 498
    assert 493 <= found.batch <= found.possible_batch <= 498
    assert len(set(asked) - {64, 128}) <= 6


def test_lines_through_answers_are_never_below_zero() -> None:
    # answers 36 and 81 at batches 2 and 3: slope 45, at batch 1 they would be -9
    assert list(fitted().settle(2, 3).at(1).sizes)[2] == 45
    assert fitted(lambda *question: None).settle(2, 3).settled == (None,)

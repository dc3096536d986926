"""Questions: blocks whose size no line over the batch gives, because a library decides it for each shape by itself.

A tape holds for such a block a size that is a model, and beside it the question. Who builds the tape says who answers; this
package only asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

SizeOracle = Callable[[str, tuple[str, ...], tuple[int, ...]], int | None]
"""The bytes of a block by a question's kind, words and numbers; None where there is no answer and the model stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeQuery:
    """What the size of some blocks is asked by: `words` are the same at every batch size, `numbers` need not be."""

    kind: str
    words: tuple[str, ...]
    numbers: tuple[int, ...]
    blocks: tuple[int, ...]

    def in_words(self, others: dict[str, str]) -> SizeQuery:
        """The same question with some words in the place of others."""
        words = tuple(others.get(word, word) for word in self.words)
        return SizeQuery(kind=self.kind, words=words, numbers=self.numbers, blocks=self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineSizeQuery:
    """A question whose numbers are `constant[i] + per_item[i] * batch`."""

    kind: str
    words: tuple[str, ...]
    constant: tuple[int, ...]
    per_item: tuple[int, ...]
    blocks: tuple[int, ...]

    def at(self, batch: int) -> SizeQuery:
        """The question at one batch size."""
        numbers = tuple([a + b * batch for a, b in zip(self.constant, self.per_item, strict=True)])
        return SizeQuery(kind=self.kind, words=self.words, numbers=numbers, blocks=self.blocks)

    def in_words(self, others: dict[str, str]) -> AffineSizeQuery:
        """The same question with some words in the place of others."""
        words = tuple(others.get(word, word) for word in self.words)
        return AffineSizeQuery(
            kind=self.kind, words=words, constant=self.constant, per_item=self.per_item, blocks=self.blocks
        )


def by_block(questions: Iterable[SizeQuery]) -> dict[int, tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """Kind, words and numbers for each block that is asked for."""
    return {block: (q.kind, q.words, q.numbers) for q in questions for block in q.blocks}


def gather(asked: dict[int, tuple[str, tuple[str, ...], tuple[int, ...]]]) -> tuple[SizeQuery, ...]:
    """The questions of blocks, each asked once."""
    blocks: dict[tuple[str, tuple[str, ...], tuple[int, ...]], list[int]] = {}
    for block, question in asked.items():
        blocks.setdefault(question, []).append(block)
    return tuple(
        SizeQuery(kind=kind, words=words, numbers=numbers, blocks=tuple(places))
        for (kind, words, numbers), places in blocks.items()
    )


def fit_size_queries(
    first: dict[int, tuple[str, tuple[str, ...], tuple[int, ...]]],
    second: dict[int, tuple[str, tuple[str, ...], tuple[int, ...]]],
    batches: tuple[int, int],
) -> tuple[AffineSizeQuery, ...]:
    """The questions through those of two batch sizes, by block.

    Raises ValueError with the first block whose two questions are not the same but for numbers on a line.
    """
    if first.keys() != second.keys():
        block = min(first.keys() ^ second.keys())
        raise ValueError(f"block {block} is asked for at only one of the batches {batches[0]} and {batches[1]}")
    step = batches[1] - batches[0]
    blocks: dict[tuple, list[int]] = {}
    for block, (kind, words, before) in first.items():
        other_kind, other_words, after = second[block]
        slopes = tuple([(b - a) // step for a, b in zip(before, after, strict=False)])
        on_line = len(before) == len(after) and all(
            a + slope * step == b for a, slope, b in zip(before, slopes, after, strict=True)
        )
        if (kind, words) != (other_kind, other_words) or not on_line:
            raise ValueError(
                f"block {block} asks {kind} {words} {before} at batch {batches[0]} and "
                f"{other_kind} {other_words} {after} at batch {batches[1]}"
            )
        constant = tuple([a - slope * batches[0] for a, slope in zip(before, slopes, strict=True)])
        blocks.setdefault((kind, words, constant, slopes), []).append(block)
    return tuple(
        AffineSizeQuery(kind=kind, words=words, constant=constant, per_item=slopes, blocks=tuple(places))
        for (kind, words, constant, slopes), places in blocks.items()
    )

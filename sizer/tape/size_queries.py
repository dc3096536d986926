"""Size queries: for blocks with a size on no line over the batch, since a library decides it for each shape.

A tape holds a modelled size for such a block, together with the query. A size oracle resolves the query. It is a function
argument, since the code that calls a library is outside of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

SizeQueryKey = tuple[str, tuple[str, ...], tuple[int, ...]]
"""A query's kind, words and numbers."""

SizeOracle = Callable[[Sequence[SizeQueryKey]], Sequence[int | None]]
"""Bytes of a block for each of some queries; None if unknown: the modelled size then stays."""

Answer = Callable[[str, tuple[str, ...], tuple[int, ...]], int | None]
"""The same for one query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeQuery:
    """Values that decide the size of some blocks: `words` are the same at every batch size, `numbers` need not be."""

    kind: str
    words: tuple[str, ...]
    numbers: tuple[int, ...]
    blocks: tuple[int, ...]

    def with_dtype(self, dtype: str, *, instead_of: str) -> SizeQuery:
        """Return the same query for another dtype."""
        return replace(self, words=tuple(dtype if word == instead_of else word for word in self.words))


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineSizeQuery:
    """A size query with the numbers `constant[i] + per_item[i] * batch`."""

    kind: str
    words: tuple[str, ...]
    constant: tuple[int, ...]
    per_item: tuple[int, ...]
    blocks: tuple[int, ...]
    # The places of the numbers that grow, few of them, and by how much
    _grow: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        grow = tuple((place, slope) for place, slope in enumerate(self.per_item) if slope)
        object.__setattr__(self, "_grow", grow)

    def evaluate(self, batch: int) -> SizeQuery:
        """Return the query at one batch size."""
        numbers = [*self.constant]
        for place, slope in self._grow:
            numbers[place] += slope * batch
        return SizeQuery(kind=self.kind, words=self.words, numbers=tuple(numbers), blocks=self.blocks)

    def with_dtype(self, dtype: str, *, instead_of: str) -> AffineSizeQuery:
        """Return the same query for another dtype."""
        return replace(self, words=tuple(dtype if word == instead_of else word for word in self.words))


def by_block(queries: Iterable[SizeQuery]) -> dict[int, SizeQueryKey]:
    """Kind, words and numbers for each block that has a size query, the same object for all blocks of a query."""
    found: dict[int, SizeQueryKey] = {}
    for query in queries:
        found.update(dict.fromkeys(query.blocks, (query.kind, query.words, query.numbers)))
    return found


def gather(by_block: dict[int, SizeQueryKey]) -> tuple[SizeQuery, ...]:
    """Return the size queries of blocks, equal ones merged."""
    blocks: dict[SizeQueryKey, list[int]] = {}
    known: dict[int, list[int]] = {}  # by the number of an object: many blocks share one, which takes long to hash
    for block, query in by_block.items():
        if (found := known.get(id(query))) is None:
            found = known[id(query)] = blocks.setdefault(query, [])
        found.append(block)
    return tuple(
        SizeQuery(kind=kind, words=words, numbers=numbers, blocks=tuple(places))
        for (kind, words, numbers), places in blocks.items()
    )


def fit_size_queries(
    first: dict[int, SizeQueryKey],
    second: dict[int, SizeQueryKey],
    batches: tuple[int, int],
) -> tuple[AffineSizeQuery, ...]:
    """Return the affine size queries through those of two batch sizes, by block.

    Raises ValueError for the first block with two queries that differ in more than numbers on a line.
    """
    if first.keys() != second.keys():
        block = min(first.keys() ^ second.keys())
        raise ValueError(f"block {block} has a size query at only one of the batches {batches[0]} and {batches[1]}")
    step = batches[1] - batches[0]
    blocks: dict[tuple, list[int]] = {}
    known: dict[tuple[int, int], list[int]] = {}  # by the numbers of two objects, as in `gather`
    for block, query in first.items():
        other = second[block]
        if (found := known.get((id(query), id(other)))) is not None:
            found.append(block)
            continue
        (kind, words, before), (other_kind, other_words, after) = query, other
        slopes = tuple([(b - a) // step for a, b in zip(before, after, strict=False)])
        on_line = len(before) == len(after) and all(
            a + slope * step == b for a, slope, b in zip(before, slopes, after, strict=True)
        )
        if (kind, words) != (other_kind, other_words) or not on_line:
            raise ValueError(
                f"block {block} has the size query {kind} {words} {before} at batch {batches[0]} and "
                f"{other_kind} {other_words} {after} at batch {batches[1]}"
            )
        constant = tuple([a - slope * batches[0] for a, slope in zip(before, slopes, strict=True)])
        found = known[id(query), id(other)] = blocks.setdefault((kind, words, constant, slopes), [])
        found.append(block)
    return tuple(
        AffineSizeQuery(kind=kind, words=words, constant=constant, per_item=slopes, blocks=tuple(places))
        for (kind, words, constant, slopes), places in blocks.items()
    )

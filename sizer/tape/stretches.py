"""Additional events in the tape of a deeper model, or of a larger batch: stretches that repeat.

Equal layers repeat each other's events. So do the samples of a batch, if a model processes them one by one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from sizer.tape.tape import Tape

ENOUGH = 200  # equal events of two tapes after a stretch that are enough to end it there
NO_QUERY = -1  # replaces a size query's number, for blocks without one
NO_LAYER = -1  # replaces a layer's number, for blocks of no layer


class LayersDifferError(ValueError):
    """Raised if the events that a deeper model adds to a tape do not repeat. The message names the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Events that the deeper tape has in addition, between two events of the shallower one: from `begin` to `end` of its order."""

    position: int
    begin: int
    end: int

    def steadied(self, rows: Rows, unlike: np.ndarray, otherwise: int) -> Stretch:
        """Return the same events a few repetitions earlier, if that makes the blocks continue as between earlier repetitions.

        It is the fewest repetitions with that property, or `otherwise` if none has it: the last layer often differs from the
        others, as do the first. `unlike` is True for blocks of layers before the equal ones.
        """
        length = self.end - self.begin
        repetitions = 1
        while (begin := self.begin - repetitions * length) >= 0 and np.array_equal(
            rows.exact[begin : begin + length], rows.exact[self.begin : self.end]
        ):
            repetitions += 1
        for earlier in range(repetitions - 2):
            three, two, one = (self._earlier(earlier + n).of(rows.blocks) for n in range(3))
            others = unlike[self._earlier(earlier).of(rows.blocks)]
            if np.array_equal(two - one, three - two) and not others.any():
                return self._earlier(earlier)
        return self._earlier(min(otherwise, repetitions - 2)) if repetitions > 2 else self

    def of(self, column: np.ndarray) -> np.ndarray:
        """Return these events of a column of the deeper tape."""
        return column[self.begin : self.end]

    def _earlier(self, repetitions: int) -> Stretch:
        moved = repetitions * (self.end - self.begin)
        return Stretch(position=self.position - moved, begin=self.begin - moved, end=self.end - moved)


class Rows:
    """A tape's events as columns of numbers.

    `blocks` are the blocks that they allocate or release. `alike` is equal for two events that do the same in a layer each,
    `exact` if they also have the same bytes and size query. Of the blocks, `names` are the modules without the number of the
    layer, and `layers` are these numbers. `exact_per_sample` is equal if the bytes for each sample are: tapes `across_batches`
    are of several batch sizes, and their size queries are ignored.
    """

    def __init__(
        self, tape: Tape, stacks: Collection[str], ids: dict[tuple, int], *, across_batches: bool = False
    ) -> None:
        self.tape = tape
        numbered = re.compile(rf"({'|'.join(map(re.escape, stacks))})\.(\d+)(?=\.|$)")
        found = [numbered.match(name) for name in tape.module_names]
        names = [
            f"{match[1]}.*{name[match.end() :]}" if match else name
            for match, name in zip(found, tape.module_names, strict=True)
        ]
        layer_of = np.array([int(match[2]) if match else NO_LAYER for match in found], np.int64)
        modules = np.asarray(tape.modules, np.int64)
        self.names, self.layers = [names[module] for module in tape.modules], layer_of[modules]
        self.sizes = np.asarray(tape.sizes, np.int64)
        events = np.asarray(tape.order, np.int64)
        self.allocates = events >= 0
        self.blocks = np.where(self.allocates, events, ~events)
        kinds = self._kinds(names, ids)
        asks = np.full(len(kinds), NO_QUERY)
        for query in () if across_batches else tape.size_queries:
            asks[[*query.blocks]] = ids.setdefault((query.kind, query.words, query.numbers), len(ids))
        _, size_of = np.unique(self.sizes, return_inverse=True)
        which, row_of = _distinct(kinds, size_of, asks)
        rows = list(zip(kinds[which].tolist(), self.sizes[which].tolist(), asks[which].tolist(), strict=True))
        exact = _number(rows, ids)[row_of]
        self.alike, self.exact = self._by_event(kinds), self._by_event(exact)
        self.exact_per_sample = self.exact
        if across_batches:
            common = np.gcd(self.sizes[which], tape.batch)
            share = (self.sizes[which] // common).tolist(), (tape.batch // common).tolist()  # a fraction in its lowest terms
            shares = zip(kinds[which].tolist(), *share, repeat("share"), strict=False)
            self.exact_per_sample = self._by_event(_number(shares, ids)[row_of])

    def _kinds(self, names: list[str], ids: dict[tuple, int]) -> np.ndarray:
        """Return for each block the number of its kind: its operator, module without the layer's number, category and stream."""
        tape = self.tape
        blocks = len(tape.sizes)
        awaited = np.zeros(blocks, np.int64)
        awaited[[*tape.awaited]] = 1
        streams = np.frombuffer(tape.streams, np.uint8) if tape.streams else np.zeros(blocks, np.uint8)
        columns = [np.asarray(column, np.int64) for column in (tape.ops, tape.modules)]
        columns += [np.frombuffer(tape.categories, np.uint8), streams, awaited]
        which, row_of = _distinct(*columns)
        rows = zip(*(column[which].tolist() for column in columns), strict=True)
        kinds = ((tape.op_names[op], names[module], *others) for op, module, *others in rows)
        return _number(kinds, ids)[row_of]

    def _by_event(self, of_blocks: np.ndarray) -> np.ndarray:
        return 2 * of_blocks[self.blocks] + self.allocates


def _distinct(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of the distinct rows of columns of small numbers from -1 on, and for each row which of these it is."""
    packed = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        packed = packed * (int(column.max(initial=0)) + 2) + column + 1
    _, which, row_of = np.unique(packed, return_index=True, return_inverse=True)
    return which, row_of


def _number(rows: Iterable[tuple], ids: dict[tuple, int]) -> np.ndarray:
    """Return the number of each row, the next free one if it has none."""
    return np.array([ids.setdefault(row, len(ids)) for row in rows], np.int64)


def check_layers(tape: Tape, stacks: Collection[str], alike_from: int) -> None:
    """Raise LayersDifferError unless all layers of the lists but the first and the last one allocate the same."""
    rows = Rows(tape, stacks, {})
    layers = np.where(rows.allocates, rows.layers[rows.blocks], NO_LAYER)
    inner = [rows.exact[layers == layer] for layer in range(alike_from + 1, int(layers.max(initial=NO_LAYER)))]
    for layer, other in enumerate(inner[1:], alike_from + 2):
        if not np.array_equal(inner[0], other):
            raise LayersDifferError(f"layer {layer} is of another kind than layer {alike_from + 1}")


def find_stretches(first: Rows, second: Rows) -> Iterator[Stretch]:
    """Yield the additional stretches of the second tape. Raises LayersDifferError if one does not repeat the events before it."""
    a, b = first.exact, second.exact
    of_one, of_other = first.exact_per_sample, second.exact_per_sample
    i = j = 0
    while i < len(a) or j < len(b):
        shorter = min(len(a) - i, len(b) - j)
        differ = a[i : i + shorter] != b[j : j + shorter]
        other = np.flatnonzero(differ & (of_one[i : i + shorter] != of_other[j : j + shorter]))
        same = int(other[0]) if len(other) else shorter
        i, j = i + same, j + same
        if i == len(a) and j == len(b):
            return
        if (end := _end_of_stretch(first, second, i, j)) is not None:
            yield Stretch(position=i, begin=j, end=end)
            j = end
        elif i < len(a) and j < len(b) and first.alike[i] == second.alike[j]:
            i, j = i + 1, j + 1  # of another size: one that grows with the number of layers
        else:
            event = int(second.blocks[j]) if j < len(b) else len(second.tape.sizes) - 1
            raise LayersDifferError(f"{second.tape.describe(event)} repeats nothing")


def _end_of_stretch(first: Rows, second: Rows, i: int, j: int) -> int | None:
    """Return the event at which the second tape continues like the first, after a stretch that repeats the events before it.

    Of several such ends it is the first with ENOUGH equal events after it, or else the one with the most. If few kinds of
    events are repeated again and again, as those of an optimizer's states, shorter stretches repeat some events before them by
    chance.
    """
    b = second.exact
    if i == len(first.exact):
        return len(b) if _repeats(b, j, len(b)) else None
    columns = (first.exact, b), (first.exact_per_sample, second.exact_per_sample), (first.alike, second.alike)
    for ours, theirs in columns:
        best, most = None, 0
        for end in (j + 1 + np.flatnonzero(theirs[j + 1 : 2 * j + 1] == ours[i])).tolist():
            if _repeats(b, j, end) and (alike := _alike_from(ours[i:], theirs[end:])) > most:
                best, most = end, alike
                if alike >= ENOUGH:
                    break
        if best is not None:
            return best
    return None


def _alike_from(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of equal events at the begin of two columns, at most ENOUGH."""
    events = min(ENOUGH, len(one), len(other))
    differ = np.flatnonzero(one[:events] != other[:events])
    return int(differ[0]) if len(differ) else events


def _repeats(rows: np.ndarray, begin: int, end: int) -> bool:
    before = 2 * begin - end
    return end > begin and before >= 0 and np.array_equal(rows[begin:end], rows[before:begin])

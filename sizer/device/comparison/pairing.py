"""Which allocation of one tape is which of another: in order where possible, by size, operator and lifespan. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

from sizer.device.comparison.tape_index import TapeIndex

Pair = tuple[int, int]
NEARBY = 6  # allocations that both sides make: how far apart blocks that come in another order may be
LONGEST_PIECE = 12_000  # blocks on either side that are compared at once: 18 MB of bits


def pair_in_any_order(own: TapeIndex, blocks: Sequence[int], other: TapeIndex, others: Sequence[int]) -> list[Pair]:
    """Pairs (own block, other block) of one size, whatever the order: how a model is loaded does not matter."""
    waiting: dict[int, deque[int]] = defaultdict(deque)
    for block in others:
        waiting[other.tape.sizes[block]].append(block)
    found = ((block, waiting[own.tape.sizes[block]]) for block in blocks)
    return [(block, queue.popleft()) for block, queue in found if queue]


def pair_in_order(
    own: TapeIndex, blocks: Sequence[int], other: TapeIndex, others: Sequence[int], phase: str
) -> tuple[list[Pair], list[Pair]]:
    """Pairs (own block, other block) of a phase that ascend on both sides, and pairs that do not.

    As many as possible of the same size, operator and lifespan (whether a block stays to the phase's end, or lies inside one
    operator), between those as many as possible of the same size and lifespan. Then those of the same size, operator and lifespan
    that an operator allocates in another order, then as many as possible of one size, then those of one size and module in another
    order: a kernel's workspace may come before or after its results. At last, what is left between two pairs where both sides
    have the same operators: there the sizes differ.

    *Known limitations*: where more than LONGEST_PIECE blocks in a row have no counterpart, they are paired piece by piece,
    and pairs across the cuts are not seen.
    """
    pairing = _Pairing(_describe(own, blocks, phase), _describe(other, others, phase))
    pairing.in_order(lambda one: one)
    pairing.in_order(lambda one: (one.size, one.lifespan))
    pairing.nearby(lambda one: (one.size, one.lifespan, one.op))
    pairing.in_order(lambda one: one.size)
    pairing.nearby(lambda one: (one.size, one.module))
    pairing.alike(lambda one: one.op)
    ordered, out_of_order = (
        [(blocks[one], others[two]) for one, two in pairs] for pairs in (pairing.ordered, pairing.out_of_order)
    )
    return ordered, out_of_order


class _Block:
    """What a block is known by. Equal where size, operator and lifespan are."""

    __slots__ = ("key", "lifespan", "module", "op", "size")

    def __init__(self, size: int, op: str, lifespan: str, module: str):
        self.size, self.op, self.lifespan, self.module = size, op, lifespan, module
        self.key = (size, op, lifespan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Block) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class _Pairing:
    """Builds pairs of indices into two lists: `ordered` ascending on both sides, `out_of_order` not."""

    def __init__(self, one: Sequence[_Block], two: Sequence[_Block]):
        self._one, self._two = one, two
        self._free_one, self._free_two = bytearray(b"\1" * len(one)), bytearray(b"\1" * len(two))
        self.ordered: list[Pair] = []
        self.out_of_order: list[Pair] = []

    def in_order(self, key: Callable[[_Block], Hashable]) -> None:
        """Add, between the pairs so far, as many more as possible with the same key."""
        more = []
        for left, right in self._gaps():
            keys = [key(self._one[index]) for index in left]
            other_keys = [key(self._two[index]) for index in right]
            more += [(left[i], right[j]) for i, j in common_subsequence(keys, other_keys)]
        self._take(more, self.ordered)

    def nearby(self, key: Callable[[_Block], Hashable]) -> None:
        """Add pairs with the same key that are at most NEARBY ordered pairs apart, whatever their order."""
        ticks, other_ticks = ([pair[place] for pair in self.ordered] for place in (0, 1))
        waiting: dict[Hashable, deque[Pair]] = defaultdict(deque)
        for index, block in enumerate(self._two):
            if self._free_two[index]:
                waiting[key(block)].append((bisect_right(other_ticks, index), index))
        more = []
        for index, block in enumerate(self._one):
            if self._free_one[index] and (queue := waiting.get(key(block))):
                tick = bisect_right(ticks, index)
                while queue and queue[0][0] < tick - NEARBY:
                    queue.popleft()
                if queue and queue[0][0] <= tick + NEARBY:
                    more.append((index, queue.popleft()[1]))
        self._take(more, self.out_of_order)

    def alike(self, key: Callable[[_Block], Hashable]) -> None:
        """Add everything between two pairs where both sides have the same keys there."""
        more: list[tuple[int, int]] = []
        for left, right in self._gaps():
            if [key(self._one[index]) for index in left] == [key(self._two[index]) for index in right]:
                more += zip(left, right, strict=True)
        self._take(more, self.ordered)

    def _take(self, pairs: list[Pair], into: list[Pair]) -> None:
        into += pairs
        into.sort()
        for one, two in pairs:
            self._free_one[one] = self._free_two[two] = 0

    def _gaps(self) -> list[tuple[list[int], list[int]]]:
        """The free indices of both sides between ordered pairs, where both sides have some."""
        stretches = pairwise([(-1, -1), *self.ordered, (len(self._one), len(self._two))])
        gaps = []
        for (one, two), (next_one, next_two) in stretches:
            if next_one - one > 1 and next_two - two > 1:
                left = [index for index in range(one + 1, next_one) if self._free_one[index]]
                right = [index for index in range(two + 1, next_two) if self._free_two[index]]
                if left and right:
                    gaps.append((left, right))
        return gaps


def _describe(tape_index: TapeIndex, blocks: Sequence[int], phase: str) -> list[_Block]:
    tape, (_, end) = tape_index.tape, tape_index.bounds[phase]
    names = [operator_name(name) for name in tape.op_names]
    modules = tape.module_names
    return [
        _Block(tape.sizes[block], names[tape.ops[block]], tape_index.lifespan(block, end), modules[tape.modules[block]])
        for block in blocks
    ]


def operator_name(op: str) -> str:
    """The bare name of an operator as tracer or profiler write it: "aten.addmm.default" and "aten::addmm" are "addmm"."""
    return op.replace("::", ".").removeprefix("aten.").partition(".")[0].strip("_")


def common_subsequence(one: Sequence[Hashable], two: Sequence[Hashable]) -> list[Pair]:
    """The index pairs, ascending, of a longest common subsequence: of both whole up to LONGEST_PIECE items, else of pieces."""
    shorter = min(len(one), len(two))
    begin = next((index for index in range(shorter) if one[index] != two[index]), shorter)
    rest = shorter - begin
    end = next((index for index in range(rest) if one[-1 - index] != two[-1 - index]), rest)
    stop, other_stop = len(one) - end, len(two) - end
    pairs = [(index, index) for index in range(begin)]
    count = -(-max(stop - begin, other_stop - begin) // LONGEST_PIECE)
    cuts = [
        [begin + (last - begin) * part // count for part in range(count + 1)] for last in (stop, other_stop) if count
    ]
    for (start, to), (other_start, other_to) in zip(*map(pairwise, cuts), strict=True) if cuts else ():
        inner = longest_common_subsequence(one[start:to], two[other_start:other_to])
        pairs += [(start + i, other_start + j) for i, j in inner]
    return pairs + [(stop + index, other_stop + index) for index in range(end)]


def longest_common_subsequence(one: Sequence[Hashable], two: Sequence[Hashable]) -> list[Pair]:
    """The index pairs of a longest common subsequence, ascending.

    Bit-parallel: a row of the dynamic programme is one integer of len(one) bits, so 10,000 items on either side take a tenth
    of a second and 12 MB. Source: Hyyrö, "Bit-parallel LCS-length computation revisited" (2004); a 0 at bit i of row j says that
    one[:i+1] has a longer common subsequence with two[:j+1] than one[:i] has.
    """
    if not one or not two:
        return []
    places: dict[Hashable, int] = defaultdict(int)
    for index, key in enumerate(one):
        places[key] |= 1 << index
    full = (1 << len(one)) - 1
    row, rows = full, []
    for key in two:
        matches = row & places.get(key, 0)
        row = ((row + matches) | (row - matches)) & full
        rows.append(row)
    pairs, i, j = [], len(one) - 1, len(two) - 1
    while i >= 0 and j >= 0:
        if rows[j] >> i & 1:
            i -= 1
        elif j and not rows[j - 1] >> i & 1:
            j -= 1
        else:
            pairs.append((i, j))
            i, j = i - 1, j - 1
    return pairs[::-1]

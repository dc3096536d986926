"""Pair the blocks of an estimate's tape with those of a device's recording: in order, by size, operator and lifetime. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from sizer.device.comparison.tape_index import Call, TapeIndex
from sizer.tape.tape import Tape

Pair = tuple[int, int]
NEARBY = 6  # paired allocations: maximum distance of blocks in another order
LONGEST_PIECE = 12_000  # blocks on either side that are compared at once: 18 MB of bits


def pair_in_any_order(own: TapeIndex, blocks: Sequence[int], other: TapeIndex, others: Sequence[int]) -> list[Pair]:
    """Return pairs (own block, other block) of one size in any order: how a model is loaded does not matter."""
    waiting: dict[int, deque[int]] = defaultdict(deque)
    for block in others:
        waiting[other.tape.sizes[block]].append(block)
    found = ((block, waiting[own.tape.sizes[block]]) for block in blocks)
    return [(block, queue.popleft()) for block, queue in found if queue]


def pair_in_order(
    own: TapeIndex, blocks: Sequence[int], other: TapeIndex, others: Sequence[int], phase: str
) -> tuple[list[Pair], list[Pair]]:
    """Return pairs (own block, other block) of a phase that ascend on both sides, and pairs that do not.

    Blocks are paired in six steps, each with as many pairs as possible:

    1. same size, operator and lifespan (a block stays to the phase's end, or is released inside one operator);
    2. between these, same size and lifespan;
    3. same size, operator and lifespan, if an operator allocates them in another order;
    4. same size;
    5. same size and module in another order: a kernel's workspace may come before or after its results;
    6. remaining blocks between two pairs, if both sides have the same operators there: their sizes differ.

    *Known limitations*: if more than LONGEST_PIECE blocks in a row have no counterpart, they are paired piece by piece, and
    pairs across the cuts are not found.
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
    """A block by its size, operator and lifespan. Blocks are equal if these three are."""

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
        """Add as many further pairs as possible with the same key, between the existing pairs."""
        more = []
        for left, right in self._gaps():
            keys = [key(self._one[index]) for index in left]
            other_keys = [key(self._two[index]) for index in right]
            more += [(left[i], right[j]) for i, j in common_subsequence(keys, other_keys)]
        self._take(more, self.ordered)

    def nearby(self, key: Callable[[_Block], Hashable]) -> None:
        """Add pairs with the same key that are at most NEARBY ordered pairs apart, in any order."""
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
        """Add everything between two pairs if both sides have the same keys there."""
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
        """Return the free indices of both sides between ordered pairs, if both sides have some."""
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
    """Return the bare name of an operator of the tracer or profiler: "aten.addmm.default" and "aten::addmm" are "addmm"."""
    return op.replace("::", ".").removeprefix("aten.").partition(".")[0].strip("_")


def common_subsequence(one: Sequence[Hashable], two: Sequence[Hashable]) -> list[Pair]:
    """Return the index pairs, ascending, of a longest common subsequence; beyond LONGEST_PIECE items it is searched in pieces."""
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
    """Return the index pairs of a longest common subsequence, ascending.

    Bit-parallel: a row of the dynamic programme is one integer of len(one) bits, so 10,000 items on either side take a tenth of
    a second and 12 MB. Source: Hyyrö, "Bit-parallel LCS-length computation revisited" (2004); a 0 at bit i of row j says that
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


# ------------------------------------------------------------------------------------------------------------ alignment


# The estimate's error relative to the device.
Kind = Literal["missing", "extra", "size", "later", "earlier"]
Side = Literal["estimate", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A block that differs between both sides, from `start` to `end` on their common clock.

    The clock counts the allocations that both sides make. Events of one side between two such allocations get fractional times.
    `block` is the estimate's and `device_block` the recording's, None if that side has none. If a release differs, `start` is
    the earlier and `end` the later release. `is_scratch` says that only one side has the block, and releases it before another
    operator allocates.
    """

    kind: Kind
    phase: str
    start: float
    end: float
    block: int | None
    device_block: int | None
    estimated_bytes: int
    measured_bytes: int
    is_scratch: bool = False

    @property
    def held_bytes(self) -> int:
        """Difference of the two sides' bytes from start to end."""
        if self.kind == "size":
            return abs(self.estimated_bytes - self.measured_bytes)
        return max(self.estimated_bytes, self.measured_bytes)


class Alignment:
    """The blocks that an estimate's tape and a device's recording have in common, and the unpaired blocks of each side.

    Blocks are paired phase by phase. `estimate_partner` and `device_partner` hold the other side's block, -1 for none. The
    order in which blocks are released between two allocations does not matter.
    """

    def __init__(self, estimate: Tape, device: Tape):
        self._own, self._other = TapeIndex(estimate), TapeIndex(device)
        self.sides: dict[Side, TapeIndex] = {"estimate": self._own, "device": self._other}
        self.estimate, self.device = estimate, device
        self.estimate_partner = [-1] * len(estimate.sizes)
        self.device_partner = [-1] * len(device.sizes)
        self.phases = tuple(phase for phase in self._own.bounds if phase in self._other.bounds)
        self._anchors: dict[str, list[Pair]] = {}  # phase -> events that both have, ascending on both sides
        self._out_of_order: set[int] = set()  # the estimate's blocks in another order than the device's
        for phase in self.phases:
            self._align(phase)
        for tape_index, place in ((self._own, 0), (self._other, 1)):
            tape_index.start_clock({pair[place] for pairs in self._anchors.values() for pair in pairs})

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Return every block that differs between the sides, in the order of the common clock.

        Phases of only one side are not compared.
        """
        found = [*self._unpaired("extra", self._own), *self._unpaired("missing", self._other), *self._paired()]
        return tuple(sorted(found, key=lambda one: one.start))

    def names_at(self, side: Side, difference: Difference) -> tuple[str, str]:
        """Return operator and module of a difference on one side.

        They are those of its block there, else of the last block before it with a partner.
        """
        tape_index = self.sides[side]
        block = difference.block if side == "estimate" else difference.device_block
        if block is None:
            block = tape_index.block_at(difference.start)
        return ("", "") if block is None else tape_index.names(block)

    def levels_after(self, difference: Difference) -> tuple[int, int]:
        """Return the bytes alive on both sides just after a difference began."""
        if difference.block is not None and difference.kind != "later":
            places = self._own.died if difference.kind == "earlier" else self._own.born
            end, device_end = self.corresponding("estimate", places[difference.block] + 1)
        else:
            assert difference.device_block is not None  # a difference has a block on at least one side
            places = self._other.died if difference.kind == "later" else self._other.born
            end, device_end = self.corresponding("device", places[difference.device_block] + 1)
        return self._own.levels[end], self._other.levels[device_end]

    def corresponding(self, side: Side, position: int) -> tuple[int, int]:
        """Return (events of the estimate, events of the device) at the same place of the work, given the events of one side.

        The result is exact just after an event that both sides have, and at the end of a phase. Between two such places it is
        interpolated.
        """
        phase = self.sides[side].phase_at(position)
        if phase not in self.phases:
            last = self.phases[-1] if self.phases else None
            return (self._own.bounds[last][1], self._other.bounds[last][1]) if last else (0, 0)
        here = 0 if side == "estimate" else 1
        points = self._points[phase]
        index = min(bisect_right(points, position, key=lambda pair: pair[here]), len(points) - 1)
        before, after = points[index - 1], points[index]
        span, done = after[here] - before[here], position - before[here]
        other = before[1 - here] + (done * (after[1 - here] - before[1 - here]) // span if span else 0)
        return (position, other) if side == "estimate" else (other, position)

    def alive(self, estimate_end: int, device_end: int) -> tuple[dict[int, None], dict[int, None]]:
        """Return the blocks alive on either side after the given numbers of events, oldest first."""
        return self._own.alive(estimate_end), self._other.alive(device_end)

    def calls(self, phase: str) -> list[tuple[Call | None, Call | None]]:
        """Return matching calls of operators on both sides, which have blocks in common; None for a side without a call.

        One call of the estimate may correspond to several on the device, or the other way round; they are then merged.
        """
        calls, others = self._own.calls(phase), self._other.calls(phase)
        place = {block: number for number, call in enumerate(others) for block in self._other.blocks_in(call)}
        pairs: list[tuple[Call, Call | None]] = []
        taken: set[int] = set()
        for call in calls:
            partners = {
                self.estimate_partner[block] for block in self._own.blocks_in(call) if block not in self._out_of_order
            }
            found = sorted({place[block] for block in partners if block in place})
            if found and pairs and pairs[-1][1] is not None and found[0] == max(taken):
                before = pairs[-1][0]
                whole = self._own.call(before.begin, call.end, before.op, before.module)
                pairs[-1] = whole, _joined(self._other, pairs[-1][1], others[found[-1]])
            elif found:
                pairs.append((call, _joined(self._other, others[found[0]], others[found[-1]])))
            else:
                pairs.append((call, None))
            taken.update(range(found[0], found[-1] + 1) if found else ())
        return [*pairs, *((None, call) for number, call in enumerate(others) if number not in taken)]

    # --------------------------------------------------------------------------------------------------------- pairing

    @cached_property
    def _points(self) -> dict[str, list[Pair]]:
        """Return matching places (events done on either side) per phase: its ends and the paired events between them."""
        points = {}
        for phase in self.phases:
            begin, end = zip(self._own.bounds[phase], self._other.bounds[phase], strict=True)
            inner = ((one + 1, other + 1) for one, other in self._anchors[phase])
            points[phase] = [begin, *inner, end]
        return points

    def _align(self, phase: str) -> None:
        own, other = self._own, self._other
        blocks, device_blocks = own.allocated_in(phase), other.allocated_in(phase)
        ordered: list[Pair] = []
        if phase == "load":
            out_of_order = pair_in_any_order(own, blocks, other, device_blocks)
        else:
            ordered, out_of_order = pair_in_order(own, blocks, other, device_blocks, phase)
            self._out_of_order.update(block for block, _ in out_of_order)
        for block, device_block in (*ordered, *out_of_order):
            self.estimate_partner[block], self.device_partner[device_block] = device_block, block
        self._anchors[phase] = [(own.born[one], other.born[two]) for one, two in ordered]

    # ----------------------------------------------------------------------------------------------------- differences

    def _unpaired(self, kind: Kind, tape_index: TapeIndex) -> list[Difference]:
        own = tape_index is self._own
        partner = self.estimate_partner if own else self.device_partner
        found = []
        for phase in self.phases:
            for block in tape_index.allocated_in(phase):
                if partner[block] < 0:
                    size = tape_index.tape.sizes[block]
                    pair, sizes = ((block, None), (size, 0)) if own else ((None, block), (0, size))
                    scratch = tape_index.within_one_operator(block)
                    found.append(_difference(kind, phase, tape_index.lifetime(block), pair, sizes, is_scratch=scratch))
        return found

    def _paired(self) -> list[Difference]:
        """Return pairs with different sizes, and pairs of one size that are released at different times."""
        found = []
        kind: Kind
        for block, device_block in enumerate(self.estimate_partner):
            if device_block < 0:
                continue
            sizes = self.estimate.sizes[block], self.device.sizes[device_block]
            lifetime, device_lifetime = self._own.lifetime(block), self._other.lifetime(device_block)
            if sizes[0] != sizes[1]:
                kind, span = "size", lifetime
                phase = self._own.phase_at(self._own.born[block] + 1)
            elif self._own.within_one_operator(block) and self._other.within_one_operator(device_block):
                continue  # the order in which a kernel releases its own workspaces does not matter
            elif abs(int(lifetime[1]) - int(device_lifetime[1])) > (NEARBY if block in self._out_of_order else 0):
                kind = "later" if lifetime[1] > device_lifetime[1] else "earlier"
                span = min(lifetime[1], device_lifetime[1]), max(lifetime[1], device_lifetime[1])
                first = self._own.died[block] if kind == "earlier" else self._other.died[device_block]
                phase = (self._own if kind == "earlier" else self._other).phase_at(first + 1)
                if phase not in self.phases:
                    continue
            else:
                continue
            found.append(_difference(kind, phase, span, (block, device_block), sizes))
        return found


def _difference(
    kind: Kind,
    phase: str,
    span: tuple[float, float],
    pair: tuple[int | None, int | None],
    sizes: tuple[int, int],
    *,
    is_scratch: bool = False,
) -> Difference:
    (start, end), (block, device_block), (estimated, measured) = span, pair, sizes
    return Difference(
        kind=kind, phase=phase, start=start, end=end, block=block, device_block=device_block, estimated_bytes=estimated,
        measured_bytes=measured, is_scratch=is_scratch,
    )  # fmt: skip


def _joined(tape_index: TapeIndex, first: Call, last: Call) -> Call:
    """Return the call from the first one's begin to the last one's end, under the last one's name."""
    return tape_index.call(first.begin, last.end, last.op, last.module)

"""An index of a tape for comparisons: its phases, the lifetime of each block, and the clock that both sides share. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from sizer.allocator.timeline import running_bytes
from sizer.tape.tape import CATEGORIES, Tape, blocks_alive

TINY_BYTES = 16  # a Python number wrapped in a tensor (8 bytes), which no dispatch mode sees, and its cast copy


@dataclass(frozen=True, slots=True)
class Call:
    """Consecutive allocations by one operator in one module, from event `begin` to the next operator's first at `end`.

    `inside_bytes` is the peak between them beyond the bytes alive before and after.
    """

    begin: int
    end: int
    op: str
    module: str
    inside_bytes: int


class TapeIndex:
    """A tape with precomputed values: phases, allocation and release of each block, and levels in bytes."""

    def __init__(self, tape: Tape):
        self.tape = tape
        begins = [0, *(end for end, _ in tape.marks)]
        self.bounds = {phase: (begin, end) for begin, (end, phase) in zip(begins, tape.marks, strict=False)}
        self.end = tape.marks[-1][0] if tape.marks else len(tape.order)
        self.born, self.died = [0] * len(tape.sizes), [len(tape.order)] * len(tape.sizes)
        for position, event in enumerate(tape.order):
            if event >= 0:
                self.born[event] = position
            else:
                self.died[~event] = position
        self._ticks: Sequence[float] = ()
        self._paired: list[int] = []

    @cached_property
    def levels(self) -> list[int]:
        """Bytes alive before the first event and after each one."""
        return running_bytes(self.tape.order, self.tape.sizes)

    def allocated_in(self, phase: str) -> list[int]:
        """Return the blocks of more than 0 bytes allocated in a phase, in order."""
        begin, end = self.bounds[phase]
        sizes = self.tape.sizes
        return [event for event in self.tape.order[begin:end] if event >= 0 and sizes[event]]

    def calls(self, phase: str) -> list[Call]:
        """Return the calls of a phase, in order.

        Calls with only allocations of at most TINY_BYTES are part of the previous call.
        """
        blocks = [block for block in self.allocated_in(phase) if self.tape.sizes[block] > TINY_BYTES]
        tape, calls = self.tape, []
        firsts = [
            block
            for before, block in zip([None, *blocks], blocks, strict=False)
            if before is None or (tape.ops[before], tape.modules[before]) != (tape.ops[block], tape.modules[block])
        ]
        ends = [*(self.born[block] for block in firsts[1:]), self.bounds[phase][1]] if firsts else []
        for block, end in zip(firsts, ends, strict=True):
            calls.append(self.call(self.born[block], end, *self.names(block)))
        return calls

    def call(self, begin: int, end: int, op: str, module: str) -> Call:
        """Return the call of an operator between two events."""
        levels = self.levels[begin : end + 1]
        return Call(begin, end, op, module, max(levels) - max(levels[0], levels[-1]))

    def blocks_in(self, call: Call) -> list[int]:
        """Return the blocks that a call allocates."""
        return [event for event in self.tape.order[call.begin : call.end] if event >= 0]

    def phase_at(self, position: int) -> str:
        """Return the phase of the last of `position` events; "" after the last mark."""
        return next((phase for end, phase in self.tape.marks if position <= end), "")

    def names(self, block: int) -> tuple[str, str]:
        """Return the operator and module that allocated a block."""
        tape = self.tape
        return tape.op_names[tape.ops[block]], tape.module_names[tape.modules[block]]

    def category(self, block: int) -> str:
        """Return the category of a block."""
        return CATEGORIES[self.tape.categories[block]]

    def lifespan(self, block: int, end: int) -> str:
        """Return a block's lifespan up to event `end`: it "stays", was "inside" one operator, or "passes"."""
        if self.died[block] >= end:
            return "stays"
        return "inside" if self.within_one_operator(block) else "passes"

    def start_clock(self, anchors: Set[int]) -> None:
        """Start the common clock: it ticks at the allocations that both sides make, at these positions of this one."""
        now, ticks = 0, array("q", [0])
        for position, event in enumerate(self.tape.order):
            if position in anchors:
                now += 1
                self._paired.append(event)
            ticks.append(now)
        self._ticks = ticks

    def block_at(self, time: float) -> int | None:
        """Return the last block with a partner that was allocated by this time of the common clock."""
        index = min(int(time), len(self._paired))
        return self._paired[index - 1] if index else None

    def lifetime(self, block: int) -> tuple[float, float]:
        """Return allocation and release of a block on the common clock; a block that lives between two ticks gets half a tick."""
        start, end = self._ticks[self.born[block]], self._ticks[min(self.died[block], len(self.tape.order))]
        if self.died[block] >= self.end:
            end = len(self._paired) + 1
        return (start, end) if end > start else (start, start + 0.5)

    def alive(self, position: int) -> dict[int, None]:
        """Return the blocks alive after `position` events, oldest first."""
        return blocks_alive(self.tape.order[:position])

    def within_one_operator(self, block: int) -> bool:
        """Return whether a block is released before another operator allocates, and so is internal to its operator."""
        return self.died[block] < min(self._next_operator[block], self.end)

    @cached_property
    def _next_operator(self) -> list[int]:
        """Per block, the event at which the next operator that is another one allocates."""
        tape, following = self.tape, [len(self.tape.order)] * len(self.tape.sizes)
        later: int | None = None  # the block that is allocated next
        for event in reversed(tape.order):
            if event < 0:
                continue
            if later is not None:
                same = tape.ops[event] == tape.ops[later]
                following[event] = following[later] if same else self.born[later]
            later = event
        return following

"""The loops of a tape (sizer.memory.loops) on an allocator: every step of them, each event where the allocator would put it.

The CUDA allocator keeps small and large blocks in pools of their own. Small blocks that do not grow are asked for and released in
the same order in every step, and where the small pool is as it was once before, it comes out as it did then: such a stretch of
events is run once and looked up from then on. What is large is run event by event; but for a block that is released before the
large pool is asked again, which changes nothing if the pool holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sizer.memory.loop_sums import Sums
from sizer.memory.loops import DEPTH, Repetition
from sizer.memory.replay import LoopReplay
from sizer.memory.tape import Tape

MOST_REMEMBERED = 2**15  # stretches


class Pools(Protocol):
    """An allocator with a pool of small blocks and one of large ones.

    `run` is as in CudaCache; what it does concerns the stream last named to `use`.
    A pool of small blocks is the tuple that `small_pool` gives, and can be set to be one again.
    """

    capacity: int | None
    reserved: int
    retries: int
    grown: list[tuple[int, int]]
    started: int
    position: int
    small_size: int
    small_segment: int
    large_segment: int  # no request is given more than this beyond its size

    def rounded(self, sizes: Sequence[int]) -> np.ndarray:
        """Bytes as they are asked of the pools, 0 for nothing."""

    def use(self, stream: int) -> None:
        """From here on all that is asked for and released is of this stream."""

    def run(self, events: Sequence[int], taken: list[int], addresses: list[int]) -> bool:
        """Whether the events found room."""

    def small_pool(self) -> tuple[int, ...]:
        """The free blocks of the small pool."""

    def set_small_pool(self, blocks: tuple[int, ...]) -> None:
        """Make these the free blocks of the small pool."""

    def would_take(self, size: int) -> int | None:
        """The bytes that a large block of `size` would take of what is cached; None where there is no room."""

    def release_cached(self) -> None:
        """Give back to the device what no block uses (`torch.cuda.empty_cache()`)."""


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """Events that follow each other in a step; `places` are their places in it.

    In a stretch of small blocks `inputs` are blocks of before that it releases, `outputs` those that it leaves, `growing` those
    that grow, `passing` large ones that are released at once; `small` are its events without those. `key` tells stretches of the
    same work, None where all are large.
    """

    events: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    small: list[int] = field(default_factory=list)
    small_places: list[int] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    growing: tuple[int, ...] = ()
    passing: tuple[int, ...] = ()
    key: int | None = None


class LoopRunner:
    """The loops of one tape on one allocator. `taken` and `addresses` are by block; in a loop they are those of its last step."""

    def __init__(self, pools: Pools, taken: list[int], addresses: list[int]) -> None:
        self.pools, self.taken, self.addresses = pools, taken, addresses
        self._numbers: dict[object, int] = {}  # of works, and of small pools
        self._blocks: list[object] = []  # the small pools by number
        self._known: dict[tuple, tuple[int, tuple[int, ...]]] = {}
        self._state, self._set = -1, -1  # the small pool as it should be, and the one that the allocator has
        self.failed_at: int | None = None  # the place in the step of the request that found no room
        self._grown: list[tuple[int, int]] = []  # in this step, after how many events how much was reserved

    def run(self, tape: Tape, again: Repetition, rounded: Iterable[np.ndarray], before: np.ndarray) -> LoopReplay:
        """Every step of a loop, up to the first request that finds no room.

        `rounded` are the bytes of the step's blocks each time, as they are asked for, `before` the bytes alive by category.
        """
        self._state = self._set = self._number(self.pools.small_pool())
        sums = Sums(tape, again, before, self.taken)
        blocks = again.blocks.tolist()
        history = [self.pools.rounded(again.sizes_at(-steps)) for steps in range(DEPTH + 1)]
        kinds = [self._kinds(sizes) for sizes in history]
        planned_for: list[bytes] = []
        for sizes in rounded:
            for old, block in again.moves:
                self.addresses[old], self.taken[old] = self.addresses[block], self.taken[block]
            changed = np.flatnonzero(sizes != history[0]).tolist()
            history = [sizes, *history[:-1]]
            kinds = [self._kinds(sizes), *kinds[:-1]]
            if kinds != planned_for:
                planned_for, large = kinds, np.flatnonzero(sizes > self.pools.small_size).tolist()
                stretches = self._stretches(again, [one.tolist() for one in history])
            for place in (*changed, *large):
                self.taken[blocks[place]] = int(sizes[place])
            reserved, self._grown = self.pools.reserved, []
            done = self._step(stretches)
            really = sizes.copy()
            really[large] = [self.taken[blocks[place]] for place in large]
            if not done:
                sums.refused(really, self.failed_at)
                break
            sums.add(really, reserved, self._grown)
        self._settle()
        return sums.found()

    def _kinds(self, sizes: np.ndarray) -> bytes:
        """By block whether it is none, small or large."""
        return ((sizes > 0).astype(np.uint8) + (sizes > self.pools.small_size)).tobytes()

    def _step(self, stretches: list[_Stretch]) -> bool:
        for stretch in stretches:
            if stretch.key is not None and self._in_passing(stretch):
                self._small(stretch)
                continue
            retries = self.pools.retries
            if stretch.key is not None or self._may_be_refused(stretch):
                self._settle()
            if not self._run(stretch.events, stretch.places):
                return False
            if stretch.key is not None or self.pools.retries > retries:
                self._state = self._set = self._number(self.pools.small_pool())
        return True

    def _may_be_refused(self, stretch: _Stretch) -> bool:
        """Whether new segments for all requests of a stretch would be too much: cached memory may then be given back."""
        pools = self.pools
        if pools.capacity is None:
            return False
        asked = [self.taken[event] for event in stretch.events if event >= 0]
        return pools.reserved + sum(asked) + len(asked) * pools.large_segment > pools.capacity

    def _in_passing(self, stretch: _Stretch) -> bool:
        """Whether a stretch concerns the small pool alone: large blocks pass, and no request could be refused."""
        pools, taken = self.pools, self.taken
        if pools.capacity is not None and pools.reserved + pools.small_segment > pools.capacity:
            return False
        found: dict[int, int | None] = {}
        for block in stretch.passing:
            size = taken[block]
            if size not in found:
                found[size] = pools.would_take(size)
            if found[size] is None:
                return False
        for block in stretch.passing:
            taken[block] = found[taken[block]]
        return True

    def _small(self, stretch: _Stretch) -> None:
        """Do a stretch of small blocks, or what it came to when it was last done in the same pool."""
        taken, addresses = self.taken, self.addresses
        inputs = tuple([number for block in stretch.inputs for number in (addresses[block], taken[block])])
        key = (stretch.key, self._state, inputs, tuple([taken[block] for block in stretch.growing]))
        known = self._known.get(key)
        if known is None:
            self._settle()
            self._run(stretch.small, stretch.small_places)
            self._state = self._set = self._number(self.pools.small_pool())
            if len(self.pools.grown) == 1:
                if len(self._known) >= MOST_REMEMBERED:
                    self._known.clear()
                self._known[key] = self._state, tuple([addresses[block] for block in stretch.outputs])
            return
        self._state, found = known
        for block, address in zip(stretch.outputs, found, strict=True):
            addresses[block] = address

    def _run(self, events: list[int], places: list[int]) -> bool:
        pools = self.pools
        retries = pools.retries
        done = pools.run(events, self.taken, self.addresses)
        self._grown += [(places[position], reserved) for position, reserved in pools.grown[1:]]
        if len(pools.grown) > 1 or pools.retries > retries:
            self._known.clear()
        if not done:
            self.failed_at = places[pools.position]
        return done

    def _settle(self) -> None:
        """Give the allocator the small pool as it should be."""
        if self._set != self._state:
            self.pools.set_small_pool(self._blocks[self._state])
            self._set = self._state

    def _number(self, value: object) -> int:
        number = self._numbers.setdefault(value, len(self._blocks))
        if number == len(self._blocks):
            self._blocks.append(value)
        return number

    def _stretches(self, again: Repetition, history: list[list[int]]) -> list[_Stretch]:
        """The step in stretches, where blocks take the bytes of `history`, in this step and those before it."""
        steps_and_places = {block: (0, place) for place, block in enumerate(again.blocks.tolist())}
        steps_and_places |= {block: (steps, place) for block, steps, place in again.earlier}
        events = again.events.tolist()

        def size_of(block: int) -> int:
            steps, place = steps_and_places[block]
            return history[steps][place]

        passing = _passing(events, lambda block: size_of(block) > self.pools.small_size)
        stretches: list[_Stretch] = []
        for place, event in enumerate(events):
            block = event if event >= 0 else ~event
            if not size_of(block):
                continue
            small = block in passing or size_of(block) <= self.pools.small_size
            if not stretches or (stretches[-1].key is not None) != small:
                stretches.append(_Stretch(key=0 if small else None))
            stretches[-1].events.append(event)
            stretches[-1].places.append(place)
        growing = {block for block, by in zip(again.blocks.tolist(), again.growth.tolist(), strict=True) if by}
        for stretch in stretches:
            if stretch.key is not None:
                self._describe(stretch, passing, growing, size_of)
        return stretches

    def _describe(self, stretch: _Stretch, passing: set[int], growing: set[int], size_of: Callable[[int], int]) -> None:
        """Fill in what a stretch of small blocks takes, leaves and is."""
        numbers: dict[int, int] = {}
        released: set[int] = set()
        inputs: dict[int, int] = {}
        work: list[object] = []
        for place, event in zip(stretch.places, stretch.events, strict=True):
            block = event if event >= 0 else ~event
            if block in passing:
                continue
            stretch.small.append(event)
            stretch.small_places.append(place)
            if event >= 0:
                numbers[block] = len(numbers)
                work.append("grows" if block in growing else size_of(block))
            else:
                released.add(block)
                work.append(~numbers[block] if block in numbers else ("in", inputs.setdefault(block, len(inputs))))
        stretch.inputs = tuple(inputs)
        stretch.outputs = tuple(block for block in numbers if block not in released)
        stretch.growing = tuple(block for block in numbers if block in growing)
        stretch.passing = tuple({~event for event in stretch.events if event < 0} & passing)
        stretch.key = self._number(("work", tuple(work)))


def _passing(events: list[int], is_large: Callable[[int], bool]) -> set[int]:
    """The large blocks that are released before the large pool is asked or given anything else."""
    found, last = set(), None
    for event in events:
        block = event if event >= 0 else ~event
        if is_large(block):
            if event < 0 and last == block:
                found.add(block)
            last = event
    return found

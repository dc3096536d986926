"""Unfold the tape of a model that processes the samples of a batch one by one, such as a detection model.

Each sample adds events to the tape, so an AffineTape (sizer.tape.affine) does not describe it. The events of a sample repeat those
of the previous sample, as equal layers repeat each other (sizer.tape.unfold). Other blocks grow as in an AffineTape. Traces at two
batch sizes give the tape at each larger batch size.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sizer.tape.affine import LIMIT_BYTES, NotAffineError, check_tape
from sizer.tape.loop_choices import with_outputs
from sizer.tape.size_queries import AffineSizeQuery, Answer, SizeQuery, by_block, fit_size_queries, gather
from sizer.tape.stretches import LayersDifferError
from sizer.tape.tape import Tape
from sizer.tape.unfold import Aligned, align

LIMIT_EVENTS = 2**23  # of one tape: a column of numbers has 64 MiB then


@dataclass(frozen=True, kw_only=True)
class PerSampleTape:
    """Work with some events for each sample of the batch: the tapes of two traces, the second with one sample more.

    Both tapes are as `in_order` returns them. `outputs` is the training loop of the request (sizer.tape.loop_choices), None if the
    request leaves it open. Writing and reading a PerSampleTape does not align its tapes.
    """

    first: Tape
    second: Tape
    outputs: str | None = None

    @cached_property
    def _aligned(self) -> Aligned:
        try:
            return align(self.first, self.second)
        except LayersDifferError as error:
            raise NotAffineError(f"{error}: trace each batch separately") from error

    @cached_property
    def _queries(self) -> tuple[AffineSizeQuery, ...]:
        try:
            return _fit_queries(self._aligned)
        except ValueError as error:
            raise NotAffineError(f"{error}: trace each batch separately") from error

    @property
    def fitted_at(self) -> tuple[int, int]:
        """Return the batch sizes of the two traces."""
        return self.first.batch, self.second.batch

    @property
    def tape(self) -> Tape:
        """Return the tape of the first trace."""
        return self.first

    @property
    def events_per_sample(self) -> int:
        """Return by how many events the tape grows with each sample."""
        return len(self.second.order) - len(self.first.order)

    def batch_of(self, events: int) -> int:
        """Return the largest batch with a tape of at most this number of events."""
        return self.first.batch + (events - len(self.first.order)) // self.events_per_sample

    def common_events(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the events that the tapes of all batch sizes have, in the first and in the second tape."""
        return self._aligned.common_events()

    def with_dtype(self, dtype: str, *, instead_of: str) -> PerSampleTape:
        """Return the tape with size queries of another dtype."""
        first, second = (tape.with_dtype(dtype, instead_of=instead_of) for tape in (self.first, self.second))
        return replace(self, first=first, second=second)

    def with_sizes(self, size: Answer, *, answered: Collection[str]) -> PerSampleTape:
        """Return the tape with given sizes, as `TapeFamily.with_sizes`."""
        first, second = (tape.with_sizes(size, answered=answered) for tape in (self.first, self.second))
        return replace(self, first=first, second=second)

    def with_outputs(self, outputs: str | None) -> PerSampleTape:
        """Return the tape of a loop that frees or keeps the outputs."""
        return replace(self, outputs=outputs)

    def evaluate(self, batch: int) -> Tape:
        """Return the tape (bytes per block) of the same work at another batch size, with unresolved size queries.

        Raises NotAffineError if a size would be negative or the work differs at this batch size. Raises ValueError if the batch
        is smaller than the first one, or so large that the tape would have more than LIMIT_EVENTS events or 2**62 bytes.
        """
        if batch == self.first.batch:
            return with_outputs(self.first, self.outputs)[0]
        periods = batch - self.first.batch
        if periods < 0:
            raise ValueError(f"batch was {batch}; it must be at least {self.first.batch}: give a larger one")
        if (events := len(self.first.order) + periods * self.events_per_sample) > LIMIT_EVENTS:
            largest = self.batch_of(LIMIT_EVENTS)
            raise ValueError(f"batch was {batch}; its tape would have {events:.1e} events: give {largest} at most")
        try:
            unfolded = self._aligned.unfold(periods)
        except LayersDifferError as error:
            raise NotAffineError(f"{error}: trace batch {batch} separately") from error
        sizes = np.asarray(unfolded.tape.sizes)
        if int(sizes.sum(dtype=np.float64)) >= LIMIT_BYTES:
            raise ValueError(f"batch was {batch}; its blocks would take too many bytes: give a smaller batch")
        if len(sizes) and sizes.min() < 0:
            block = int(sizes.argmin())
            raise NotAffineError(
                f"{unfolded.tape.describe(block)} would need {sizes[block]} bytes at batch {batch}; sizes are 0 bytes or more: "
                f"trace batch {batch} separately"
            )
        tape = replace(unfolded.tape, batch=batch, size_queries=self._queries_at(batch, unfolded.sources))
        return with_outputs(tape, self.outputs)[0]

    def check(self, third: Tape) -> None:
        """Raise NotAffineError if a third trace differs from the line, as `AffineTape.check`."""
        check_tape(self.evaluate(third.batch), in_order(third), self.fitted_at)

    def _queries_at(self, batch: int, sources: np.ndarray) -> tuple[SizeQuery, ...]:
        asked = by_block(query.evaluate(batch) for query in self._queries)
        if not asked:
            return ()
        return gather({block: asked[of] for block, of in enumerate(sources.tolist()) if of in asked})


def fit_per_sample(first: Tape, second: Tape) -> PerSampleTape:
    """Return the tape over the batch size, from traces of the same work at a batch size and at the next one.

    Raises NotAffineError if the additional events of the second tape repeat nothing. Two tapes can agree by chance: check a third.
    """
    if second.batch != first.batch + 1:
        raise ValueError(f"the tapes are of batch {first.batch} and {second.batch}; trace one sample more")
    line = PerSampleTape(first=in_order(first), second=in_order(second))
    line.evaluate(second.batch + 1)  # raises if it cannot be predicted
    return line


def in_order(tape: Tape) -> Tape:
    """Return the tape with each run of releases sorted by block; the allocator's state after a run is the same.

    The order in which Python releases the local variables of a function depends on the number of samples.
    """
    events = np.asarray(tape.order, np.int64)
    ends = [position for position, _ in tape.marks] + ([tape.second_forward] if tape.second_forward else [])
    begins = np.zeros(len(events) + 1, np.int64)
    begins[ends] = 1
    begins[1:-1] += np.diff((events < 0).astype(np.int64)) != 0
    runs = np.cumsum(begins[:-1] > 0)
    order = np.lexsort((np.where(events < 0, ~events, np.arange(len(events))), runs))
    return replace(tape, order=array("q", events[order].tobytes()))


def _fit_queries(aligned: Aligned) -> tuple[AffineSizeQuery, ...]:
    """Return the size queries of the second tape's blocks over the batch size. Those of a sample's own blocks are constant."""
    one, two = aligned.first, aligned.second
    ours, theirs = (
        rows.blocks[events[rows.allocates[events]]].tolist()
        for rows, events in zip((one, two), aligned.common_events(), strict=True)
    )
    before, after = by_block(one.tape.size_queries), by_block(two.tape.size_queries)
    if not before and not after:
        return ()
    earlier = after.copy()
    for block, counterpart in zip(ours, theirs, strict=True):
        if (block in before) != (counterpart in after):
            raise ValueError(f"{one.tape.describe(block)} has a size query at only one batch size")
        if block in before:
            earlier[counterpart] = before[block]
    return fit_size_queries(earlier, after, (one.tape.batch, two.tape.batch))

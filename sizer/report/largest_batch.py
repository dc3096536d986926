"""Largest batch that fits a device, found by a search over replays with the device's real capacity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from sizer.allocator.timeline import bytes_alive, peak_requested_bytes
from sizer.catalogue.gpus import Gpu
from sizer.report.bounds import BETWEEN_VERSIONS, modelled_blocks, without_models
from sizer.report.fit import Fits, Room, largest_work, possibly_runs, smallest_work, surely_runs
from sizer.report.interval import Interval
from sizer.report.replays import Replays
from sizer.tape.affine import AffineTape
from sizer.tape.family import TapeFamily
from sizer.tape.loops import repeated_events
from sizer.tape.per_sample import PerSampleTape
from sizer.tape.size_queries import SizeOracle
from sizer.tape.tape import Tape

LARGEST_BATCH = 2**20
# The allocator of a full device mostly leaves unused this fraction of the batch, and these samples: a search begins there. By
# 1,157 searches (13 kinds of work on 89 devices); a third of them then end with the second batch size tried.
FRAGMENTED, UNUSED = 200, 2
MOST_SEARCHED = 2**22  # events of loops that are replayed for each batch size of a search
MOST_WRITTEN = 2**20  # events of a tape with some for each sample, which is written for each batch size of a search


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxBatch:
    """Largest batch that surely fits and largest that may; None with a `reason` if even 1 does not fit.

    With `tried` only the requested batch sizes were tested, and these are the largest of them. `most_batch` is then the largest
    not known to fail, None without such a bound.
    """

    dtype: str
    batch: int | None
    possible_batch: int | None
    reason: str
    tried: bool = False
    most_batch: int | None = None

    @property
    def interval(self) -> Interval:
        """Return the interval of the largest batch."""
        if self.tried:
            return Interval(least=self.batch or 0, most=self.most_batch)
        return Interval(
            least=self.batch or 0, most=None if self.batch == LARGEST_BATCH else self.possible_batch or 0
        )


def largest_batch(
    family: TapeFamily,
    gpu: Gpu,
    *,
    dtype: str,
    oracle: SizeOracle | None = None,
    known: Mapping[int, Fits] | None = None,
    expandable_segments: bool = False,
) -> MaxBatch:
    """Return the largest batch that surely fits, and the largest that may, up to 2**20; one sample more does not fit.

    The answer does not depend on earlier queries: verdicts in `known` are not computed again, and decide nothing else.

    The search assumes that work that fits at one batch fits at every smaller one. Fragmentation can break this assumption: on
    CUDA mostly within 1 % of the answer, within 10 % if layers are few and large or checkpointed. On MPS the range is wider,
    since large buffers have heaps of another kind. The start of the search then decides which of the answers is found.

    For work without lines these are the largest of the traced batches. For a long generation they are the largest replayed
    batch and the largest with tensors that the device would hold. Work with events for each sample is searched as far as its
    tape has MOST_WRITTEN events. The reason says so.

    Raises NotAffineError if the family has no tape at a batch of the search.
    """
    known = known or {}
    if not family.lines:
        return _largest_traced(known, dtype, family.smallest)
    if _is_long(family):
        return _largest_tried(family, gpu, known, dtype, oracle)

    def room(batch: int, work: Callable[[Tape, Gpu], Room]) -> int:
        if not batch:
            return 0
        tape = family.evaluate(batch)  # the margin of engines does not depend on cuDNN's answers, so they are not requested
        asked = [block for query in tape.size_queries for block in query.blocks] if oracle else []
        return work(replace(tape, resolved=frozenset(asked)), gpu)[1]

    def verdict(batch: int, holds: Callable[[Tape, Gpu, bool], bool], wanted: tuple[Fits, ...]) -> bool:
        return known[batch] in wanted if batch in known else holds(family.evaluate(batch, oracle), gpu, expandable_segments)

    end = _end_of_search(family)
    bound = min(_sure_bound(family, gpu, oracle), end)
    start = _batch_bound(family, room(bound, largest_work), with_modelled=True)
    sure = search(lambda batch: verdict(batch, surely_runs, (True,)), bound, start=start - start // FRAGMENTED - UNUSED)
    most = (gpu.total_bytes - gpu.context_low_bytes) * 100 // (100 - BETWEEN_VERSIONS)
    highest = _batch_bound(family, most, with_modelled=False)
    ceiling = min(highest, end)
    near = _batch_bound(family, room(ceiling, smallest_work), with_modelled=False)
    near = near * sure // start + 1 if start else ceiling
    possible = search(lambda batch: verdict(batch, possibly_runs, (True, "uncertain")), ceiling, start=near, low=sure)
    least, largest = (batch if batch >= family.smallest else None for batch in (sure, possible))
    found = MaxBatch(dtype=dtype, batch=least, possible_batch=largest, reason=_reason(least, largest, gpu, family))
    if possible < ceiling or highest <= end:
        return found
    return replace(found, reason=f"searched up to {end}: replays of more samples take long", tried=True, most_batch=highest)


def find_largest_batch(
    family: TapeFamily,
    gpu: Gpu,
    *,
    dtype: str,
    oracle: SizeOracle | None = None,
    oracle_name: str | None = None,
    known: Mapping[int, Fits] | None = None,
    expandable_segments: bool = False,
    replays: Replays,
) -> MaxBatch:
    """Return the result of `largest_batch`, searched once for equal tapes and devices.

    `oracle_name` names the source of the oracle's answers. Without an oracle, devices with equal memory share a result.
    """

    def search_it() -> MaxBatch:
        return largest_batch(
            family, gpu, dtype=dtype, oracle=oracle, known=known, expandable_segments=expandable_segments
        )

    if not family.lines or _is_long(family):
        return search_it()
    device = gpu if oracle else replace(gpu, key="", name="", source="")
    key = f"{dtype} {device} {oracle_name} {expandable_segments} {family.digest()}"
    found = replays.find(key, MaxBatch, search_it)
    return found if found.tried else replace(found, reason=_reason(found.batch, found.possible_batch, gpu, family))


def likely_largest(family: TapeFamily, batches: Iterable[int], gpu: Gpu, oracle: SizeOracle | None) -> tuple[int, ...]:
    """Return the batch sizes with tensors that fit the device, largest first; only the smallest if none fits.

    No other batch size surely fits, and nothing is replayed to find that out. Empty if the work is not affine in the batch.
    """
    if not family.lines:
        return ()
    bound = _sure_bound(family, gpu, oracle)
    ordered = sorted(batches, reverse=True)
    return tuple(batch for batch in ordered if batch <= bound) or tuple(ordered[-1:])


def _largest_traced(verdicts: Mapping[int, Fits], dtype: str, smallest: int) -> MaxBatch:
    """Return the largest batch that fits among separately traced ones."""
    sure = max((batch for batch, fits in verdicts.items() if fits is True), default=None)
    possible = max((batch for batch, fits in verdicts.items() if fits is not False), default=None)
    tried = ", ".join(str(batch) for batch in sorted(verdicts))
    return MaxBatch(
        dtype=dtype,
        batch=sure,
        possible_batch=possible,
        reason=f"only the separately traced batches were tested: {tried or 'none'}",
        tried=True,
        most_batch=_most(verdicts, smallest),
    )


def _most(verdicts: Mapping[int, Fits], smallest: int) -> int | None:
    """Return the largest batch below all that do not fit, 0 if the smallest does not, None if all of them may fit."""
    below = min((batch for batch, fits in verdicts.items() if fits is False), default=None)
    return below if below is None else below - 1 if below > smallest else 0


def _is_long(family: TapeFamily) -> bool:
    """Return True if the work is a generation with too many steps for a search, which would replay them for minutes."""
    return any(repeated_events(line.tape) > MOST_SEARCHED for _, line in family.lines)


def _largest_tried(
    family: TapeFamily, gpu: Gpu, known: Mapping[int, Fits], dtype: str, oracle: SizeOracle | None
) -> MaxBatch:
    """Return the largest tried batch that fits, and the largest with tensors that would fit.

    Replays of a long generation are slow, so no further batches are replayed.
    """
    capacity = gpu.total_bytes - gpu.context_low_bytes
    ceiling = _batch_bound(family, capacity, with_modelled=False)
    near = max((batch for batch, fits in known.items() if fits is not False), default=1)
    possible = search(
        lambda batch: peak_requested_bytes(without_models(family.evaluate(batch, oracle))) <= capacity, ceiling, start=near
    )
    sure = max((batch for batch, fits in known.items() if fits is True), default=None)
    if possible < family.smallest:
        return no_batch(dtype, gpu, family.smallest)
    return MaxBatch(
        dtype=dtype,
        batch=sure,
        possible_batch=possible,
        reason="a long generation is only tested at the requested batches; above the second figure the tensors alone do not fit",
        tried=True,
        most_batch=possible if (most := _most(known, family.smallest)) is None else min(possible, most),
    )


def search(holds: Callable[[int], bool], bound: int, *, start: int, low: int = 0) -> int:
    """Return the largest batch up to `bound` that holds while the next one does not; `low` if no larger one does.

    `low` is assumed to hold. The search goes from `start` in steps that double until it has passed the answer, then bisects the
    remaining interval.
    """
    high, guess, step = bound + 1, start, 1 + start // 1024
    verdicts: set[bool] = set()
    while high - low > 1:
        if len(verdicts) == 2:
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        verdict = holds(guess)
        verdicts.add(verdict)
        low, high = (guess, high) if verdict else (low, guess)
        guess += step if verdict else -step
        step *= 2
    return low


def _end_of_search(family: TapeFamily) -> int:
    """Return the largest batch with a tape that a search may write."""
    per_sample = [line for _, line in family.lines if isinstance(line, PerSampleTape)]
    return min(
        (line.batch_of(MOST_WRITTEN) for line in per_sample if line.events_per_sample), default=LARGEST_BATCH
    )


def _sure_bound(family: TapeFamily, gpu: Gpu, oracle: SizeOracle | None) -> int:
    """Return an upper bound of the batches that surely fit."""
    return _batch_bound(family, gpu.total_bytes - gpu.context_high_bytes, with_modelled=oracle is None)


def _batch_bound(family: TapeFamily, capacity: int, *, with_modelled: bool) -> int:
    """Return the largest batch, up to 2**20, with unrounded tensor bytes never above `capacity`: no larger batch fits.

    `with_modelled` also counts modelled workspaces.
    """
    ends = [first - 1 for first, _ in family.lines[1:]] + [LARGEST_BATCH]
    found = 0
    for (first, line), end in zip(family.lines, ends, strict=True):
        bound = min(end, _line_bound(line, capacity, with_modelled=with_modelled))
        found = bound if bound >= first else found
    return found


def _bytes_over_batch(
    line: AffineTape | PerSampleTape, *, with_modelled: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return, at each event common to all batch sizes, the bytes alive without a sample, and the bytes that each sample adds."""

    def kept(tape: Tape) -> np.ndarray | bool:
        return True if with_modelled else ~modelled_blocks(tape)

    if isinstance(line, AffineTape):
        order, mask = line.tape.order, kept(line.tape)
        return bytes_alive(order, np.asarray(line.constant) * mask), bytes_alive(order, np.asarray(line.per_item) * mask)
    first, second = (
        bytes_alive(tape.order, np.asarray(tape.sizes) * kept(tape))[1:][events]
        for tape, events in zip((line.first, line.second), line.common_events(), strict=True)
    )
    return first - (second - first) * line.first.batch, second - first


def _line_bound(line: AffineTape | PerSampleTape, capacity: int, *, with_modelled: bool) -> int:
    constants, slopes = _bytes_over_batch(line, with_modelled=with_modelled)
    grows = slopes > 0
    bounds = np.full(len(slopes), LARGEST_BATCH)  # by each event
    bounds[grows] = np.minimum((capacity - constants[grows]) // slopes[grows], LARGEST_BATCH)
    bounds = np.minimum.accumulate(bounds)
    if (constants + slopes * bounds > capacity)[~grows].any():
        return 0
    return max(int(bounds[-1]), 0)


def no_batch(dtype: str, gpu: Gpu, smallest: int) -> MaxBatch:
    """Return the result for work that does not fit at its smallest batch size."""
    return MaxBatch(dtype=dtype, batch=None, possible_batch=None, reason=_too_much(gpu, smallest))


def _reason(sure: int | None, possible: int | None, gpu: Gpu, family: TapeFamily) -> str:
    if possible is None:
        return _too_much(gpu, family.smallest)
    if sure is None:
        return f"a batch of {family.smallest} may or may not fit the {gpu.name}"
    if sure == LARGEST_BATCH:
        return f"searched up to {LARGEST_BATCH}"
    return ""


def _too_much(gpu: Gpu, smallest: int) -> str:
    return f"not even a batch of {smallest} fits the {gpu.name}"

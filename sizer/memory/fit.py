"""Does the work fit a device, and up to which batch? Answered by replays with the device's real capacity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sizer.catalogue.gpus import Gpu
from sizer.memory.affine import AffineTape
from sizer.memory.allocator import replay_events
from sizer.memory.bounds import (
    BETWEEN_VERSIONS,
    CONTEXT,
    ENGINES,
    MODELS,
    STREAMS,
    ZERO_GRAD,
    Margin,
    at_its_largest,
    engines_limit,
    engines_margin,
    modelled_blocks,
    without_models,
)
from sizer.memory.family import TapeFamily
from sizer.memory.loops import repeated_events
from sizer.memory.replays import Replays
from sizer.memory.size_queries import SizeOracle
from sizer.memory.tape import Tape
from sizer.memory.timeline import (
    Timeline,
    peak_bytes,
    peak_requested_bytes,
    read_failure,
    read_timeline,
    running_bytes,
)
from sizer.memory.unbounded import Unbounded, replay_unbounded

Fits = bool | Literal["uncertain"]

LARGEST_BATCH = 2**20
MOST_SEARCHED = 2**22  # events of loops that are replayed for each batch size of a search


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One piece of work on one device: its memory, what the process holds in bytes as a range, whose parts are `margins`, and
    whether it fits."""

    timeline: Timeline
    process_bytes: int
    process_low_bytes: int
    process_high_bytes: int
    margins: tuple[Margin, ...]
    fits: Fits


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxBatch:
    """The largest batch that surely fits and the largest that may; None with the reason where not even 1 does."""

    dtype: str
    batch: int | None
    possible_batch: int | None
    reason: str


def fit(tape: Tape, gpu: Gpu, *, expandable_segments: bool = False, unbounded: Unbounded | None = None) -> Fit:
    """Whether a tape's work fits a device, and the bytes that its process would hold there.

    `process_bytes` is what nvidia-smi would show: the allocator's peak reserved bytes plus the device's context. On MPS
    it is the heaps' part of torch.mps.driver_allocated_memory(); on the CPU the tensors' bytes; both have no context.

    The range is that of what is uncertain (sizer.memory.bounds): a small or a large context, the engines of another version of
    cuDNN, and by replays modelled workspaces, gradients that live through the next forward pass and blocks that wait for other
    streams.
    `fits` is True where the work with all that makes it large runs on the device, False where the work with all that makes it
    small does not, else "uncertain"; both are replays that may give cached memory back and try again, as the device would. Where
    that is what makes it fit, the range ends at the device's memory: the process takes all of it and no more.

    The timeline is the one on this device where the work fits. Where it does not, it is that of a device large enough,
    with `out_of_memory` saying what would fail on this one. Where the tape's `unbounded` memory is known, it is replayed only on a
    device that is too small for it.
    """
    unbounded = unbounded or replay_unbounded(tape, gpu.backend, expandable_segments=expandable_segments)
    margins = _margins(unbounded, gpu)
    timeline = _timeline_on(tape, gpu, unbounded.timeline, expandable_segments)
    process = timeline.peak_reserved_bytes + gpu.context_bytes
    more = sum(margin.more_bytes for margin in margins)
    fits = fits_in(tape, gpu, expandable_segments=expandable_segments, unbounded=unbounded)
    return Fit(
        timeline=timeline,
        process_bytes=process,
        process_low_bytes=process - sum(margin.less_bytes for margin in margins),
        process_high_bytes=min(process + more, gpu.total_bytes) if fits is True else process + more,
        margins=margins,
        fits=fits,
    )


def fits_in(tape: Tape, gpu: Gpu, *, expandable_segments: bool = False, unbounded: Unbounded | None = None) -> Fits:
    """True, False or "uncertain" as in `fit`, which says what they mean, without the timeline."""
    if _surely(tape, gpu, expandable_segments, unbounded and unbounded.large_bytes):
        return True
    return "uncertain" if _possibly(tape, gpu, expandable_segments, unbounded and unbounded.few_bytes) else False


def largest_batch(
    family: TapeFamily,
    gpu: Gpu,
    *,
    dtype: str,
    oracle: SizeOracle | None = None,
    known: Mapping[int, Fits] | None = None,
    expandable_segments: bool = False,
) -> MaxBatch:
    """The largest batch whose work surely fits, and the largest that may, up to 2**20; with one sample more it does not.

    The answer is the same whatever was asked before: verdicts that are `known` are not computed again, and decide nothing else.
    It assumes that what fits at one batch fits at every smaller one, which fragmentation can break by an item or two.
    For work that is not affine in the batch these are the largest of the batches that were traced, for a long generation the
    largest that was replayed and the largest whose tensors the device would hold; the reason says so.
    Raises NotAffineError where the family has no tape at a batch that the search comes upon.
    """
    known = known or {}
    if not family.lines:
        return _largest_traced(known, dtype)
    if _is_long(family):
        return _largest_tried(family, gpu, known, dtype, oracle)

    def room(batch: int, work: Callable[[Tape, Gpu], Room]) -> int:
        if not batch:
            return 0
        tape = family.at(batch)  # how much engines may take does not hang on what they do take: nobody is asked
        asked = [block for query in tape.size_queries for block in query.blocks] if oracle else []
        return work(replace(tape, resolved=frozenset(asked)), gpu)[1]

    def verdict(batch: int, holds: Callable[[Tape, Gpu, bool], bool], wanted: tuple[Fits, ...]) -> bool:
        return known[batch] in wanted if batch in known else holds(family.at(batch, oracle), gpu, expandable_segments)

    bound = _batch_bound(family, gpu.total_bytes - gpu.context_high_bytes, with_modelled=oracle is None)
    start = _batch_bound(family, room(bound, _large), with_modelled=True)
    sure = search(lambda batch: verdict(batch, _surely, (True,)), bound, start=start)
    most = (gpu.total_bytes - gpu.context_low_bytes) * 100 // (100 - BETWEEN_VERSIONS)
    ceiling = _batch_bound(family, most, with_modelled=False)
    near = _batch_bound(family, room(ceiling, _small), with_modelled=False) * sure // start if start else ceiling
    possible = search(lambda batch: verdict(batch, _possibly, (True, "uncertain")), ceiling, start=near, low=sure)
    sure, possible = (batch if batch >= family.smallest else 0 for batch in (sure, possible))
    if not possible:
        return no_batch(dtype, gpu, family.smallest)
    return MaxBatch(dtype=dtype, batch=sure or None, possible_batch=possible, reason=_reason(sure, gpu, family))


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
    """What `largest_batch` returns, searched once for the same tapes and device; `oracle_name` says whose answers those are."""

    def search_it() -> MaxBatch:
        return largest_batch(
            family, gpu, dtype=dtype, oracle=oracle, known=known, expandable_segments=expandable_segments
        )

    if not family.lines or _is_long(family):
        return search_it()
    key = f"{dtype} {gpu} {oracle_name} {expandable_segments} {family.digest()}"
    return replays.find(key, MaxBatch, search_it)


def _largest_traced(verdicts: Mapping[int, Fits], dtype: str) -> MaxBatch:
    """The largest batch that fits among those traced one by one."""
    sure = max((batch for batch, fits in verdicts.items() if fits is True), default=None)
    possible = max((batch for batch, fits in verdicts.items() if fits is not False), default=None)
    tried = ", ".join(str(batch) for batch in sorted(verdicts))
    return MaxBatch(
        dtype=dtype,
        batch=sure,
        possible_batch=possible,
        reason=f"only the batches that were traced one by one were tried: {tried or 'none'}",
    )


def _is_long(family: TapeFamily) -> bool:
    """Whether the work is a generation of so many steps that a search would replay them for minutes."""
    return any(repeated_events(line.tape) > MOST_SEARCHED for _, line in family.lines)


def _largest_tried(
    family: TapeFamily, gpu: Gpu, known: Mapping[int, Fits], dtype: str, oracle: SizeOracle | None
) -> MaxBatch:
    """The largest batch that fits of those tried, and the largest whose tensors would: replays of a long generation take long."""
    capacity = gpu.total_bytes - gpu.context_low_bytes
    ceiling = _batch_bound(family, capacity, with_modelled=False)
    near = max((batch for batch, fits in known.items() if fits is not False), default=1)
    possible = search(
        lambda batch: peak_requested_bytes(without_models(family.at(batch, oracle))) <= capacity, ceiling, start=near
    )
    sure = max((batch for batch, fits in known.items() if fits is True), default=None)
    if possible < family.smallest:
        return no_batch(dtype, gpu, family.smallest)
    return MaxBatch(
        dtype=dtype,
        batch=sure,
        possible_batch=possible,
        reason="a long generation is tried at the batch sizes asked for alone; beyond the second figure tensors alone are too much",
    )


def _timeline_on(tape: Tape, gpu: Gpu, roomy: Timeline, expandable_segments: bool) -> Timeline:
    capacity = gpu.total_bytes - gpu.context_bytes
    if roomy.peak_reserved_bytes <= capacity:
        return roomy
    tight = replay_events(tape, gpu.backend, capacity, expandable_segments)
    failure = read_failure(tape, tight)
    return read_timeline(tape, tight) if failure is None else replace(roomy, out_of_memory=failure)


def _margins(unbounded: Unbounded, gpu: Gpu) -> tuple[Margin, ...]:
    """What the process may hold less and more than estimated, by what is uncertain; without the parts that come to nothing."""
    reserved = unbounded.timeline.peak_reserved_bytes
    engines = engines_margin(unbounded.engines_limit_bytes, reserved)
    found = (
        Margin(
            name=CONTEXT,
            less_bytes=gpu.context_bytes - gpu.context_low_bytes,
            more_bytes=gpu.context_high_bytes - gpu.context_bytes,
        ),
        Margin(name=ENGINES, less_bytes=engines, more_bytes=engines),
        Margin(
            name=MODELS,
            less_bytes=max(0, reserved - unbounded.few_bytes),
            more_bytes=max(0, unbounded.many_bytes - reserved),
        ),
        Margin(name=ZERO_GRAD, less_bytes=0, more_bytes=max(0, unbounded.kept_bytes - reserved)),
        Margin(name=STREAMS, less_bytes=0, more_bytes=max(0, unbounded.behind_bytes - reserved)),
    )
    return tuple(margin for margin in found if margin.less_bytes or margin.more_bytes)


Room = tuple[Tape, int]  # work, and the bytes that its device has for it


def _large(tape: Tape, gpu: Gpu) -> Room:
    """The work with all that makes it large, beside the largest context and what engines may take."""
    capacity = gpu.total_bytes - gpu.context_high_bytes
    capacity -= engines_margin(engines_limit(tape), max(0, capacity) * 100 // (100 + BETWEEN_VERSIONS))
    return at_its_largest(tape), capacity


def _small(tape: Tape, gpu: Gpu) -> Room:
    """The work with all that makes it small, beside the smallest context."""
    capacity = gpu.total_bytes - gpu.context_low_bytes
    capacity += engines_margin(engines_limit(tape), max(0, capacity) * 100 // (100 - BETWEEN_VERSIONS))
    return without_models(tape), capacity


def _surely(tape: Tape, gpu: Gpu, expandable_segments: bool, reserved: int | None = None) -> bool:
    """Whether the work runs with all that makes it large; `reserved` is what that reserves without bound, where that is known."""
    return _runs(*_large(tape, gpu), gpu, expandable_segments, reserved)


def _possibly(tape: Tape, gpu: Gpu, expandable_segments: bool, reserved: int | None = None) -> bool:
    """Whether the work runs with all that makes it small; `reserved` as in `_surely`."""
    return _runs(*_small(tape, gpu), gpu, expandable_segments, reserved)


def _runs(tape: Tape, capacity: int, gpu: Gpu, expandable_segments: bool, reserved: int | None) -> bool:
    """Whether the work runs in `capacity` bytes, by a replay where nothing less tells."""
    if capacity <= 0:
        return False
    if reserved is not None and reserved <= capacity:  # nothing is ever refused
        return True
    if peak_bytes(tape.order, tape.sizes) > capacity:  # no allocator takes less than is asked for
        return False
    return replay_events(tape, gpu.backend, capacity, expandable_segments).failed_at is None


def search(holds: Callable[[int], bool], bound: int, *, start: int, low: int = 0) -> int:
    """The largest batch up to `bound` that holds while the next one does not; `low`, which is taken to hold, where none above does.

    Goes from `start` in steps that double until it has passed the answer, then bisects what is left.
    """
    high, guess, step, verdicts = bound + 1, start, 1 + start // 1024, set()
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


def _batch_bound(family: TapeFamily, capacity: int, *, with_modelled: bool) -> int:
    """The largest batch, up to 2**20, whose tensors (not rounded) never exceed `capacity` bytes: no larger one fits.

    `with_modelled` counts the workspaces whose size is a model.
    """
    ends = [first - 1 for first, _ in family.lines[1:]] + [LARGEST_BATCH]
    found = 0
    for (first, line), end in zip(family.lines, ends, strict=True):
        bound = min(end, _line_bound(line, capacity, with_modelled=with_modelled))
        found = bound if bound >= first else found
    return found


def _line_bound(line: AffineTape, capacity: int, *, with_modelled: bool) -> int:
    order, kept = line.tape.order, True if with_modelled else ~modelled_blocks(line.tape)
    constants = np.asarray(running_bytes(order, np.asarray(line.constant) * kept))
    slopes = np.asarray(running_bytes(order, np.asarray(line.per_item) * kept))
    grows = slopes > 0
    bounds = np.full(len(slopes), LARGEST_BATCH)  # by each event
    bounds[grows] = np.minimum((capacity - constants[grows]) // slopes[grows], LARGEST_BATCH)
    bounds = np.minimum.accumulate(bounds)
    if (constants + slopes * bounds > capacity)[~grows].any():
        return 0
    return max(int(bounds[-1]), 0)


def no_batch(dtype: str, gpu: Gpu, smallest: int) -> MaxBatch:
    """The answer where the smallest batch size does not fit."""
    return MaxBatch(
        dtype=dtype, batch=None, possible_batch=None, reason=f"not even a batch of {smallest} fits the {gpu.name}"
    )


def _reason(sure: int, gpu: Gpu, family: TapeFamily) -> str:
    if not sure:
        return f"a batch of {family.smallest} may or may not fit the {gpu.name}"
    if sure == LARGEST_BATCH:
        return f"searched up to {LARGEST_BATCH}"
    return ""

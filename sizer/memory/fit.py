"""Does the work fit a device, and up to which batch? Answered by replays with the device's real capacity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from sizer.catalogue.gpus import Gpu
from sizer.memory.allocator import place, replay
from sizer.memory.bounds import (
    BETWEEN_VERSIONS,
    CONTEXT,
    ENGINES,
    MODELS,
    ZERO_GRAD,
    Margin,
    engines_margin,
    gradients_kept,
    modelled_blocks,
    with_models_twice,
    without_models,
)
from sizer.memory.tape import AffineTape, Tape
from sizer.memory.timeline import Timeline, read_failure, read_timeline, running_bytes

Fits = bool | Literal["uncertain"]

LARGEST_BATCH = 2**20


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


def fit(tape: Tape, gpu: Gpu, *, expandable_segments: bool = False) -> Fit:
    """Whether a tape's work fits a device, and the bytes that its process would hold there.

    `process_bytes` is what nvidia-smi would show: the allocator's peak reserved bytes plus the device's context. On MPS
    it is the heaps' part of torch.mps.driver_allocated_memory(); on the CPU the tensors' bytes; both have no context.

    The range is that of what is uncertain (sizer.memory.bounds): a small or a large context, the engines of another version of
    cuDNN, and by replays modelled workspaces and gradients that live through the next forward pass.
    `fits` is True where the work with all that makes it large runs on the device, False where the work with all that makes it
    small does not, else "uncertain"; both are replays that may give cached memory back and try again, as the device would.

    The timeline is the one on this device where the work fits. Where it does not, it is that of a device large enough,
    with `out_of_memory` saying what would fail on this one.
    """
    roomy = replay(tape, backend=gpu.backend, expandable_segments=expandable_segments)
    margins = _margins(tape, gpu, roomy.peak_reserved_bytes, expandable_segments)
    timeline = _timeline_on(tape, gpu, roomy, expandable_segments)
    process = timeline.peak_reserved_bytes + gpu.context_bytes
    more = sum(margin.more_bytes for margin in margins)
    # What needs no replay: it fits where nothing has to be given back.
    easily = roomy.peak_reserved_bytes + gpu.context_bytes + more <= gpu.total_bytes
    return Fit(
        timeline=timeline,
        process_bytes=process,
        process_low_bytes=process - sum(margin.less_bytes for margin in margins),
        process_high_bytes=process + more,
        margins=margins,
        fits=easily or fits_in(tape, gpu, expandable_segments=expandable_segments),
    )


def fits_in(tape: Tape, gpu: Gpu, *, expandable_segments: bool = False) -> Fits:
    """True, False or "uncertain" as in `fit`, which says what they mean, without the timeline."""
    if _surely(tape, gpu, expandable_segments):
        return True
    return "uncertain" if _possibly(tape, gpu, expandable_segments) else False


def largest_batch(
    tape: AffineTape,
    gpu: Gpu,
    *,
    dtype: str,
    known: Mapping[int, Fits] | None = None,
    expandable_segments: bool = False,
) -> MaxBatch:
    """The largest batch whose work surely fits, and the largest that may, up to 2**20; above 128 within 1 %.

    `known` holds verdicts that were already found; the search starts from them and takes some ten replays. Where sizes are
    asked for it goes by lines through their answers first, and asks at the end alone. It assumes that what fits at one batch
    fits at every smaller one, which fragmentation can break by an item or two.
    Raises NotAffineError where the tape has no batch that the search comes upon.
    """
    known = known or {}
    capacity = gpu.total_bytes - gpu.context_high_bytes
    bound = _batch_bound(tape, capacity, with_modelled=True)
    quick = _settled(tape, known, bound)
    sure = _search_twice(
        lambda one, batch: _surely(one.at(batch), gpu, expandable_segments),
        (quick, tape),
        bound,
        {batch: fits is True for batch, fits in known.items()},
        start=_first_guess(quick or tape, bound, capacity, gpu, expandable_segments),
    )
    most = (gpu.total_bytes - gpu.context_low_bytes) * 100 // (100 - BETWEEN_VERSIONS)
    ceiling = _batch_bound(tape, most, with_modelled=False)
    possible = _search_twice(
        lambda one, batch: _possibly(one.at(batch), gpu, expandable_segments),
        (quick, tape),
        ceiling,
        {batch: fits is not False for batch, fits in known.items()} | {sure: True},
        start=ceiling * sure // bound if bound else ceiling,
    )
    return MaxBatch(
        dtype=dtype, batch=sure or None, possible_batch=possible or None, reason=_reason(sure, possible, gpu)
    )


def largest_traced_batch(verdicts: Mapping[int, Fits], *, dtype: str) -> MaxBatch:
    """The largest batch that fits among those traced one by one, for work that is not affine in the batch."""
    sure = max((batch for batch, fits in verdicts.items() if fits is True), default=None)
    possible = max((batch for batch, fits in verdicts.items() if fits is not False), default=None)
    tried = ", ".join(str(batch) for batch in sorted(verdicts))
    return MaxBatch(
        dtype=dtype,
        batch=sure,
        possible_batch=possible,
        reason=f"only the batches that were traced one by one were tried: {tried or 'none'}",
    )


def _timeline_on(tape: Tape, gpu: Gpu, roomy: Timeline, expandable_segments: bool) -> Timeline:
    capacity = gpu.total_bytes - gpu.context_bytes
    if roomy.peak_reserved_bytes <= capacity:
        return roomy
    tight = place(tape, gpu.backend, capacity, expandable_segments)
    failure = read_failure(tape, tight)
    return read_timeline(tape, tight) if failure is None else replace(roomy, out_of_memory=failure)


def _margins(tape: Tape, gpu: Gpu, reserved: int, expandable_segments: bool) -> tuple[Margin, ...]:
    """What the process may hold less and more than estimated, by what is uncertain; without the parts that come to nothing."""

    def peak(other: Tape) -> int:
        if other is tape:
            return reserved
        return max(place(other, gpu.backend, None, expandable_segments).reserved, default=0)

    few, many = peak(without_models(tape)), peak(with_models_twice(tape))
    engines, kept = engines_margin(tape, reserved), peak(gradients_kept(tape))
    found = (
        Margin(
            name=CONTEXT,
            less_bytes=gpu.context_bytes - gpu.context_low_bytes,
            more_bytes=gpu.context_high_bytes - gpu.context_bytes,
        ),
        Margin(name=ENGINES, less_bytes=engines, more_bytes=engines),
        Margin(name=MODELS, less_bytes=max(0, reserved - few), more_bytes=max(0, many - reserved)),
        Margin(name=ZERO_GRAD, less_bytes=0, more_bytes=max(0, kept - reserved)),
    )
    return tuple(margin for margin in found if margin.less_bytes or margin.more_bytes)


def _surely(tape: Tape, gpu: Gpu, expandable_segments: bool) -> bool:
    """Whether the work runs with all that makes it large, beside the largest context: engines of another version of cuDNN take
    their share of what is left."""
    capacity = gpu.total_bytes - gpu.context_high_bytes
    if capacity <= 0:
        return False
    capacity -= engines_margin(tape, capacity * 100 // (100 + BETWEEN_VERSIONS))
    large = gradients_kept(with_models_twice(tape))
    return place(large, gpu.backend, capacity, expandable_segments).failed_at is None


def _possibly(tape: Tape, gpu: Gpu, expandable_segments: bool) -> bool:
    """Whether the work runs with all that makes it small, beside the smallest context."""
    capacity = gpu.total_bytes - gpu.context_low_bytes
    if capacity <= 0:
        return False
    capacity += engines_margin(tape, capacity * 100 // (100 - BETWEEN_VERSIONS))
    return place(without_models(tape), gpu.backend, capacity, expandable_segments).failed_at is None


def _settled(tape: AffineTape, known: Mapping[int, bool | str], bound: int) -> AffineTape | None:
    """The tape with lines through the answers at the two largest batches that are known; None where nothing is asked."""
    if not tape.resolved or bound < 2:
        return None
    low, high = (sorted({1, 2, *known})[-2:]) if known else (max(1, bound // 8), max(2, bound // 4))
    return tape.settle(low, high)


def _search_twice(
    holds: Callable[[AffineTape, int], bool],
    tapes: tuple[AffineTape | None, AffineTape],
    bound: int,
    known: Mapping[int, bool],
    *,
    start: int,
) -> int:
    """What `_search` finds on the second tape, begun where the first one's search ended, if there is a first."""
    quick, tape = tapes
    if quick is None:
        return _search(lambda batch: holds(tape, batch), bound, known, start=start)
    near = _search(lambda batch: holds(quick, batch), bound, known, start=start)
    return _search(lambda batch: holds(tape, batch), bound, known, start=near, step=1 + near // 128)


def _search(
    holds: Callable[[int], bool], bound: int, known: Mapping[int, bool], *, start: int, step: int | None = None
) -> int:
    """The largest batch up to `bound` for which `holds`, 0 where none does; above 128 within 1 % below it.

    Goes from `start` in growing steps towards the answer, the first a `step` wide, then bisects what is left.
    """
    high = min((batch for batch, held in known.items() if not held), default=bound + 1)
    high = min(high, bound + 1)
    low = max((batch for batch, held in known.items() if held and batch < high), default=0)
    guess, step, verdicts = start, step or max(1, start // 64), set()
    while high - low > 1 + low // 128:
        if len(verdicts) == 2:
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        verdict = holds(guess)
        verdicts.add(verdict)
        low, high = (guess, high) if verdict else (low, guess)
        guess += step if verdict else -step
        step *= 2
    return low


def _first_guess(tape: AffineTape, bound: int, capacity: int, gpu: Gpu, expandable_segments: bool) -> int:
    """Where reserved bytes would reach the capacity if they grew as the tensors do, from one replay at the bound."""
    if bound < 2:
        return bound
    reserved = max(place(tape.at(bound), gpu.backend, None, expandable_segments).reserved, default=0)
    fixed = sum(a for a, b in zip(tape.constant, tape.per_item, strict=True) if not b and a > 0) // 2
    return max(1, bound * (capacity - fixed) // max(reserved - fixed, 1)) if reserved > capacity > fixed else bound


def _batch_bound(tape: AffineTape, capacity: int, *, with_modelled: bool) -> int:
    """The largest batch, up to 2**20, whose tensors (not rounded) never exceed `capacity` bytes: no larger one fits.

    Blocks whose size is asked for are left out, since it is on no line.
    """
    counted = [with_modelled or not modelled for modelled in modelled_blocks(tape)]
    for block in tape.resolved:
        counted[block] = False
    constants = running_bytes(tape.order, [a * keep for a, keep in zip(tape.constant, counted, strict=True)])
    slopes = running_bytes(tape.order, [b * keep for b, keep in zip(tape.per_item, counted, strict=True)])
    bound = LARGEST_BATCH
    for constant, slope in zip(constants, slopes, strict=True):
        if constant + slope * bound > capacity:
            bound = (capacity - constant) // slope if slope > 0 else 0
    return max(bound, 0)


def _reason(sure: int, possible: int, gpu: Gpu) -> str:
    if not possible:
        return f"not even a batch of 1 fits the {gpu.name}"
    if not sure:
        return f"a batch of 1 may or may not fit the {gpu.name}"
    if sure == LARGEST_BATCH:
        return f"searched up to {LARGEST_BATCH}"
    return ""

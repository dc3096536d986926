"""Does the work fit a device, and up to which batch? Answered by replays with the device's real capacity."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from sizer.memory.allocator import place, replay
from sizer.memory.gpus import Gpu
from sizer.memory.tape import CATEGORIES, AffineTape, Tape
from sizer.memory.timeline import Timeline, read_failure, read_timeline, running_bytes

Fits = bool | Literal["uncertain"]

LARGEST_BATCH = 2**20
# Operators whose workspaces only a closed library (cuDNN) knows and that nobody is asked for: what a tape holds for them is a
# model, as it is for questions that nobody answered; the rest are formulas read in PyTorch's source.
# `scratch_cuda.MODELLED` is the same list, by function.
CLOSED_KERNELS = ("aten._cudnn_rnn",)
_WORKSPACE = CATEGORIES.index("workspace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One piece of work on one device: its memory, what the process holds in bytes as a range, and whether it fits."""

    timeline: Timeline
    process_bytes: int
    process_low_bytes: int
    process_high_bytes: int
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

    The range's low end leaves out the workspaces that are modelled (CLOSED_KERNELS), at their largest, and takes a small
    context; its high end counts them once more and takes a large one. Nine of ten contexts that others measured lie
    between the two (`sizer.memory.context`); the workspaces are a model that no device has measured. `fits` is True
    where the high end fits the device's memory, False where the low end does not, else "uncertain"; each is a replay that
    may give cached memory back and try again, as the device would.

    The timeline is the one on this device where the work fits. Where it does not, it is that of a device large enough,
    with `out_of_memory` saying what would fail on this one.
    """
    roomy = replay(tape, backend=gpu.backend, expandable_segments=expandable_segments)
    workspace = _modelled_bytes(tape)
    timeline = _timeline_on(tape, gpu, roomy, expandable_segments)
    # What needs no replay: it fits where nothing has to be given back, and does not where the tensors alone are too much.
    easily = roomy.peak_reserved_bytes + workspace + gpu.context_high_bytes <= gpu.total_bytes
    never = roomy.peak_requested_bytes - workspace + gpu.context_low_bytes > gpu.total_bytes
    return Fit(
        timeline=timeline,
        process_bytes=timeline.peak_reserved_bytes + gpu.context_bytes,
        process_low_bytes=timeline.peak_reserved_bytes - workspace + gpu.context_low_bytes,
        process_high_bytes=timeline.peak_reserved_bytes + workspace + gpu.context_high_bytes,
        fits=easily or (not never and fits_in(tape, gpu, expandable_segments=expandable_segments)),
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
    ceiling = _batch_bound(tape, gpu.total_bytes - gpu.context_low_bytes, with_modelled=False)
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


def _surely(tape: Tape, gpu: Gpu, expandable_segments: bool) -> bool:
    """Whether the work runs with the largest context and the largest modelled workspace once more beside it."""
    capacity = gpu.total_bytes - gpu.context_high_bytes - _modelled_bytes(tape)
    return capacity > 0 and place(tape, gpu.backend, capacity, expandable_segments).failed_at is None


def _possibly(tape: Tape, gpu: Gpu, expandable_segments: bool) -> bool:
    """Whether the work runs without modelled workspaces beside the smallest context."""
    capacity = gpu.total_bytes - gpu.context_low_bytes
    return place(_without_modelled(tape), gpu.backend, capacity, expandable_segments).failed_at is None


def _settled(tape: AffineTape, known: Mapping[int, bool | str], bound: int) -> AffineTape | None:
    """The tape with lines through the answers at the two largest batches that are known; None where nothing is asked."""
    if not tape.answered or bound < 2:
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
    counted = [with_modelled or not modelled for modelled in _modelled(tape)]
    for block in tape.answered:
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


def _modelled(tape: Tape | AffineTape) -> list[bool]:
    """Per block whether it is a workspace whose size is a model and nobody's answer."""
    closed = [name.startswith(CLOSED_KERNELS) for name in tape.op_names]
    modelled = [category == _WORKSPACE and closed[op] for category, op in zip(tape.categories, tape.ops, strict=True)]
    for question in tape.questions:
        for block in question.blocks:
            modelled[block] = block not in tape.answered
    return modelled


def _modelled_bytes(tape: Tape) -> int:
    """The most bytes of modelled workspace alive at any time."""
    modelled = _modelled(tape)
    if not any(modelled):
        return 0
    kept = [size * counts for size, counts in zip(tape.sizes, modelled, strict=True)]
    return max(accumulate((kept[event] if event >= 0 else -kept[~event] for event in tape.order), initial=0))


def _without_modelled(tape: Tape) -> Tape:
    """The tape with modelled workspaces of 0 bytes, which take nothing; the tape itself where it has none."""
    modelled = _modelled(tape)
    if not any(modelled):
        return tape
    sizes = [0 if skip else size for size, skip in zip(tape.sizes, modelled, strict=True)]
    return replace(tape, sizes=array("q", sizes))

"""Does the work fit a device? Answered by replays with the device's real capacity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from sizer.allocator.allocator import replay_events
from sizer.allocator.timeline import Timeline, peak_bytes, read_failure, read_timeline
from sizer.catalogue.gpus import Gpu
from sizer.report.bounds import (
    BETWEEN_VERSIONS,
    CONTEXT,
    ENGINES,
    MODELS,
    OUTPUTS_KEPT,
    STREAMS,
    ZERO_GRAD,
    Margin,
    at_its_largest,
    engines_limit,
    engines_margin,
    without_models,
)
from sizer.report.replays import Unbounded, replay_unbounded
from sizer.tape.tape import Tape

Fits = bool | Literal["uncertain"]
Verdict = Literal["fits", "tight", "may not fit", "does not fit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "tight", "may not fit", "does not fit")  # the best first


def verdict_of(fits: Fits, returned_bytes: int) -> Verdict:
    """Return the verdict that every page, table and command shows.

    Args:
        fits: True, False or "uncertain", as in a Fit.
        returned_bytes: the most cached bytes that the allocator has to return to the device. Work that fits is `tight` if there
            are any.
    """
    if fits is True:
        return "tight" if returned_bytes else "fits"
    return "may not fit" if fits == "uncertain" else "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Memory of one piece of work on one device, the range of its process in bytes with its `margins`, and whether it fits.

    `returned_bytes` are the most cached bytes that the allocator must return to the device for that.
    """

    timeline: Timeline
    process_bytes: int
    process_low_bytes: int
    process_high_bytes: int
    margins: tuple[Margin, ...]
    fits: Fits
    returned_bytes: int = 0

    @property
    def verdict(self) -> Verdict:
        """The verdict on this work."""
        return verdict_of(self.fits, self.returned_bytes)


def fit(tape: Tape, gpu: Gpu, *, expandable_segments: bool = False, unbounded: Unbounded | None = None) -> Fit:
    """Return whether a tape's work fits a device, and the bytes of its process there.

    `process_bytes` is the process memory in nvidia-smi: the allocator's peak reserved bytes plus the device's context. On MPS
    it is the heaps' part of torch.mps.driver_allocated_memory(); on the CPU the tensors' bytes. Neither has a context.

    The range has these parts (sizer.report.bounds): a small or a large context, and the engines of another version of cuDNN.
    Replays add modelled workspaces, gradients that live through the next forward pass, outputs that live through the backward
    pass, and blocks that wait for other streams.

    `fits` is True if the largest work runs on the device, False if the smallest work does not run, else "uncertain". Both are
    replays that may return cached memory and try again, as the device would.

    The upper end of the range is for a device with enough room. If work fits although that end exceeds the device's memory, the
    allocator must return the cached bytes in between: at most `returned_bytes`.

    The timeline is that of this device if the work fits. Otherwise it is that of a device large enough, and `out_of_memory`
    names the allocation that would fail on this one. If the tape's `unbounded` memory is given, the tape is replayed only on a
    device that is too small for it.
    """
    unbounded = unbounded or replay_unbounded(tape, gpu.backend, expandable_segments=expandable_segments)
    margins = _margins(unbounded, gpu)
    timeline = _timeline_on(tape, gpu, unbounded.timeline, expandable_segments)
    process = timeline.peak_reserved_bytes + gpu.context_bytes
    fits = fits_in(tape, gpu, expandable_segments=expandable_segments, unbounded=unbounded)
    high = _high_end(unbounded, margins, gpu, fits)
    return Fit(
        timeline=timeline,
        process_bytes=process,
        process_low_bytes=process - sum(margin.less_bytes for margin in margins),
        process_high_bytes=high,
        margins=margins,
        fits=fits,
        returned_bytes=max(0, high - gpu.total_bytes) if fits is True else 0,
    )


def _high_end(unbounded: Unbounded, margins: Iterable[Margin], gpu: Gpu, fits: Fits) -> int:
    """Return the most bytes of the process on a device with enough room.

    This is the sum of the range's parts. A single replay with all of them can need more or less than that sum, and decides
    whether the work fits. Its figure is the end of the range if the sum is on the other side of the device's memory.
    """
    added = unbounded.timeline.peak_reserved_bytes + gpu.context_bytes + sum(margin.more_bytes for margin in margins)
    large = unbounded.large_bytes
    together = large + engines_margin(unbounded.engines_limit_bytes, large) + gpu.context_high_bytes
    decides = fits is not False and (added > gpu.total_bytes) != (together > gpu.total_bytes)
    return together if decides else added


def fits_in(tape: Tape, gpu: Gpu, *, expandable_segments: bool = False, unbounded: Unbounded | None = None) -> Fits:
    """Return True, False or "uncertain" as `fit` does, without the timeline."""
    large, few = (unbounded.large_bytes, unbounded.few_bytes) if unbounded else (None, None)
    if surely_runs(tape, gpu, expandable_segments, large):
        return True
    return "uncertain" if possibly_runs(tape, gpu, expandable_segments, few) else False


def _timeline_on(tape: Tape, gpu: Gpu, roomy: Timeline, expandable_segments: bool) -> Timeline:
    capacity = gpu.total_bytes - gpu.context_bytes
    if roomy.peak_reserved_bytes <= capacity:
        return roomy
    tight = replay_events(tape, gpu.backend, capacity, expandable_segments)
    failure = read_failure(tape, tight)
    return read_timeline(tape, tight) if failure is None else replace(roomy, out_of_memory=failure)


def _margins(unbounded: Unbounded, gpu: Gpu) -> tuple[Margin, ...]:
    """Return the parts of the process's range, in bytes less and more than estimated; parts of zero bytes are left out."""
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
        Margin(name=OUTPUTS_KEPT, less_bytes=0, more_bytes=max(0, unbounded.outputs_bytes - reserved)),
        Margin(name=STREAMS, less_bytes=0, more_bytes=max(0, unbounded.behind_bytes - reserved)),
    )
    return tuple(margin for margin in found if margin.less_bytes or margin.more_bytes)


Room = tuple[Tape, int]  # work, and the bytes that its device has for it


def largest_work(tape: Tape, gpu: Gpu) -> Room:
    """Return the tape of the largest work, and its capacity with the largest context and margin of engines."""
    capacity = gpu.total_bytes - gpu.context_high_bytes
    capacity -= engines_margin(engines_limit(tape), max(0, capacity) * 100 // (100 + BETWEEN_VERSIONS))
    return at_its_largest(tape), capacity


def smallest_work(tape: Tape, gpu: Gpu) -> Room:
    """Return the tape of the smallest work, and its capacity with the smallest context."""
    capacity = gpu.total_bytes - gpu.context_low_bytes
    capacity += engines_margin(engines_limit(tape), max(0, capacity) * 100 // (100 - BETWEEN_VERSIONS))
    return without_models(tape), capacity


def surely_runs(tape: Tape, gpu: Gpu, expandable_segments: bool, reserved: int | None = None) -> bool:
    """Return whether the largest work runs. `reserved` are its reserved bytes without a limit, if known."""
    return _runs(*largest_work(tape, gpu), gpu, expandable_segments, reserved)


def possibly_runs(tape: Tape, gpu: Gpu, expandable_segments: bool, reserved: int | None = None) -> bool:
    """Return whether the work runs with all that makes it small; `reserved` as in `surely_runs`."""
    return _runs(*smallest_work(tape, gpu), gpu, expandable_segments, reserved)


def _runs(tape: Tape, capacity: int, gpu: Gpu, expandable_segments: bool, reserved: int | None) -> bool:
    """Return whether the work runs in `capacity` bytes; replays it only if no cheaper test decides."""
    if capacity <= 0:
        return False
    if reserved is not None and reserved <= capacity:  # nothing is ever refused
        return True
    if peak_bytes(tape.order, tape.sizes) > capacity:  # every allocator needs at least the requested bytes
        return False
    return replay_events(tape, gpu.backend, capacity, expandable_segments).failed_at is None

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
from sizer.report.unbounded import Unbounded, replay_unbounded
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
    """One piece of work on one device: its memory, the range of its process in bytes, whose parts are `margins`, and whether it
    fits. `returned_bytes` are the most cached bytes that the allocator has to return for that."""

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
    """Return whether a tape's work fits a device, and the bytes that its process would hold there.

    `process_bytes` is what nvidia-smi would show: the allocator's peak reserved bytes plus the device's context. On MPS
    it is the heaps' part of torch.mps.driver_allocated_memory(); on the CPU the tensors' bytes; both have no context.

    The range is that of what is uncertain (sizer.report.bounds): a small or a large context, the engines of another version of
    cuDNN, and by replays modelled workspaces, gradients that live through the next forward pass, outputs that live through the
    backward pass and blocks that wait for other streams.
    `fits` is True where the work with all that makes it large runs on the device, False where the work with all that makes it
    small does not, else "uncertain"; both are replays that may give cached memory back and try again, as the device would.
    The upper end of the range is that of a device with enough room. If work fits although that end is past the device's memory,
    the allocator has to return the cached bytes in between: at most `returned_bytes`.

    The timeline is the one on this device where the work fits. Where it does not, it is that of a device large enough,
    with `out_of_memory` saying what would fail on this one. Where the tape's `unbounded` memory is known, it is replayed only on a
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
    """Return the most bytes that the process takes on a device with enough room.

    The parts of the range are added up. One replay with all of them can take more or less than that sum, and decides whether the
    work fits. Its figure is the end of the range if the sum is on the other side of the device's memory.
    """
    added = unbounded.timeline.peak_reserved_bytes + gpu.context_bytes + sum(margin.more_bytes for margin in margins)
    large = unbounded.large_bytes
    together = large + engines_margin(unbounded.engines_limit_bytes, large) + gpu.context_high_bytes
    decides = fits is not False and (added > gpu.total_bytes) != (together > gpu.total_bytes)
    return together if decides else added


def fits_in(tape: Tape, gpu: Gpu, *, expandable_segments: bool = False, unbounded: Unbounded | None = None) -> Fits:
    """True, False or "uncertain" as in `fit`, which says what they mean, without the timeline."""
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
    """Return what the process may hold less and more than estimated, by what is uncertain; without the parts that come to
    nothing."""
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
    """The work with all that makes it large, beside the largest context and what engines may take."""
    capacity = gpu.total_bytes - gpu.context_high_bytes
    capacity -= engines_margin(engines_limit(tape), max(0, capacity) * 100 // (100 + BETWEEN_VERSIONS))
    return at_its_largest(tape), capacity


def smallest_work(tape: Tape, gpu: Gpu) -> Room:
    """The work with all that makes it small, beside the smallest context."""
    capacity = gpu.total_bytes - gpu.context_low_bytes
    capacity += engines_margin(engines_limit(tape), max(0, capacity) * 100 // (100 - BETWEEN_VERSIONS))
    return without_models(tape), capacity


def surely_runs(tape: Tape, gpu: Gpu, expandable_segments: bool, reserved: int | None = None) -> bool:
    """Return whether the work runs with all that makes it large; `reserved` is what that reserves without bound, where that is
    known."""
    return _runs(*largest_work(tape, gpu), gpu, expandable_segments, reserved)


def possibly_runs(tape: Tape, gpu: Gpu, expandable_segments: bool, reserved: int | None = None) -> bool:
    """Return whether the work runs with all that makes it small; `reserved` as in `surely_runs`."""
    return _runs(*smallest_work(tape, gpu), gpu, expandable_segments, reserved)


def _runs(tape: Tape, capacity: int, gpu: Gpu, expandable_segments: bool, reserved: int | None) -> bool:
    """Return whether the work runs in `capacity` bytes, by a replay where nothing less tells."""
    if capacity <= 0:
        return False
    if reserved is not None and reserved <= capacity:  # nothing is ever refused
        return True
    if peak_bytes(tape.order, tape.sizes) > capacity:  # no allocator takes less than is asked for
        return False
    return replay_events(tape, gpu.backend, capacity, expandable_segments).failed_at is None

"""One row of the answer: the memory of one dtype at one batch size, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from sizer.allocator.timeline import Curve, OutOfMemory, PhaseUse, live_by_category, peak_bytes
from sizer.base.units import format_bytes, format_range
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import MODES
from sizer.report.bounds import Margin
from sizer.report.fit import Fits, Verdict, fit, verdict_of
from sizer.report.replays import Unbounded
from sizer.tape.communication import Volume, volumes_of_step
from sizer.tape.tape import CATEGORIES, FROZEN, KV_CACHE, Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes that one dtype needs at one batch size; the attributes are the keys of the public JSON.

    `weights/buffers/gradients/optimizer_bytes` are exact tensor bytes. `frozen_bytes` are the weights that are not trained, if
    only a part of the model is. `activations_bytes` are alive after the forward pass. `kv_cache_bytes` is the cache at the end
    of a generation. `host_bytes` is the most host memory of offloaded tensors; no other figure includes it. A pipeline's call
    copies `copied_bytes` of that to the device once, and `step_copied_bytes` at each denoising step.

    `peak_*` are the allocator's counters, with rounding and library workspaces. `process_bytes` is the process memory in
    nvidia-smi. Its range is `process_low_bytes` to `process_high_bytes`, and `margins` are the parts of the range (see
    sizer.report.fit). `communication` is the traffic of one of several ranks in a step. If `out_of_memory` is not None, it
    names the allocation that would fail on this device; all other figures are then for a device large enough. `verdict` follows
    from `fits` and `returned_bytes` (see sizer.report.fit).
    """

    dtype: str
    batch: int
    weights_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    process_bytes: int
    process_low_bytes: int
    process_high_bytes: int
    peak_phase: str
    peak_op: str
    peak_module: str
    at_peak: dict[str, int]
    phases: tuple[PhaseUse, ...]
    fits: Fits
    curve: Curve = field(default_factory=Curve)
    reserved_at_peak_bytes: int = 0
    retries: int = 0
    out_of_memory: OutOfMemory | None = None
    margins: tuple[Margin, ...] = ()
    frozen_bytes: int = 0
    kv_cache_bytes: int = 0
    communication: tuple[Volume, ...] = ()
    host_bytes: int = 0
    copied_bytes: int = 0
    step_copied_bytes: int = 0
    returned_bytes: int = 0
    verdict: Verdict = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", verdict_of(self.fits, self.returned_bytes))


def estimate_tape(
    tape: Tape,
    *,
    dtype: str,
    gpu: Gpu,
    mode: str = "training",
    expandable_segments: bool = False,
    unbounded: Unbounded | None = None,
    passes: int = 1,
) -> Estimate:
    """Return the bytes that a tape's work needs on a device, phase by phase, and whether it fits.

    Tensor bytes are unrounded sums over live blocks: weights and buffers at the end of "load", gradients at the end of
    "backward", optimizer state at the end of "optimizer", activations at the end of "forward". Inference has no gradients and
    no optimizer state. Its activations are all blocks alive after the forward pass except weights, buffers, inputs and
    workspaces. If a phase is not marked, the largest live sum of the category counts. `unbounded` is as in `fit`; `passes` is
    the number of accumulated passes in a step.
    """
    result = fit(tape, gpu, expandable_segments=expandable_segments, unbounded=unbounded)
    timeline, live = result.timeline, live_by_category(tape)
    training, frozen = MODES[mode].trains, _alive(tape, live, "load", FROZEN)
    return Estimate(
        dtype=dtype,
        batch=tape.batch,
        weights_bytes=_alive(tape, live, "load", "parameter") + frozen,
        buffers_bytes=_alive(tape, live, "load", "buffer"),
        gradients_bytes=_alive(tape, live, "backward", "gradient") if training else 0,
        optimizer_bytes=_alive(tape, live, "optimizer", "optimizer state") if training else 0,
        activations_bytes=_activations(tape, live, training),
        communication=volumes_of_step(tape.collectives, passes=passes),
        host_bytes=tape.host_bytes,
        copied_bytes=tape.copied[0],
        step_copied_bytes=tape.copied[1],
        kv_cache_bytes=live[tape.marks[-1][1]][KV_CACHE] if tape.marks else 0,
        peak_allocated_bytes=timeline.peak_allocated_bytes,
        peak_reserved_bytes=timeline.peak_reserved_bytes,
        peak_requested_bytes=timeline.peak_requested_bytes,
        process_bytes=result.process_bytes,
        process_low_bytes=result.process_low_bytes,
        process_high_bytes=result.process_high_bytes,
        margins=result.margins,
        peak_phase=timeline.peak_phase,
        peak_op=timeline.peak_op,
        peak_module=timeline.peak_module,
        at_peak=timeline.at_peak,
        phases=timeline.phases,
        fits=result.fits,
        returned_bytes=result.returned_bytes,
        curve=timeline.curve,
        reserved_at_peak_bytes=timeline.reserved_at_peak_bytes,
        retries=timeline.retries,
        out_of_memory=timeline.out_of_memory,
        frozen_bytes=frozen,
    )


def with_margin(estimate: Estimate, margin: Margin, gpu: Gpu) -> Estimate:
    """Return the estimate with a further margin of its range, if that adds bytes."""
    if margin.more_bytes <= 0:
        return estimate
    high = estimate.process_high_bytes + margin.more_bytes
    fits = "uncertain" if estimate.fits is True and high > gpu.total_bytes else estimate.fits
    return replace(estimate, margins=(*estimate.margins, margin), process_high_bytes=high, fits=fits)


def describe_range(estimates: Iterable[Estimate]) -> Iterator[str]:
    """Yield a line for each estimate: the range of its process, and the margins down and up."""
    for row in estimates:
        ends = format_range(row.process_low_bytes, row.process_high_bytes)
        parts = (
            f"{margin.name} -{format_bytes(margin.less_bytes)} to +{format_bytes(margin.more_bytes)}"
            for margin in row.margins
        )
        reasons = "; ".join(parts) or "no range is known for this device"
        if row.returned_bytes:
            reasons += f"; up to {format_bytes(row.returned_bytes)} of it is cache that the allocator returns to the device"
        yield f"{row.dtype} at batch {row.batch}: {ends}; {reasons}"


def has_range(estimate: Estimate) -> bool:
    """Return whether anything is known of how far the process may be off: not on MPS, nor on the CPU."""
    return estimate.process_low_bytes < estimate.process_high_bytes


def describe_copies(estimate: Estimate) -> str:
    """Return how much a pipeline's call copies to the device, empty if it copies nothing."""
    once, each = estimate.copied_bytes, estimate.step_copied_bytes
    parts = [f"{format_bytes(once)} copied to the device a call"] if once else []
    return ", ".join([*parts, *([f"{format_bytes(each)} a denoising step"] if each else [])])


def _alive(tape: Tape, live: Mapping[str, Mapping[str, int]], phase: str, category: str) -> int:
    if phase in live:
        return live[phase][category]
    index = CATEGORIES.index(category)
    sizes = [size * (kind == index) for size, kind in zip(tape.sizes, tape.categories, strict=True)]
    return peak_bytes(tape.order, sizes)


def _activations(tape: Tape, live: Mapping[str, Mapping[str, int]], training: bool) -> int:
    if training or "forward" not in live:
        return _alive(tape, live, "forward", "activation")
    beside = ("parameter", FROZEN, "buffer", "input", "workspace")
    return sum(size for category, size in live["forward"].items() if category not in beside)

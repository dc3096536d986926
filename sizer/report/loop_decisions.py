"""Compute the bytes that other training loops would need for the same question.

No key describes these decisions, except for `outputs`; each is a replay of the question's own tape, or arithmetic on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sizer.allocator.timeline import peak_bytes
from sizer.base.codec import Difference
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import FREED, KEPT
from sizer.report.estimate import Estimate
from sizer.report.replays import Replays, find_peak_reserved
from sizer.tape.loop_choices import (
    float32_outputs,
    keep_gradients,
    keep_outputs_across_steps,
    with_outputs,
    zero_gradients,
)
from sizer.tape.tape import Tape

TRACED_PASSES = 2  # sizer.tracing.trace.PASSES: from the second pass on all passes are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDecision:
    """Another training loop for the same question.

    Args:
        decision: how that loop differs.
        dtype, batch: of the compared estimate.
        bytes: further reserved memory at the peak; negative if less.
        in_range: True if the range of the process covers it.
    """

    decision: str
    dtype: str
    batch: int
    bytes: Difference
    in_range: bool


def loop_decisions(
    tape: Tape, estimate: Estimate, gpu: Gpu, *, outputs: str | None, expandable_segments: bool, replays: Replays
) -> Iterator[LoopDecision]:
    """Yield the memory of other training loops for the same question.

    Args:
        tape: tape of the question without a choice on whether outputs are kept, with resolved size queries.
        estimate: the question's own estimate.
        outputs: the question's choice on outputs.

    Yields:
        A decision for each loop that the tape can be changed to, in the order in which a step makes them.
    """

    def reserved(other: Tape) -> int:
        return find_peak_reserved(other, gpu.backend, expandable_segments=expandable_segments, replays=replays)

    own, base = with_outputs(tape, outputs)[0], estimate.peak_reserved_bytes
    if outputs == KEPT:
        yield decision(
            "outputs are freed before the backward pass", reserved(with_outputs(tape, FREED)[0]) - base, estimate
        )
    else:
        yield decision(
            "outputs are kept during the backward pass", reserved(with_outputs(tape, KEPT)[0]) - base, estimate
        )
    across = replace(keep_outputs_across_steps(tape), outputs=(), graphs=(), half_outputs=frozenset())
    yield decision("outputs are kept until the next forward pass has ended", reserved(across) - base, estimate)
    if tape.half_outputs:
        wide = with_outputs(float32_outputs(tape), outputs or FREED)[0]
        yield decision("16-bit outputs are returned in float32 (Accelerate, Fabric)", reserved(wide) - base, estimate)
    kept = replace(keep_gradients(own), outputs=(), graphs=(), half_outputs=frozenset())
    yield decision("gradients are dropped after the forward pass", reserved(kept) - base, estimate)
    zeroed = replace(zero_gradients(own), outputs=(), graphs=(), half_outputs=frozenset())
    yield decision("gradients are set to zero and kept (set_to_none=False)", reserved(zeroed) - base, estimate)


def summed_losses(tape: Tape, estimate: Estimate, *, passes: int) -> LoopDecision:
    """Return the memory of a loop that sums the losses of its passes for one backward pass.

    Args:
        tape: that loop's tape with two passes and resolved size queries. Each further pass keeps as many activations.
        passes: the forward passes of an optimizer's step.
    """
    end = next(position for position, phase in tape.marks if phase == "backward")
    first_step = peak_bytes(tape.order[:end], tape.sizes)  # without the optimizer's state, which the second step also has
    peak = first_step + (passes - TRACED_PASSES) * estimate.activations_bytes + estimate.optimizer_bytes
    more = max(0, peak - estimate.peak_requested_bytes)
    return decision("losses of accumulated passes are summed for one backward pass", more, estimate)


def decision(text: str, more_bytes: int, estimate: Estimate) -> LoopDecision:
    """Return a decision with whether the range of an estimate covers it."""
    process = estimate.process_bytes + more_bytes
    inside = estimate.process_low_bytes <= process <= estimate.process_high_bytes
    return LoopDecision(
        decision=text, dtype=estimate.dtype, batch=estimate.batch, bytes=Difference(more_bytes), in_range=inside
    )

"""Notes on blocks that a tape itself does not hold, recorded only if a trace requests them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """The shape and the dtype ("bfloat16") of the tensor that a block was first seen to hold."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseOfStep:
    """A phase ("forward") of one of the two steps, 1 or 2; of step 0 is what comes before them."""

    step: int
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNotes:
    """By number of a tape's block: its tensor, which a kernel's workspace does not have, and the parameter that it belongs to
    (gradients and optimizer state) by name. `ends` are the positions in the tape's order where phases end, ascending."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    ends: list[tuple[int, PhaseOfStep]] = field(default_factory=list)

    def phase_at(self, event: int) -> PhaseOfStep:
        """The phase in which the event at this index of the order happens; what follows the last end belongs to the last phase."""
        place = bisect_right(self.ends, event, key=lambda end: end[0])
        return self.ends[min(place, len(self.ends) - 1)][1]

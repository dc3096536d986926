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
    """A phase ("forward") of one of the two steps, 1 or 2; step 0 is the work before them."""

    step: int
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNotes:
    """By number of a tape's block: its tensor, which a kernel's workspace lacks, and its parameter's name.

    Gradients and optimizer state have the name of their parameter. `ends` are the positions in the tape's order at which phases
    end, ascending.
    """

    tensors: dict[int, Tensor] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    ends: list[tuple[int, PhaseOfStep]] = field(default_factory=list)

    def phase_at(self, event: int) -> PhaseOfStep:
        """Return the phase of the event at this index of the order; events after the last end belong to the last phase."""
        place = bisect_right(self.ends, event, key=lambda end: end[0])
        return self.ends[min(place, len(self.ends) - 1)][1]

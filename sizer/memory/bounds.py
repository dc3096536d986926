"""What the estimate cannot know for certain, as other tapes of the same work: their replays are the range's ends.

- Another version of cuDNN puts other engines first. A tape holds the workspaces of the first engines in its order. Since a cached
  block serves whatever fits, reserved memory goes up or down with them: the second engines everywhere, the smaller and the larger
  of both are replayed.
- A workspace that is a model and nobody's answer is taken as anything from nothing to twice the model.
- Where a training loop calls `zero_grad()` after the forward pass (as Lightning does), gradients live through it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sizer.memory.tape import CATEGORIES, AffineTape, Tape

# Operators whose workspaces only a closed library (cuDNN) knows and that nobody is asked for: what a tape holds for them is a
# model, as it is for questions that nobody answered; the rest are formulas read in PyTorch's source.
# `scratch_cuda.MODELLED` is the same list, by function.
CLOSED_KERNELS = ("aten._cudnn_rnn",)

CONTEXT = "what the process holds outside the allocator"
WORKSPACES = "workspaces of other engines and of models"
ZERO_GRAD = "zero_grad() after the forward pass"

_WORKSPACE, _GRADIENT = CATEGORIES.index("workspace"), CATEGORIES.index("gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """One part of the range of a process: how many bytes less and how many more than estimated it may come to."""

    name: str
    less_bytes: int
    more_bytes: int


def next_engines(tape: Tape) -> Tape:
    """The tape with the second answer to each question in the place of the first."""
    return _with_workspaces(tape, lambda found: found[min(1, len(found) - 1)], 1)


def smallest(tape: Tape) -> Tape:
    """The tape with the least workspace that its questions' answers allow, and without modelled ones."""
    return _with_workspaces(tape, min, 0)


def largest(tape: Tape) -> Tape:
    """The tape with the most workspace that its questions' answers allow, and modelled ones twice."""
    return _with_workspaces(tape, max, 2)


def gradients_kept(tape: Tape) -> Tape:
    """The tape with the first step's gradients alive until the second step's forward pass has ended; itself where no second
    step is told apart."""
    begin = next((position for position, phase in tape.marks if phase == "optimizer"), None)
    end = tape.second_forward
    if begin is None or end is None:
        return tape
    between = tape.order[begin:end]
    kept = [event < 0 and tape.categories[~event] == _GRADIENT for event in between]
    if not any(kept):
        return tape
    first = array("q", [event for event, later in zip(between, kept, strict=True) if not later])
    later = array("q", [event for event, later in zip(between, kept, strict=True) if later])
    return replace(tape, order=tape.order[:begin] + first + later + tape.order[end:])


def modelled_blocks(tape: Tape | AffineTape) -> list[bool]:
    """Per block whether it is a workspace whose size is a model and nobody's answer."""
    closed = [name.startswith(CLOSED_KERNELS) for name in tape.op_names]
    modelled = [category == _WORKSPACE and closed[op] for category, op in zip(tape.categories, tape.ops, strict=True)]
    answered = tape.answered
    for question in tape.questions:
        for block in question.blocks:
            modelled[block] = block not in answered
    return modelled


def _with_workspaces(tape: Tape, choose: Callable[[Sequence[int]], int], times: int) -> Tape:
    """The tape with one of the answers to each question chosen, and modelled workspaces so many times."""
    modelled = modelled_blocks(tape)
    several = any(len(set(found)) > 1 for found in tape.choices)
    if not several and (times == 1 or not any(modelled)):
        return tape
    sizes = array("q", [size * times if model else size for size, model in zip(tape.sizes, modelled, strict=True)])
    for question, found in zip(tape.questions, tape.choices, strict=True) if several else ():
        for block in question.blocks if found else ():
            sizes[block] = choose(found)
    return replace(tape, sizes=sizes)

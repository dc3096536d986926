"""Rewrite tapes for training loops that keep the model's outputs, or gradients, for longer.

A tape is that of the loop that keeps least: outputs are freed once the loss is computed (transformers' Trainer does so in
`compute_loss`), gradients before the next forward pass. Other loops release the same blocks later, so their tapes follow from
this one by moving releases. tests/tape/test_loop_choices.py compares them with traces of such loops.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from sizer.catalogue.modes import KEPT
from sizer.tape.tape import CATEGORIES, Tape

_GRADIENT = CATEGORIES.index("gradient")
_EMBEDDING = "aten.embedding_dense_backward.default"


def with_outputs(tape: Tape, outputs: str | None) -> tuple[Tape, Callable[[int], int]]:
    """Return the tape of a loop that frees or keeps the outputs, and its positions by those of the old order.

    A loop that keeps them is `out = model(**batch); out.loss.backward(); optimizer.step()` in a function that does one step:
    outputs live until those of the next pass exist, or until the step ends. None leaves the loop open.
    """
    positions = _release_positions(tape, across_steps=False) if outputs == KEPT else {}
    made, moved_to = postpone(tape, positions)
    return made if outputs is None else replace(made, outputs=(), graphs=(), half_outputs=frozenset()), moved_to


def keep_outputs_across_steps(tape: Tape) -> Tape:
    """Return the tape of a loop that keeps outputs until the next forward pass has returned, also that of the next step.

    This is the same code in the body of a `for` loop: the variable is bound until the next assignment.
    """
    return postpone(tape, _release_positions(tape, across_steps=True))[0]


def keep_gradients(tape: Tape) -> Tape:
    """Return the tape with the first step's gradients alive until the second step's forward pass has ended.

    Return the tape itself if no second step is known.
    """
    begin, end = _end_of_step(tape), tape.second_forward
    if begin is None or end is None:
        return tape
    events = np.asarray(tape.order[begin:end], np.int64)
    freed = ~events[events < 0]
    categories = np.frombuffer(tape.categories, np.uint8)
    return postpone(tape, dict.fromkeys(freed[categories[freed] == _GRADIENT].tolist(), end))[0]


def zero_gradients(tape: Tape) -> Tape:
    """Return the tape of a loop that sets gradients to zero and keeps them: `zero_grad(set_to_none=False)`.

    This is PyTorch's default up to 1.13. The first step's gradients stay. The second step's are added to them
    (torch/csrc/autograd/functions/accumulate_grad.h, 2.15) and released: before the next allocation of another module, since
    the tape does not show where a node of the graph ends. A temporary gradient of an embedding is added to that of the tied
    output layer, which waits for it.

    Return the tape itself if no second step is known.

    *Known limitations*: the gradient of another layer that is used several times is released after its first use.
    """
    begin = _end_of_step(tape)
    if begin is None or tape.second_forward is None or tape.loops:
        return tape
    order = np.asarray(tape.order, np.int64)
    made, freed = _places(tape, order), _places(tape, ~order)
    gradients = np.frombuffer(tape.categories, np.uint8) == _GRADIENT
    stay = np.flatnonzero(gradients & (made < begin) & (freed >= begin))
    if not len(stay):
        return tape
    added = np.flatnonzero(gradients & (made >= begin))
    modules = np.asarray(tape.modules, np.int64)
    allocations = np.flatnonzero(order >= 0)
    moved = freed[np.concatenate([stay, added])]
    left = np.delete(np.arange(len(order)), moved[moved >= 0])
    events, keys = [*order[left]], [*(2 * left + 1)]
    passes = np.sort([made[block] for blocks in tape.outputs for block in blocks])
    summands = [block for block in _embedding_gradients(tape) if not gradients[block]]
    for block in added:
        number = np.searchsorted(passes, made[block])
        alike = (one for one in summands if tape.sizes[one] == tape.sizes[block] and made[one] > made[block])
        end = next((one for one in alike if np.searchsorted(passes, made[one]) == number), block)
        later = allocations[np.searchsorted(allocations, made[end], side="right") :]
        others = later[modules[order[later]] != modules[end]]
        events.append(~block)
        keys.append(2 * others[0] if len(others) else 2 * len(order) - 1)
    ascending = np.sort(keys)
    new = np.asarray(events, np.int64)[np.argsort(keys, kind="stable")]

    def moved_to(position: int) -> int:
        return int(np.searchsorted(ascending, 2 * position))

    return replace(_at_other_positions(tape, moved_to), order=array("q", new.tobytes()))


def _embedding_gradients(tape: Tape) -> Iterator[int]:
    """Yield the blocks that the backward pass of an embedding made."""
    if _EMBEDDING in tape.op_names:
        op = tape.op_names.index(_EMBEDDING)
        yield from (block for block, made_by in enumerate(tape.ops) if made_by == op)


def float32_outputs(tape: Tape) -> Tape:
    """Return the tape of a loop with a model that returns float32 copies instead of its 16-bit outputs.

    Accelerate's `ConvertOutputsToFp32` and Fabric's wrapper do so. The graph saves neither; a copy lives as long as the loop
    keeps the model's output. Return the tape itself if no output has 16 bits.
    """
    if tape.loops or not tape.half_outputs:
        return tape
    written = np.asarray(tape.order, np.int64)
    at = _places(tape, written)
    outputs, sources, before, events = [], list[int](), list[int](), list[int]()
    new = len(tape.sizes)
    for blocks in tape.outputs:
        halves = [block for block in blocks if block in tape.half_outputs]
        copies = range(new, new + len(halves))
        if halves:
            before += [max(int(at[block]) for block in blocks) + 1] * 2 * len(halves)
            sources += halves
            events += [*copies, *(~copy for copy in copies)]
        outputs.append((*(block for block in blocks if block not in tape.half_outputs), *copies))
        new = copies.stop
    order = array("q", np.insert(written, before, events).tobytes())

    def moved_to(position: int) -> int:
        return position + sum(place <= position for place in before)

    return replace(
        _at_other_positions(tape, moved_to),
        order=order,
        sizes=tape.sizes + array("q", [2 * tape.sizes[block] for block in sources]),
        categories=tape.categories + bytes(tape.categories[block] for block in sources),
        ops=tape.ops + array("l", [tape.ops[block] for block in sources]),
        modules=tape.modules + array("l", [tape.modules[block] for block in sources]),
        streams=tape.streams and tape.streams + bytes(tape.streams[block] for block in sources),
        outputs=tuple(outputs),
        half_outputs=frozenset(),
    )


def postpone(tape: Tape, positions: Mapping[int, int]) -> tuple[Tape, Callable[[int], int]]:
    """Move the releases of blocks to later positions of the order.

    Args:
        positions: By block, the position in `order` of the event before which it is now released. A position that is not later
            than the block's own release, and a block that is never released, change nothing.

    Returns:
        The tape, and the function from a position of its old order to that of the new one. The tape itself if nothing moves, or
            if it has loops, since their steps are written once.
    """
    if not positions or tape.loops:
        return tape, lambda position: position
    order = np.asarray(tape.order, np.int64)
    at = _places(tape, ~order)
    released = {block: int(at[block]) for block in positions if block < len(at) and at[block] >= 0}
    moved = {released[block]: position for block, position in positions.items() if released.get(block, position) < position}
    if not moved:
        return tape, lambda position: position
    keys = 2 * np.arange(len(order)) + 1
    keys[list(moved)] = 2 * np.fromiter(moved.values(), np.int64, len(moved))
    new = np.argsort(keys, kind="stable")
    ascending = keys[new]

    def moved_to(position: int) -> int:
        return int(np.searchsorted(ascending, 2 * position))

    return replace(_at_other_positions(tape, moved_to), order=array("q", order[new].tobytes())), moved_to


def _places(tape: Tape, events: np.ndarray) -> np.ndarray:
    """Return by block its position among events; -1 if it is none of them. Other events are negative."""
    found: np.ndarray = np.full(len(tape.sizes), -1)
    positions = np.flatnonzero(events >= 0)
    found[events[positions]] = positions
    return found


def _at_other_positions(tape: Tape, moved_to: Callable[[int], int]) -> Tape:
    return replace(
        tape,
        marks=tuple((moved_to(position), phase) for position, phase in tape.marks),
        second_forward=None if tape.second_forward is None else moved_to(tape.second_forward),
        settled=tuple((moved_to(position), block) for position, block in tape.settled),
    )


def _end_of_step(tape: Tape) -> int | None:
    """Return the position where the first step has ended, before its gradients are dropped; None if the tape ends before."""
    return next((position for position, phase in tape.marks if phase == "optimizer"), None)


def _release_positions(tape: Tape, *, across_steps: bool) -> dict[int, int]:
    """Return by output block the position at which a loop releases it that keeps outputs for longer."""
    end = _end_of_step(tape)
    if end is None or not tape.outputs:
        return {}
    at = _places(tape, np.asarray(tape.order, np.int64))
    # The last step ends with the tape: before its last event, so that outputs are not among the remaining blocks.
    known = [
        max((int(at[block]) for block in blocks), default=0) + 1 for blocks in tape.outputs
    ]  # where each pass has returned
    found: dict[int, int] = {}
    for number, blocks in enumerate(zip(tape.outputs, tape.graphs, strict=True)):
        following = known[number + 1] if number + 1 < len(known) else len(tape.order) - 1
        last_of_step = known[number] <= end < following
        until = end if last_of_step and not across_steps else following
        found |= dict.fromkeys(itertools.chain(*blocks), until)
    return found

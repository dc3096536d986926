"""Largest users of memory at its peak, in the words of those who spread a model over GPUs."""

from __future__ import annotations

from collections import Counter

import numpy as np

from sizer.tape.tape import CATEGORIES, RESIZE, Tape, blocks_alive

UNSHARDED = "unsharded parameters"
LOSS = "loss over the logits"
_OF_LOSSES = ("log_softmax", "nll_loss", "cross_entropy")  # in the names of the operators of a loss


def weigh_peak(tape: Tape) -> dict[str, int]:
    """The bytes, as requested, of what is alive when most of them are, the most first; a tape with loops has none.

    These are the tape's categories, but for parameters that FSDP2 has gathered, whose storages are resized
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py), and what the operators of a loss hold.
    """
    if not len(tape.order) or tape.loops:
        return {}
    events, sizes = np.asarray(tape.order, np.int64), np.asarray(tape.sizes, np.int64)
    changes = np.where(events >= 0, sizes[events], -sizes[~events])
    peak = int(np.argmax(np.cumsum(changes))) + 1
    found: Counter[str] = Counter()
    for block in blocks_alive(tape.order[:peak]):
        found[_kind(tape, block)] += tape.sizes[block]
    return {kind: size for kind, size in found.most_common() if size}


def _kind(tape: Tape, block: int) -> str:
    op, category = tape.op_names[tape.ops[block]], CATEGORIES[tape.categories[block]]
    if category not in ("activation", "temporary"):
        return category
    return UNSHARDED if op == RESIZE else LOSS if any(name in op for name in _OF_LOSSES) else category

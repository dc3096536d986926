"""Largest users of memory at its peak, named in the terms of parallel training."""

from __future__ import annotations

from collections import Counter

import numpy as np

from sizer.tape.tape import CATEGORIES, RESIZE, Tape, blocks_alive

UNSHARDED = "unsharded parameters"
LOSS = "loss over the logits"
_OF_LOSSES = ("log_softmax", "nll_loss", "cross_entropy")  # in the names of the operators of a loss


def weigh_peak(tape: Tape) -> dict[str, int]:
    """Return the requested bytes alive at the peak by kind, largest first; empty for a tape with loops.

    The kinds are the tape's categories, except for two: parameters that FSDP2 has gathered, with resized storages
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py), and tensors of a loss's operators.
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

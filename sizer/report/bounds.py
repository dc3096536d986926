"""Uncertainties of the estimate, as bytes less and more. They are the parts of a process's range.

- The context of a process, outside the allocator (sizer.catalogue.contexts).
- Another version of cuDNN chooses other engines, with other workspaces. The change of reserved memory was read from 50 cases
  answered by both cuDNN 9.19 and 9.26 (`tests/null_driver/recorded`): in nine of ten at most BETWEEN_VERSIONS percent, up or
  down. Replays with cuDNN's next-ranked engines are less useful: they covered 31 of 49 cases, and are wider.
- A workspace that is modelled, without a library's answer, counts as anything from zero to twice the model.
- If a training loop calls `zero_grad()` after the forward pass (as Lightning does), gradients live through it.
- A loop may keep the model's outputs in a variable, through the backward pass and up to the end of the next forward pass,
  unless the query names the loop (`outputs=`; sizer.tape.loop_choices).
- A block used by other streams is free once these have reached its event: at once, or as late as cached memory is returned.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from sizer.tape.loop_choices import keep_gradients, keep_outputs_across_steps
from sizer.tape.tape import CATEGORIES, Tape, streams_behind

# Operators with workspaces that only a closed library (cuDNN) knows, and without size queries. Their bytes on a tape are a model,
# as are those of unresolved size queries. All other workspaces are formulas read in PyTorch's source. `scratch_cuda.MODELLED` is
# the same list, by function.
CLOSED_KERNELS = ("aten._cudnn_rnn",)
_CONVOLUTIONS = ("aten.convolution.", "aten.convolution_backward.")

CONTEXT = "process memory outside the allocator"
ENGINES = "engines of another version of cuDNN"
MODELS = "modelled workspaces"
ZERO_GRAD = "zero_grad() after the forward pass"
OUTPUTS_KEPT = "a loop that keeps the model's outputs during the backward pass"
STREAMS = "blocks that wait for other streams"
ROUTED = "tokens that all other ranks send to this one"

BETWEEN_VERSIONS = 7  # percent; held to the recorded cases by tests/report/test_bounds.py

_WORKSPACE = CATEGORIES.index("workspace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """One part of the range of a process: the most bytes less and more than estimated."""

    name: str
    less_bytes: int
    more_bytes: int


def engines_limit(tape: Tape) -> int:
    """Return the most bytes by which reserved memory may change with cuDNN's engines.

    This is the sum of all results of convolutions; 0 if no engine was queried.
    """
    convolutions = _are_by(tape, _CONVOLUTIONS)
    if not convolutions[list(tape.resolved)].any():
        return 0
    return int(np.asarray(tape.sizes)[convolutions & (_column(tape.categories) != _WORKSPACE)].sum())


def engines_margin(limit_bytes: int, reserved_bytes: int) -> int:
    """Return the margin for cuDNN's engines: a share of reserved memory, at most `limit_bytes` (see engines_limit)."""
    return min(reserved_bytes * BETWEEN_VERSIONS // 100, limit_bytes)


def without_models(tape: Tape) -> Tape:
    """Return the tape without modelled workspaces; unchanged if it has none."""
    return _with_models(tape, 0)


def with_models_twice(tape: Tape) -> Tape:
    """Return the tape with modelled workspaces twice as large; unchanged if it has none."""
    return _with_models(tape, 2)


def at_its_largest(tape: Tape) -> Tape:
    """Return the tape of the largest work: twice the models, outputs and gradients kept, and other streams behind."""
    return streams_behind(keep_gradients(keep_outputs_across_steps(with_models_twice(tape))))


def modelled_blocks(tape: Tape) -> np.ndarray:
    """Return a mask of the blocks that are modelled workspaces, without a library's answer."""
    modelled = _are_by(tape, CLOSED_KERNELS) & (_column(tape.categories) == _WORKSPACE)
    modelled[[block for query in tape.size_queries for block in query.blocks if block not in tape.resolved]] = True
    return modelled


def _are_by(tape: Tape, operators: tuple[str, ...]) -> np.ndarray:
    """Per block whether the operator that allocated it begins with one of some names."""
    return _begin_with(tape.op_names, operators)[np.asarray(tape.ops)]


@lru_cache(maxsize=32)  # tapes of one family share their names
def _begin_with(names: tuple[str, ...], beginnings: tuple[str, ...]) -> np.ndarray:
    return np.array([name.startswith(beginnings) for name in names], bool)


def _with_models(tape: Tape, times: int) -> Tape:
    modelled = modelled_blocks(tape)
    if not modelled.any():
        return tape
    sizes = np.asarray(tape.sizes) * np.where(modelled, times, 1)
    return replace(tape, sizes=array("q", sizes.tobytes()))


def _column(categories: bytes) -> np.ndarray:
    return np.frombuffer(categories, np.uint8)

"""Iterations of torch.optim.LBFGS, which stops once values converge, although no values are computed.

LBFGS compares tensors of the device in Python (torch/optim/lbfgs.py, read in 2.11 and 2.15). The comparisons get the results of
most steps of a real run: no tolerance is reached, so it makes `max_iter` iterations; each adds to its history; the first step
is shortened by the gradient; a line search accepts its first point.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

_MODULE = "torch.optim.lbfgs"
_LEAST_CURVATURE = 1e-10  # of a step that LBFGS adds to its history
_SHORTER, _ACCEPTED = ("step", "lt"), ("_strong_wolfe", "le")  # functions and their comparisons of tensors


class _Answers(TorchFunctionMode):
    """Answers LBFGS's comparisons of tensors: False unless the tensor is in `_holding`."""

    def __init__(self) -> None:
        super().__init__()
        self._holding = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") != _MODULE:
            return out
        if func is Tensor.__bool__:
            return args[0] in self._holding
        comparison = getattr(func, "__name__", "").strip("_")  # PyTorch names Tensor.gt for the operator >
        grows = comparison == "gt" and args[1] == _LEAST_CURVATURE
        if grows or (caller.f_code.co_name, comparison) in (_SHORTER, _ACCEPTED):
            self._holding[out] = True
        return out


@contextmanager
def iterations_assumed(note: Callable[[str], None]) -> Iterator[None]:
    """Make LBFGS run all its iterations within the context. `note` is called with a text after each step."""
    own = torch.optim.LBFGS.step

    def step(optimizer: torch.optim.LBFGS, closure: Callable[[], Any]) -> Any:
        (group,) = optimizer.param_groups
        calls = 0

        def counted() -> Any:
            nonlocal calls
            calls += 1
            return closure()

        tolerance = group["tolerance_change"]
        group["tolerance_change"] = -math.inf  # of losses, which are numbers of Python, as of tensors
        try:
            with _Answers():
                return own(optimizer, counted)
        finally:
            group["tolerance_change"] = tolerance
            note(f"LBFGS was taken to evaluate its closure {calls} times, without reaching a tolerance")

    with mock.patch.object(torch.optim.LBFGS, "step", step):
        yield

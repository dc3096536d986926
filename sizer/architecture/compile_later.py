"""Functions of packages that are compiled when they are first called, and not as the package is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def compiled_when_called() -> Iterator[None]:
    """Within the context, what `torch.compile` is given is compiled as it is first called.

    `torch.compile` itself imports the whole compiler, a second of work. bitsandbytes/backends/default/ops.py (0.50) calls it for
    functions that most of its users never call.
    """
    with mock.patch.object(torch, "compile", functools.partial(_later, torch.compile)):
        yield


def _later(
    compile_now: Callable[..., Any], model: Callable[..., Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """Return what `torch.compile(model, **options)` gives: a decorator without a model."""
    if model is None:
        return functools.partial(_later, compile_now, **options)
    if isinstance(model, torch.nn.Module):
        return compile_now(model, **options)
    compiled = functools.cache(lambda: compile_now(model, **options))

    @functools.wraps(model)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call

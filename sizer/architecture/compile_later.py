"""Functions of packages that are compiled when they are first called, and not as the package is imported.

Hooks and answers that Dynamo traces without a graph break: it compiles code of this room, as models are part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def compiled_when_called() -> Iterator[None]:
    """Delay `torch.compile` within the context: a function is compiled at its first call.

    `torch.compile` itself imports the whole compiler, which takes a second. bitsandbytes/backends/default/ops.py (0.50) calls
    it for functions that most of its users never call.
    """
    with mock.patch.object(torch, "compile", functools.partial(_later, torch.compile)):
        yield


def _later(
    compile_now: Callable[..., Any], model: Callable[..., Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """Return the result of `torch.compile(model, **options)`: a decorator without a model."""
    if model is None:
        return functools.partial(_later, compile_now, **options)
    if isinstance(model, torch.nn.Module):
        return compile_now(model, **options)
    compiled = functools.cache(lambda: compile_now(model, **options))

    @functools.wraps(model)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


Hook = Callable[[Any, Any, Any], None]


def step_hooks(stepped: list[Any], before: Hook, after: Hook) -> tuple[Hook, Hook]:
    """Return the hooks of optimizers' steps within compiled code.

    Args:
        stepped: Optimizers are appended to this list when their compiled step has run.
        before: Called before a step that is not compiled.
        after: Called after a step that is not compiled.
    """

    def begin(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            before(optimizer, args, kwargs)

    def end(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            stepped.append(optimizer)
        else:
            after(optimizer, args, kwargs)

    return begin, end


def preceded(function: Callable[..., Any], before: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that calls `before` with its arguments first, except in compiled code."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            before(*args)
        return function(*args, **kwargs)

    return call


def answer(value: Any, eager: Callable[[], Any] | None = None) -> Callable[..., Any]:
    """Return a function that returns a value, or what `eager` returns outside of compiled code."""

    def answering(*args: Any, **kwargs: Any) -> Any:
        if eager is None or torch.compiler.is_compiling():
            return value
        return eager()

    return answering


def skipped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does nothing, except in compiled code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if torch.compiler.is_compiling() else None

    return call

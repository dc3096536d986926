"""Checks of the arguments of Sizer's Python functions. Their errors say what to pass. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from sizer.base.errors import RequestError, quote


def check_text(key: str, value: object, todo: str = "pass a text") -> str:
    """Return a value that is a text. Raise RequestError for another."""
    if not isinstance(value, str):
        raise RequestError(key, given=describe(value), allowed="a text", todo=todo)
    return value


def check_whole(key: str, value: object, example: str) -> None:
    """Raise RequestError for a value that is not a whole number."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise RequestError(key, given=quote(value), allowed="a whole number", todo=f"pass for example {example}")


def check_function(key: str, value: object, *, allowed: str, todo: str, returned_by: str = "") -> None:
    """Raise RequestError for a value that is not a function without arguments.

    Args:
        key: Name of the parameter.
        value: The argument, or the return value of the function `returned_by`.
        allowed: Text on the accepted values.
        todo: Text on how to fix it.
        returned_by: The function, in words.
    """
    returned = f"{returned_by} that returned " if returned_by else ""
    if not callable(value) or _is_module(value):
        raise RequestError(key, given=f"{returned}{describe(value)}", allowed=allowed, todo=todo)
    if inspect.isgeneratorfunction(value) or inspect.iscoroutinefunction(value):
        kind = "a generator" if inspect.isgeneratorfunction(value) else "a coroutine"
        raise RequestError(key, given=f"{returned}{kind}, which does nothing when it is called", allowed=allowed, todo=todo)
    try:
        inspect.signature(value).bind()
    except ValueError:
        return  # a function in C, which has none
    except TypeError as error:
        raise RequestError(key, given=f"{returned}{describe(value)}, {error}", allowed=allowed, todo=todo) from None


def arguments_of(inputs: object) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a module's forward pass: by position, by name.

    Raises:
        RequestError: `inputs` are neither a tuple, a list nor a mapping.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise RequestError(
        "inputs",
        given=describe(inputs),
        allowed="a tuple or a dict of the arguments of the module's forward",
        todo="put a single argument into a tuple, as (images,)",
    )


def describe(value: object) -> str:
    """Return a value in a word or two: None, a class by its name, or the type of an object."""
    if value is None or isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str):
        return quote(value)
    name = getattr(value, "__name__", None)
    return f"the function {name}" if callable(value) and isinstance(name, str) else f"an object of {type(value).__name__}"


def _is_module(value: object) -> bool:
    """Return True for an object of nn.Module, which can be called, too; a class of modules makes them."""
    return not isinstance(value, type) and hasattr(value, "forward")

"""Tables by operator, and their union.

An operator that two tables name is an error, as one entry would silently replace the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

Key = TypeVar("Key")
Row = TypeVar("Row")

Results = dict[Any, Callable[[tuple, Any], Any]]
"""Per operator a function of its arguments and its meta kernel's result, which returns the result as the device has it."""


def operator(name: str) -> Any:
    """Return ATen's overload "add.Tensor"; the default overload of "exp"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def listed(names: str, row: Row) -> dict[Any, Row]:
    """Return a table with one row for each of ATen's overloads in a text."""
    return {operator(name): row for name in names.split()}


def functional(func: Any) -> Any:
    """Return the overload that makes the results which `func` writes to arguments such as `out=`, or `func` if there is none."""
    written = [argument.name for argument in func._schema.arguments if argument.is_out]
    if not written:
        return func
    given = _parameters(func)
    packet = getattr(getattr(torch.ops, func.namespace), func._opname)
    for name in packet.overloads():
        other = getattr(packet, name)
        if _parameters(other) == given and not other._schema.is_mutable:
            return other
    return func


def _parameters(func: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in func._schema.arguments if not argument.is_out]


def join(*tables: Mapping[Key, Row]) -> dict[Key, Row]:
    """Return all rows of the tables. Raises ValueError with the operators that more than one table names."""
    joined: dict[Key, Row] = {}
    for table in tables:
        if twice := sorted(str(key) for key in joined.keys() & table.keys()):
            raise ValueError(f"tables of operators name {', '.join(twice)} twice: leave one")
        joined.update(table)
    return joined

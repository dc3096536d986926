"""Tables by operator, and how several are joined: an operator that two of them name is a mistake, since one would silently take
the other's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

Key = TypeVar("Key")
Row = TypeVar("Row")

Results = dict[Any, Callable[[tuple, Any], Any]]
"""Per operator a function of its arguments and its meta kernel's result, which returns the result as the device has it."""


def operator(name: str) -> Any:
    """ATen's overload "add.Tensor"; the default one of "exp"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def listed(names: str, row: Row) -> dict[Any, Row]:
    """One row for each of ATen's overloads in a text."""
    return {operator(name): row for name in names.split()}


def join(*tables: Mapping[Key, Row]) -> dict[Key, Row]:
    """All rows of the tables. Raises ValueError with the keys that stand in more than one."""
    joined: dict[Key, Row] = {}
    for table in tables:
        if twice := sorted(str(key) for key in joined.keys() & table.keys()):
            raise ValueError(f"tables of operators name {', '.join(twice)} twice: leave one")
        joined.update(table)
    return joined

"""Tables of operators, joined: an operator that two of them name is a mistake, since one would silently take the other's place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Key = TypeVar("Key")
Row = TypeVar("Row")


def join(*tables: Mapping[Key, Row]) -> dict[Key, Row]:
    """All rows of the tables. Raises ValueError with the keys that stand in more than one."""
    joined: dict[Key, Row] = {}
    for table in tables:
        if twice := sorted(str(key) for key in joined.keys() & table.keys()):
            raise ValueError(f"tables of operators name {', '.join(twice)} twice: leave one")
        joined.update(table)
    return joined

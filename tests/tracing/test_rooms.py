"""Which of tracing's rooms may import which: one way, as `sizer/tracing/__init__.py` draws it, for types too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import sizer.tracing
from sizer.tracing import device_rules

FOLDER = Path(sizer.tracing.__file__).parent
TABLES = {"KERNELS", "FORMULAS", "HANDLERS", "RESULTS", "ALLOCATIONS", "CHECKS", "SHORTCUTS"}

# Each room, a folder or a module, with all that it may import from; a room stands below those, so that no way leads back.
_GROUND = ("operator_tables", "device", "log")
_BELOW = (*_GROUND, "values", "allocations", "meta")
ROOMS: dict[str, tuple[str, ...]] = {
    "operator_tables": (),
    "device": (),
    "log": (),
    "modules": ("log",),
    "values": _GROUND,
    "allocations": (*_GROUND, "values"),
    "meta": (*_GROUND, "values", "allocations"),
    "cuda": _BELOW,
    "cpu": _BELOW,
    "mps_kernels": _BELOW,
    "device_rules": (*_BELOW, "cuda", "cpu", "mps_kernels"),
    "blocks": ("log", "modules", "allocations"),
    "recorder": (*_BELOW, "modules", "cuda", "device_rules", "blocks"),
    "batch_lines": ("device",),
    "depth": ("device",),
    "steps": _BELOW,
    "compiled": (*_BELOW, "blocks", "cuda", "device_rules", "recorder", "steps"),
    "watch": (*_BELOW, "recorder"),
    "rule_texts": (*_BELOW, "cuda", "device_rules"),
    "explain": (*_BELOW, "cuda", "rule_texts"),
    "traced_rank": (*_BELOW, "steps"),
    "trace": (*_BELOW, "modules", "cuda", "cpu", "device_rules", "recorder", "steps", "compiled", "traced_rank"),
    "token_trace": (*_BELOW, "modules", "recorder", "depth", "steps", "traced_rank", "trace"),
    "cache_growth": (*_BELOW, "modules", "depth", "steps", "token_trace"),
    "generation": (*_BELOW, "modules", "depth", "steps", "token_trace"),
    "rollouts": ("recorder", "generation"),
}


def room_of(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").parts[0]


def files() -> list[Path]:
    return [path for path in sorted(FOLDER.rglob("*.py")) if path.parent != FOLDER or path.stem != "__init__"]


def named_modules(source: str) -> Iterator[str]:
    """What a file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def named_rooms(source: str) -> set[str]:
    """The rooms of tracing that a file names."""
    found = (re.match(r"sizer\.tracing\.(\w+)", name) for name in named_modules(source))
    return {match[1] for match in found if match}


def module_graph() -> dict[str, set[str]]:
    """Every module of tracing with those that it names, packages without their `__init__`."""
    paths = {".".join(("sizer", "tracing", *path.relative_to(FOLDER).with_suffix("").parts)): path for path in files()}
    named = {name: set(named_modules(path.read_text(encoding="utf-8"))) for name, path in paths.items()}
    return {
        name: {known for known in paths if any(one == known or one.startswith(f"{known}.") for one in ones)} - {name}
        for name, ones in named.items()
    }


def test_every_module_is_in_a_room():
    assert {room_of(path) for path in files()} == set(ROOMS)


def test_no_way_leads_back():
    above: set[str] = set()
    for room, behind in ROOMS.items():
        assert set(behind) <= above
        above.add(room)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_those_behind_it(room: str):
    allowed = {room, *ROOMS[room]}
    foreign = {
        path.name: named_rooms(path.read_text(encoding="utf-8")) - allowed for path in files() if room_of(path) == room
    }
    assert foreign
    assert {name: rooms for name, rooms in foreign.items() if rooms} == {}


def test_modules_import_one_way_too():
    order = list(TopologicalSorter(module_graph()).static_order())
    assert order.index("sizer.tracing.values.handler") < order.index("sizer.tracing.recorder")


def test_a_type_from_above_is_caught():
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sizer.tracing.recorder import Recorder\n"
    assert named_rooms(source) == {"recorder"}
    graph = module_graph()
    graph["sizer.tracing.values.stand_ins"].add("sizer.tracing.recorder")
    with pytest.raises(CycleError, match=r"nodes are in a cycle"):
        TopologicalSorter(graph).prepare()


def tables_of(module: ModuleType) -> set[str]:
    return TABLES & vars(module).keys()


def test_every_table_is_among_the_rules():
    families = {family for kind in device_rules.FAMILIES.values() for family in kind}
    assert all(tables_of(family) for family in families)
    named = {family.__name__ for family in families}
    pattern = re.compile(rf"^({'|'.join(TABLES)})\b.* = ", re.MULTILINE)
    with_tables = {
        ".".join(("sizer", "tracing", *path.relative_to(FOLDER).with_suffix("").parts))
        for path in files()
        if pattern.search(path.read_text(encoding="utf-8"))
    }
    assert with_tables == named

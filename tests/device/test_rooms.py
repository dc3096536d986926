"""Which of the device's rooms may import which: one way, as `sizer/device/__init__.py` draws it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import sizer.device

FOLDER = Path(sizer.device.__file__).parent

# Each room with all that it may import from; a room stands below those, so that no way leads back.
ROOMS = {
    "record": (),
    "placement": (),
    "machine": ("record",),
    "comparison": ("record",),
    "readers": ("record", "machine"),
    "ledger": ("record", "comparison"),
    "trial": ("record", "machine", "readers"),
    "suite": ("record", "machine", "readers", "trial"),
}
SHOWS_IT = ("sizer.ui", "sizer.commands", "sizer.__main__", "streamlit")


def named_modules(source: str) -> Iterator[str]:
    """The modules that a file names: in import statements, wherever they stand, and as programs in texts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"sizer(\.\w+)+", str(node.value)):
            yield node.value


def named_rooms(source: str) -> set[str]:
    """The rooms of the device that a file names."""
    found = (re.match(r"sizer\.device\.(\w+)", name) for name in named_modules(source))
    return {match[1] for match in found if match}


def module_graph() -> dict[str, set[str]]:
    """Every module of the device with those that it names."""
    paths = {".".join(("sizer", "device", *path.relative_to(FOLDER).with_suffix("").parts)): path for path in files()}
    return {
        name: {
            known for one in named_modules(path.read_text(encoding="utf-8")) for known in paths if _is_in(one, known)
        }
        - {name}
        for name, path in paths.items()
    }


def _is_in(name: str, module: str) -> bool:
    """Whether a name is a module, or something that is imported from it."""
    return name == module or name.startswith(f"{module}.")


def files(room: str = "*") -> list[Path]:
    return sorted(FOLDER.glob(f"{room}/*.py"))


def test_every_module_is_in_a_room():
    assert [path.name for path in FOLDER.glob("*.py")] == ["__init__.py"]
    assert {path.parent.name for path in files()} == set(ROOMS)


def test_no_way_leads_back():
    above: set[str] = set()
    for room, behind in ROOMS.items():
        assert set(behind) <= above
        above.add(room)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_those_behind_it(room: str):
    allowed = {room, *ROOMS[room]}
    foreign = {path.name: named_rooms(path.read_text(encoding="utf-8")) - allowed for path in files(room)}
    assert len(foreign) > 1
    assert {name: rooms for name, rooms in foreign.items() if rooms} == {}


def test_no_room_knows_who_shows_it():
    names = {name for path in files() for name in named_modules(path.read_text(encoding="utf-8"))}
    assert not [name for name in names if any(_is_in(name, one) for one in SHOWS_IT)]


def test_modules_import_one_way_too():
    order = list(TopologicalSorter(module_graph()).static_order())
    assert order.index("sizer.device.record.measurement") < order.index("sizer.device.trial.trial")


def test_what_is_named_is_caught_wherever_it_stands():
    source = (
        "import sizer.device.suite.suite\nfrom sizer.device.trial import launch\nfrom sizer.commands import text\n"
        "def f():\n    from sizer.device import ledger\n    return ask('sizer.device.readers.cpu', 'the sizer.device.machine')\n"
    )
    assert named_rooms(source) == {"suite", "trial", "ledger", "readers"}
    assert any(_is_in(name, "sizer.commands") for name in named_modules(source))


def test_a_circle_is_caught():
    graph = module_graph()
    graph["sizer.device.record.measurement"].add("sizer.device.trial.trial")
    with pytest.raises(CycleError, match=r"nodes are in a cycle"):
        TopologicalSorter(graph).prepare()

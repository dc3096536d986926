"""Which room may import which: every module is read, also what it imports under TYPE_CHECKING, in functions, or names in a text.

`ROOMS` is the table in docs/how-it-works.md, which must say the same. A second set of tests imports modules in processes of their
own and looks whether torch, Streamlit or pandas came along.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import sizer

PROJECT = Path(sizer.__file__).parent.parent

PLAIN_ROOMS = ("base", "catalogue", "query", "tape", "allocator", "report")
PLAIN_DEVICE = ("device.record", "device.machine", "device.comparison", "device.ledger")

# Each room with those that it may import; a room stands below those, so that no way leads back.
ROOMS = {
    "base": (),
    "processes": ("base",),
    "catalogue": ("base",),
    "query": ("base", "catalogue"),
    "tape": ("base", "catalogue"),
    "allocator": ("base", "catalogue", "tape"),
    "report": ("base", "catalogue", "query", "tape", "allocator"),
    "serving": ("base", "catalogue", "query", "report"),
    "pasted": ("base", "catalogue", "query", "serving"),
    "architecture": ("base", "catalogue", "query", "report"),
    "distributed": ("base", "catalogue", "architecture"),
    "recipes": ("base", "catalogue", "architecture"),
    "tracing": ("base", "catalogue", "tape", "allocator", "report", "architecture", "distributed", "recipes"),
    "diffusion": ("base", "catalogue", "query", "tape", "report", "architecture", "distributed", "tracing"),
    "estimating": (*PLAIN_ROOMS, "serving", "architecture", "distributed", "recipes", "tracing"),
    "decision": (*PLAIN_ROOMS, "architecture", "distributed", "tracing", "estimating"),
    "placement": ("base", "catalogue", "query", "report", "architecture", "tracing"),
    "device.record": ("base", "tape"),
    "device.machine": ("base", "processes", "device.record"),
    "device.comparison": (*PLAIN_ROOMS, "device.record"),
    "device.ledger": ("base", "report", "device.record", "device.comparison"),
    "device.readers": ("base", "tape", "allocator", "device.record", "device.machine"),
    "device.trial": (
        "base", "processes", "catalogue", "query", "tape", "architecture", "distributed", "tracing",
        "estimating", "device.record", "device.machine", "device.readers",
    ),
    "device.suite": (
        "base", "processes", "catalogue", "query", "architecture", "tracing", "estimating", "device.record",
        "device.machine", "device.readers", "device.trial",
    ),
    "service": (
        "base", "processes", "catalogue", "query", "allocator", "report", "pasted", "tracing", "estimating",
        "decision", "placement", "device.record", "device.comparison",
    ),
    "running": ("base", "catalogue", "tape", "allocator", "report", "architecture", "distributed", "tracing"),
    "commands": (
        "base", "processes", "catalogue", "query", "tape", "report", "pasted", "serving", "placement", "device.record",
        "device.machine", "device.comparison", "device.ledger", "device.trial", "device.suite", "service",
        "running",
    ),
    "ui": (
        *PLAIN_ROOMS, "pasted", "serving", "device.record", "device.machine", "device.comparison",
        "device.ledger", "device.trial", "service",
    ),
    "__main__": ("base", "commands", "service"),
    "__init__": ("base", "catalogue", "query", "report", "estimating", "placement"),
    "pages": ("base", "ui"),
    "app": ("ui",),
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    module_name(path): path for pattern in ("sizer/**/*.py", "pages/*.py", "app.py") for path in PROJECT.glob(pattern)
}


def room_of(module: str) -> str:
    """The room that a module is in, as `ROOMS` names it; raises KeyError where it is in none."""
    parts = module.split(".")
    if parts[0] != "sizer":
        return parts[0]
    inner = "__init__" if len(parts) == 1 else ".".join(parts[1:3]) if parts[1] == "device" else parts[1]
    return inner if inner != "device" else "device.record"  # the package itself imports nothing


def named_modules(source: str) -> Iterator[str]:
    """The project's modules that a file names: in import statements, wherever they stand, and as programs in texts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (found for name in names if (found := name if name in MODULES else node.module) in MODULES)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"sizer(\.\w+)+", str(node.value)):
            yield from {node.value} & MODULES.keys()


def forbidden(module: str, names: Iterable[str]) -> set[tuple[str, str]]:
    """What a module names although its room may not."""
    own = room_of(module)
    return {(module, name) for name in names if room_of(name) not in (own, *ROOMS[own])}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Every module with those that it names."""
    return {name: set(named_modules(path.read_text(encoding="utf-8"))) - {name} for name, path in MODULES.items()}


def joined_graph(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph of modules. The rooms inside sizer.tracing have a test of their own: they are one here."""

    def joined(name: str) -> str:
        return "sizer.tracing" if name.startswith("sizer.tracing.") else name

    found: dict[str, set[str]] = {}
    for module, names in graph.items():
        kept = {joined(name) for name in names} - {joined(module)}
        found.setdefault(joined(module), set()).update(kept)
    return found


def test_every_module_is_in_a_room():
    assert {room_of(module) for module in MODULES} == set(ROOMS)


def test_no_way_leads_back_between_rooms():
    above: set[str] = set()
    for room, behind in ROOMS.items():
        assert set(behind) <= above, room
        above.add(room)


def test_rooms_import_what_they_may(graph: dict[str, set[str]]):
    found = set().union(*(forbidden(module, names) for module, names in graph.items()))
    assert found == set()


def test_modules_import_one_way_too(graph: dict[str, set[str]]):
    order = list(TopologicalSorter(joined_graph(graph)).static_order())
    assert order.index("sizer.tape.tape") < order.index("sizer.tracing") < order.index("sizer.device.trial.trial")


def test_what_is_forbidden_is_caught_wherever_it_stands():
    source = (
        "import sizer.device.suite.suite\nfrom sizer.device.trial import launch\nfrom sizer.base.errors import quote\n"
        "if TYPE_CHECKING:\n    from sizer.commands.terminal import percent\n"
        "def f():\n    from sizer.device import ledger\n    return run('sizer.device.machine.inventory', 'in sizer.ui.form')\n"
    )
    names = set(named_modules(source))
    assert names == {
        *("sizer.device.suite.suite", "sizer.device.trial.launch", "sizer.base.errors", "sizer.commands.terminal"),
        *("sizer.device.ledger", "sizer.device.machine.inventory"),
    }
    caught = {name for _, name in forbidden("sizer.device.trial.measuring_process", names)}
    assert caught == {"sizer.device.suite.suite", "sizer.commands.terminal", "sizer.device.ledger"}


def test_a_circle_is_caught(graph: dict[str, set[str]]):
    circular = joined_graph(graph)
    circular["sizer.tape.tape"].add("sizer.report.report")
    with pytest.raises(CycleError, match=r"nodes are in a cycle"):
        TopologicalSorter(circular).prepare()


# -------------------------------------------------------------------------------------------------------- the documented table


def documented_rows(text: str) -> dict[str, set[str]]:
    """The rooms of the documented table, with the rooms that it says they may import."""
    rows = re.findall(r"^\| (`[^|]+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    found = {}
    for names, allowed in rows:
        rooms = {
            name.removeprefix("sizer/").removesuffix("/").removesuffix(".py")
            for name in re.findall(r"`([^`]+)`", names)
        }
        words = set(re.findall(r"`(\w+)`", allowed)) 
        found |= {room: words - {room} for room in rooms if room in OUTER}
    return found


OUTER = {room.partition(".")[0] for room in ROOMS} - {"__main__", "__init__", "app", "pages"}


def test_the_rooms_are_documented_as_they_are():
    told = documented_rows((PROJECT / "docs/how-it-works.md").read_text(encoding="utf-8"))
    true: dict[str, set[str]] = {room: set() for room in OUTER}
    for room, behind in ROOMS.items():
        if (outer := room.partition(".")[0]) in OUTER:
            true[outer] |= {name.partition(".")[0] for name in behind} - {outer}
    assert told == true


# ------------------------------------------------------------------------------------------------- what comes along

HEAVY = ("torch", "torchvision", "transformers")
PLAIN = (*HEAVY, "streamlit", "pandas")

# What importing a module must not bring along: rooms as a whole (".*", also what is written later), and of the rooms that work
# with torch what is imported where torch is not, by the pages and by the command line.
BRINGS = {
    PLAIN: (
        *("sizer", "sizer.base.*", "sizer.query.*"),
        *("sizer.processes.*", "sizer.commands.*", "sizer.pasted.*"),
        *(f"sizer.{room}.*" for room in PLAIN_DEVICE),
        *(f"sizer.device.readers.{name}" for name in ("open", "reader", "events")),
        *(f"sizer.device.trial.{name}" for name in ("launch", "measuring_process")),
        *(f"sizer.device.suite.{name}" for name in ("cases", "suite")),
        "sizer.placement.report",
        *(f"sizer.running.{name}" for name in ("starting", "routes", "run_outcome", "history", "run_settings")),
        *(f"sizer.running.{name}" for name in ("command_line", "difference", "pytest_plugin")),
        "sizer.running.driver.*",
    ),
    (*HEAVY, "streamlit"): (
        *("sizer.architecture", "sizer.architecture.hub_files", "sizer.catalogue.*", "sizer.service.*"),
        *("sizer.tape.*", "sizer.allocator.*", "sizer.report.*", "sizer.serving.*"),
    ),
    HEAVY: ("sizer.ui.*",),
}

IMPORT_ALL = """
import importlib, json, sys
modules, unwanted = json.loads(sys.argv[1])
came = {}
for module in modules:
    importlib.import_module(module)
    for name in unwanted:
        if name in sys.modules:
            came.setdefault(name, module)
print(json.dumps(came))
"""


def modules_of(pattern: str) -> list[str]:
    """The modules that a name stands for: itself, or with ".*" all that are in the package."""
    package = pattern.removesuffix(".*")
    return [name for name in MODULES if name == package or (package != pattern and name.startswith(f"{package}."))]


def brought_along(modules: list[str], unwanted: tuple[str, ...]) -> dict[str, str]:
    """Which unwanted packages a fresh process has imported after these modules, each with the module that brought it."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps([modules, unwanted])],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("unwanted", BRINGS, ids="-".join)
def test_rooms_bring_nothing_unwanted_along(unwanted: tuple[str, ...]):
    modules = {pattern: modules_of(pattern) for pattern in BRINGS[unwanted]}
    assert all(modules.values()), modules
    assert brought_along(sorted(set().union(*modules.values())), unwanted) == {}


def test_what_is_unwanted_is_caught():
    assert brought_along(["sizer.query.request", "sizer.architecture.blueprint"], ("torch", "streamlit")) == {
        "torch": "sizer.architecture.blueprint"
    }


def test_queries_are_read_without_torch():
    code = (
        "import sys; from sizer.base.config_json import encode_config; from sizer.query.text import parse_query\n"
        "parse_query('arch=config:' + encode_config('{\"model_type\": \"gpt2\"}'))\n"
        "parse_query('arch=hf:' + next(iter(__import__('sizer.catalogue.presets', fromlist=['PRESETS']).PRESETS)))\n"
        "print([name for name in ('torch', 'transformers', 'streamlit') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.stderr) == ("[]\n", "")


# --------------------------------------------------------------------------------------------------------------- pages

PAGES_MAY_IMPORT = ("sizer.ui", "sizer.base.errors", "streamlit", "__future__")


def imported_names(source: str) -> set[str]:
    """Every module that a script's import statements name, wherever they stand."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}


def outside(names: set[str], allowed: tuple[str, ...]) -> set[str]:
    return {name for name in names if not any(name == room or name.startswith(f"{room}.") for room in allowed)}


@pytest.mark.parametrize("page", sorted((PROJECT / "pages").glob("*.py")), ids=lambda page: page.name)
def test_pages_import_components_only(page: Path):
    assert outside(imported_names(page.read_text(encoding="utf-8")), PAGES_MAY_IMPORT) == set()


def test_other_imports_of_a_page_are_caught():
    source = "import streamlit as st\nfrom sizer.ui import form\ndef f():\n    import torch.nn\n    from sizer import memory\n"
    assert outside(imported_names(source), PAGES_MAY_IMPORT) == {"torch.nn", "sizer"}

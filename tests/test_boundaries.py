"""Who may import what: each room's modules are imported in a process of their own, and what came along is looked at."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import sizer

PROJECT = Path(sizer.__file__).parent.parent
HEAVY = ("torch", "torchvision", "transformers")
PLAIN = (*HEAVY, "streamlit", "pandas")

# Room → what importing any of its modules must not bring along. A name with ".*" stands for every module in it, also
# those that are written later.
ROOMS = {
    "sizer": PLAIN,
    "sizer.errors": PLAIN,
    "sizer.units": PLAIN,
    "sizer.config_json": PLAIN,
    "sizer.request": PLAIN,
    "sizer.architecture": (*HEAVY, "streamlit"),
    "sizer.architecture.hub": (*HEAVY, "streamlit"),
    "sizer.catalogue.presets": (*HEAVY, "streamlit"),
    "sizer.memory.*": (*HEAVY, "streamlit"),
    # Of the device's rooms these are plain as a whole, and of the others what is imported where torch is not: by the pages, and
    # by the command line, which runs the suite where neither Streamlit nor pandas is installed.
    **dict.fromkeys([f"sizer.device.{room}.*" for room in ("record", "machine", "comparison", "ledger")], PLAIN),
    **dict.fromkeys(
        [f"sizer.device.readers.{name}" for name in ("reader", "events", "cuda_events", "shortage")], PLAIN
    ),
    **dict.fromkeys([f"sizer.device.trial.{name}" for name in ("launch", "process", "child")], PLAIN),
    **dict.fromkeys([f"sizer.device.suite.{name}" for name in ("cases", "bench", "suite")], PLAIN),
    **dict.fromkeys([f"sizer.placement.{name}" for name in ("placement", "mistakes")], PLAIN),
    "sizer.commands.*": PLAIN,
    "sizer.terminal.*": PLAIN,
    "sizer.service.*": (*HEAVY, "streamlit"),
    "sizer.ui.*": HEAVY,
}
# What the pages may import from the project: the components, and the errors that they show.
PAGES_MAY_IMPORT = ("sizer.ui", "sizer.errors", "streamlit", "__future__")

IMPORT_ALL = """
import importlib, json, sys
modules, forbidden = json.loads(sys.argv[1])
came = {}
for module in modules:
    importlib.import_module(module)
    for name in forbidden:
        if name in sys.modules:
            came.setdefault(name, module)
print(json.dumps(came))
"""


def modules_of(room: str) -> list[str]:
    """The names of a room's modules, found by walking its folder."""
    package = room.removesuffix(".*")
    if package == room:
        return [room]
    folder = PROJECT / Path(*package.split("."))
    inside = pkgutil.walk_packages([str(folder)], f"{package}.")
    return [package, *(module.name for module in inside if not module.name.endswith(".__main__"))]


def brought_along(modules: list[str], forbidden: tuple[str, ...]) -> dict[str, str]:
    """Which forbidden packages a fresh process has imported after these modules, each with the module that brought it."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps([modules, forbidden])],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def imported_names(source: str) -> set[str]:
    """Every module that a script's import statements name, wherever they stand."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}


def outside(names: set[str], allowed: tuple[str, ...]) -> set[str]:
    return {name for name in names if not any(name == room or name.startswith(f"{room}.") for room in allowed)}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_brings_nothing_forbidden_along(room: str):
    modules = modules_of(room)
    assert modules
    assert brought_along(modules, ROOMS[room]) == {}


def test_what_is_forbidden_is_caught():
    assert brought_along(["sizer.request", "sizer.architecture.blueprint"], ("torch", "streamlit")) == {
        "torch": "sizer.architecture.blueprint"
    }


def test_the_walk_finds_modules_in_packages():
    assert {"sizer.memory", "sizer.memory.tape", "sizer.catalogue.gpus"} <= set(modules_of("sizer.memory.*"))
    assert any(name.startswith("sizer.tracing.kernels.") for name in modules_of("sizer.tracing.*"))


def test_questions_are_read_without_torch():
    code = (
        "import sys; from sizer.config_json import encode_config; from sizer.request import parse_query\n"
        "parse_query('arch=config:' + encode_config('{\"model_type\": \"gpt2\"}'))\n"
        "parse_query('arch=hf:' + next(iter(__import__('sizer.catalogue.presets', fromlist=['PRESETS']).PRESETS)))\n"
        "print([name for name in ('torch', 'transformers', 'streamlit') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.stderr) == ("[]\n", "")


@pytest.mark.parametrize("page", sorted((PROJECT / "pages").glob("*.py")), ids=lambda page: page.name)
def test_pages_import_components_only(page: Path):
    assert outside(imported_names(page.read_text(encoding="utf-8")), PAGES_MAY_IMPORT) == set()


def test_other_imports_of_a_page_are_caught():
    source = "import streamlit as st\nfrom sizer.ui import form\ndef f():\n    import torch.nn\n    from sizer import memory\n"
    assert outside(imported_names(source), PAGES_MAY_IMPORT) == {"torch.nn", "sizer"}

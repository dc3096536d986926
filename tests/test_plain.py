"""Tapes, allocators and reports stay plain: they import the standard library, numpy, Numba and plain rooms only."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import sizer

PLAIN = ("tape", "allocator", "report")
ALLOWED = ("numpy", "numba", *(f"sizer.{room}" for room in (*PLAIN, "base", "catalogue", "query")))
FILES = sorted(path for room in PLAIN for path in (Path(sizer.__file__).parent / room).glob("*.py"))


def foreign_imports(source: str) -> list[str]:
    """The modules that a file imports and this room may not."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return [
        name for name in names if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith(ALLOWED)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_nothing_else_is_imported(path):
    assert foreign_imports(path.read_text(encoding="utf-8")) == []


def test_the_test_can_fail():
    source = "import csv, torch.nn\nfrom sizer.tape import tape\ndef f():\n    from streamlit import write\nfrom . import x"
    assert sorted(foreign_imports(source)) == [".", "streamlit", "torch.nn"]

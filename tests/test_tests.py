"""Tests say what they expect: an error is expected with its words."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conftest import EVERY, EVERY_BROWSER, TURNS, is_sampled

FOLDER = Path(__file__).parent
WITHOUT_WORDS = ("Abandoned", "BlockingIOError", "KeyboardInterrupt")  # they carry none, or the system's


def expects_any_words(source: str) -> list[int]:
    """The lines where `pytest.raises` takes an error whatever it says, and nobody looks at it afterwards."""
    tree = ast.parse(source)
    looked_at = {
        id(item.context_expr)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if item.optional_vars
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "pytest.raises"
        and not any(keyword.arg == "match" for keyword in node.keywords)
        and ast.unparse(node.args[0]) not in WITHOUT_WORDS
        and id(node) not in looked_at
    ]


def test_every_expected_error_has_words() -> None:
    found = {
        str(path.relative_to(FOLDER)): expects_any_words(path.read_text(encoding="utf-8"))
        for path in FOLDER.rglob("*.py")
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_test_can_fail() -> None:
    assert expects_any_words(
        "with pytest.raises(ValueError):\n    f()\nwith pytest.raises(ValueError, match='x'): f()"
    ) == [1]
    assert (
        expects_any_words("with pytest.raises(ValueError) as caught: f()\nwith pytest.raises(KeyboardInterrupt): f()")
        == []
    )


def test_ci_runs_a_share_of_the_exhaustive_tests_and_more_in_a_browser() -> None:
    names = [f"tests/tracing/test_depth.py::test_a_model[{number}]" for number in range(20_000)]
    assert 0.8 < sum(map(is_sampled, names)) * EVERY / len(names) < 1.2
    in_browser = [name.replace("tracing", "browser") for name in names]
    assert 0.8 < sum(map(is_sampled, in_browser)) * EVERY_BROWSER / len(names) < 1.2


def test_slow_files_exist_and_have_one_turn() -> None:
    files = [name for turn in TURNS for name in turn]
    assert [name for name in files if not (FOLDER / f"{name}.py").is_file()] == []
    assert len(set(files)) == len(files)

"""The documents' examples: `python -m tests.readme` runs their commands and writes them again, and `tests/test_readme.py` checks
them. The same command writes the documents' figures and tables (`tests/figures.py`).

An example is a fenced block whose first line is "$ python -m sizer ...". A line of it is one of the command's, whose figures are
replaced; "..." stands for lines that are left out. Figures of the machine at hand (MACHINE) are neither replaced nor held.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
DOCUMENTS = (README, ROOT / "CONTRIBUTING.md", *sorted(path for path in DOCS.glob("*.md") if path.stem != "style"))
LEFT_OUT = "..."
PICTURES = ("size-a-model.png", "measure.png")  # in tests/browser
TAKE = "SIZER_TAKE_PICTURES"  # set, tests/browser/test_pictures.py takes them anew

_BLOCK = re.compile(r"```\n\$ python -m (sizer [^\n]+)\n(.*?)```\n", re.DOTALL)
_FIGURE = re.compile(r"[-<]?\s*[\d][\d,.]*")
# What depends on the computer: its processor and memory, the installed PyTorch, and bytes of its C++ runtime.
MACHINE = re.compile(r"^measured on |^All \d+ figures hold")


def text_of_documents() -> str:
    """Return the text of all documents."""
    return "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)


def examples(text: str) -> Iterator[tuple[str, list[str]]]:
    """Command and lines of each example."""
    for match in _BLOCK.finditer(text):
        yield match[1], match[2].splitlines()


def run(command: str) -> list[str]:
    """What a command prints, line by line. Raises subprocess.CalledProcessError where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], capture_output=True, text=True, check=True, cwd=README.parent
    )
    return done.stdout.splitlines()


def renew(lines: list[str], printed: list[str]) -> list[str]:
    """An example's lines with the figures that were printed. Raises LookupError for a line that is not among those printed."""
    remaining = iter(printed)
    return [line if line == LEFT_OUT or MACHINE.match(line) else _same(line, remaining) for line in lines]


def _same(line: str, remaining: Iterator[str]) -> str:
    """The next line that says the same but for its figures."""
    for found in remaining:
        if _without_figures(found) == _without_figures(line):
            return found.rstrip()
    raise LookupError(f"no line is printed like: {line}")


def _without_figures(line: str) -> str:
    return re.sub(r"\s+", " ", _FIGURE.sub("0", line)).strip()


def renewed(text: str) -> str:
    """Return a document's text with every example made anew."""

    def replace(match: re.Match) -> str:
        lines = renew(match[2].splitlines(), run(match[1]))
        return "\n".join(["```", f"$ python -m {match[1]}", *lines, "```", ""])

    return _BLOCK.sub(replace, text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.readme")
    parser.add_argument(
        "--pictures", action="store_true", help="take the pictures of the page anew, too (needs Chromium)"
    )
    options = parser.parse_args()
    from tests.figures import write_figures  # brings torch and the models of the tests

    for path in DOCUMENTS:
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
    write_figures()
    if options.pictures:
        command = [sys.executable, "-m", "pytest", "-q", "--exhaustive", "tests/browser/test_pictures.py"]
        subprocess.run(command, check=True, cwd=README.parent, env=os.environ | {TAKE: "1"})


if __name__ == "__main__":
    main()

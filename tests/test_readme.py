"""The documents say what the program says, and README is short."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sizer.__main__ import main
from sizer.service.client import JobClient
from tests.readme import DOCUMENTS, README, ROOT, examples, renew, renewed, run, text_of_documents

TEXT = text_of_documents()


@pytest.fixture(scope="module")
def client() -> Iterator[JobClient]:
    with closing(JobClient()) as client:
        yield client


def _figures(line: str) -> list[str]:
    return re.findall(r"[\d.,]+ [KMG]iB", line)


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        pytest.param(
            command, lines, marks=pytest.mark.exhaustive if re.search("llama|gpt-oss| measure ", command) else ()
        )
        for command, lines in examples(TEXT)
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_the_examples_print_what_is_written(
    command: str, lines: list[str], client: JobClient, capsys, monkeypatch
) -> None:
    if " measure " not in command:  # the same on every machine, and from one job server for all
        monkeypatch.setattr(client, "close", lambda: None)
        assert main(shlex.split(command)[1:], make_client=lambda: client) == 0
        assert renew(lines, capsys.readouterr().out.splitlines()) == lines
    else:  # measured on this machine: of the estimate's figures those that are the same on every processor
        printed = renew(lines, run(command))
        exact = [index for index, line in enumerate(lines) if line.endswith("exact")]
        assert len(exact) >= 6
        assert [_figures(printed[index])[:1] for index in exact] == [_figures(lines[index])[:1] for index in exact]


def test_every_example_is_seen() -> None:
    assert len([*examples(TEXT)]) == TEXT.count("$ python -m sizer ") > 1


def test_a_figure_that_is_stale_is_replaced() -> None:
    printed = [
        "resnet50 (ResNet)",
        "Training needs 2.90 GiB allocated (3.86 GiB for the process)",
        "",
        "weights   97.70 MiB",
    ]
    stale = [
        "resnet50 (ResNet)",
        "...",
        "Training needs 2.70 GiB allocated (3.61 GiB for the process)",
        "weights  1.00 MiB",
    ]
    assert renew(stale, printed) == ["resnet50 (ResNet)", "...", printed[1], printed[3]]
    with pytest.raises(LookupError, match="no line is printed like: Inference needs 1 GiB"):
        renew(["Inference needs 1 GiB"], printed)


def test_text_around_the_examples_stays() -> None:
    assert renewed("# Sizer\n\n```\npip install x\n```\n") == "# Sizer\n\n```\npip install x\n```\n"


def test_readme_is_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.encode()) <= 12_000 and len(text.splitlines()) <= 180
    paragraphs = re.sub(r"```.*?```", "", text, flags=re.DOTALL).split("\n\n")
    assert max(len(part.split()) for part in paragraphs if not part.startswith(("|", "<!--"))) <= 100


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_every_document_is_linked_from_readme() -> None:
    text = README.read_text(encoding="utf-8")
    files = [*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    assert [path.name for path in files if f"({path.relative_to(ROOT).as_posix()})" not in text] == []


def test_where_to_change_names_files_that_are_there_and_few() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = text.split("## Where do I change …?\n")[1].split("\n## ")[0].strip().splitlines()[2:]
    assert len(rows) >= 10
    for row in rows:
        named = re.findall(r"`([\w/]+(?:\.py|/))`", row)
        assert 1 <= len(named) <= 4, row
        assert [name for name in named if not (README.parent / name).exists()] == []

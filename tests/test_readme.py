"""README says what the program says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import closing

import pytest

from sizer.__main__ import main
from sizer.service.client import JobClient
from tests.readme import README, examples, renew, renewed, run

TEXT = README.read_text(encoding="utf-8")


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


def test_where_to_change_names_files_that_are_there_and_few() -> None:
    rows = TEXT.split("## Where do I change …?")[1].split("\n## ")[0].splitlines()[4:-1]
    assert len(rows) >= 10
    for row in rows:
        named = re.findall(r"`([\w/]+(?:\.py|/))`", row)
        assert 1 <= len(named) <= 4, row
        assert [name for name in named if not (README.parent / name).exists()] == []

"""No figure of the documents without a source: each is counted anew from the tree, or read in a file that a benchmark wrote."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.benchmarks.published.errors import LIBRARIES, kind_of, read_errors
from tests.benchmarks.published.rows import read_runs
from tests.benchmarks.shares import summarize
from tests.benchmarks.tables import read_table, replace_rows
from tests.figures import BLOCKS, SENTENCES, block, found, pattern_of, with_blocks
from tests.readme import README, text_of_documents

TEXT = text_of_documents()


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence[:40])
def test_a_sentence_says_what_is_counted(sentence: str) -> None:
    assert found(sentence, TEXT).groups() == tuple(map(str, SENTENCES[sentence]()))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_table_is_the_files(name: str) -> None:
    path, table = BLOCKS[name]
    assert block(name, path.read_text(encoding="utf-8"))[1].splitlines() == [*table()]


def test_shares_and_counts_stand_in_no_other_sentence() -> None:
    # examples and tables are held as a whole
    rest = re.sub(r"```.*?```|<!-- .*? -->.*?<!-- end -->", "", TEXT, flags=re.DOTALL)
    for sentence in SENTENCES:
        rest = pattern_of(sentence).sub("", rest)
    counted = r"%|MiB|GiB|figures|cases|runs|models|types|names|presets|messages|processes"
    assert re.findall(rf"\d[\d.,]*\s+(?:{counted})", rest) == []


def test_every_figure_that_is_repeated_is_in_a_row() -> None:
    runs = [run for run in read_runs() if not run.repeats]
    counted = Counter((run.set, kind_of(run), run.quantity) for run in runs)
    assert {(row["set"], row["run"], row["quantity"]): int(row["figures"]) for row in read_errors()} == counted
    for row in read_errors(LIBRARIES[1]):  # a run may need what cannot be had today
        assert int(row["figures"]) <= counted[row["set"], row["run"], row["quantity"]]


def test_a_stale_sentence_is_found() -> None:
    sentence = "one of {} presets, {} % of them"
    assert found(sentence, "or one of\n  1,290 presets, 4.5 % of them.").groups() == ("1,290", "4.5")
    with pytest.raises(LookupError, match=r"said 0 times, not once: one of \{\} presets"):
        found(sentence, "one of many presets, 4.5 % of them")
    with pytest.raises(LookupError, match="no table of accuracy"):
        with_blocks("no comment here", README)


def test_rows_are_replaced_by_their_key(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("name,mode,share\na,x,1\nb,x,2\n", encoding="utf-8")
    replace_rows(
        path, [{"name": "a", "mode": "x", "share": "3"}, {"name": "a", "mode": "y", "share": "4"}], ("name", "mode")
    )
    assert [row["name"] + row["mode"] + row["share"] for row in read_table(path)] == ["ax3", "bx2", "ay4"]


def test_a_share_is_of_what_is_counted() -> None:
    # 3 of 4 are counted, 1 of those traces, 1 fails by its own code
    outcomes = ["no defaults: TypeError", "traced", "counted: own", "counted: slow"]
    expected = {"names": "4", "counted": "3", "traced": "1", "traced_percent": "33.3", "own_code": "1"}
    assert summarize(outcomes, "own") == expected

"""What was drawn once is sent again, to whoever looks at the same answer, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from streamlit.testing.v1 import AppTest

from sizer.query.text import parse_query
from sizer.report.report import Report
from sizer.ui import charts, page_cache
from sizer.ui.page_cache import Tokens
from tests.ui.clients import ScriptedClient
from tests.ui.conftest import install
from tests.ui.reports import report_for

QUERY = "arch=torchvision:resnet50&dtype=float32,bfloat16&batch=1,2"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The charts over a step that were made, by the cell that they show."""
    cells: list[str] = []
    make = charts.step_chart

    def step_chart(estimate, gpu):
        cells.append(f"{estimate.dtype}:{estimate.batch}")
        return make(estimate, gpu)

    monkeypatch.setattr(charts, "step_chart", step_chart)
    return cells


def drawings(page: AppTest) -> list[str]:
    """All charts and tables of a page, as the browser gets them."""
    return [str(element.proto) for kind in ("vega_lite_chart", "arrow_data_frame") for element in page.get(kind)]


def test_a_rerun_sends_the_same_and_makes_no_chart(client, open_page, made):
    page = open_page(**dict(item.split("=") for item in QUERY.split("&")))
    first = drawings(page)
    assert len(first) >= 3
    assert made == ["float32:2"]
    assert drawings(page.run()) == first
    assert made == ["float32:2"]


def test_another_cell_is_drawn_and_the_first_one_kept(client, open_page, made):
    page = open_page(**dict(item.split("=") for item in QUERY.split("&")))
    first = drawings(page)
    page.session_state["focus"] = ("bfloat16", 1)
    assert drawings(page.run()) != first
    page.session_state["focus"] = ("float32", 2)
    assert drawings(page.run()) == first
    assert made == ["float32:2", "bfloat16:1"]


def test_two_visitors_of_one_answer_share_what_was_drawn_for_it(monkeypatch, open_page, made):
    report = report_for(parse_query(QUERY))
    install(monkeypatch, ScriptedClient(lambda request: report))
    pages = [open_page(**dict(item.split("=") for item in QUERY.split("&"))) for _ in range(2)]
    assert drawings(pages[0]) == drawings(pages[1])
    assert made == ["float32:2"]


def test_an_answer_that_was_made_anew_is_drawn_anew(client, open_page, made):
    for _ in range(2):
        open_page(**dict(item.split("=") for item in QUERY.split("&")))
    assert made == ["float32:2"] * 2


def test_tokens_tell_by_value_what_is_small_and_by_identity_what_is_not():
    tokens = Tokens(8)
    report = report_for(parse_query(QUERY))
    token = tokens.of(report)
    assert tokens.of(replace(report)) == token
    assert tokens.of(report.focused(("bfloat16", 1))) == tokens.of(report.focused(("bfloat16", 1))) != token
    assert tokens.of(replace(report, failures={"float16": "no"})) != token
    assert tokens.of(Report.from_dict(report.to_dict())) != token
    assert tokens.of(report, "allocated") != tokens.of(report, "reserved")


def test_a_token_is_given_to_nothing_else_when_its_value_was_forgotten():
    tokens = Tokens(2)
    first = tokens.of(("a", 1))
    others = {tokens.of((letter, 1)) for letter in "bcd"}
    assert first not in others
    assert tokens.of(("a", 1)) not in {first, *others}


def test_an_answer_is_read_once_however_often_its_parts_are_drawn(monkeypatch):
    read, plain = [], page_cache._names
    monkeypatch.setattr(page_cache, "_names", lambda kind: (read.append(kind), plain(kind))[1])
    tokens = Tokens(2)
    report = report_for(parse_query(QUERY))
    estimate, other = report.estimates[:2]
    known = [tokens.of(report), tokens.of(report, estimate)]
    assert read.count(Report) == 1
    assert [tokens.of(report), tokens.of(report, estimate)] == known
    assert read.count(Report) == 1
    tokens.of(estimate), tokens.of(other)  # as many as are kept
    assert tokens.of(report, other) not in known
    assert read.count(Report) == 2

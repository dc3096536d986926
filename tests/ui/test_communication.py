"""What ranks tell each other, where a report says it: a table on the page, and in the command's text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.commands.report_text import format_report
from sizer.query.request import Request
from sizer.query.text import parse_query
from sizer.report.report import Report
from sizer.tape.communication import Volume
from tests.ui.clients import ScriptedClient
from tests.ui.conftest import install, open_tab
from tests.ui.reports import report_for

TOLD = (
    Volume(kind="all-gather", group="shard", calls=66, bytes=3 * 2**30),
    Volume(kind="all-reduce", group="replicate", calls=33, bytes=2**29),
)
QUERY = "arch=torchvision:resnet50&dtype=float32&batch=32"


def spread(request: Request) -> Report:
    report = report_for(request)
    return replace(report, estimates=tuple(replace(row, communication=TOLD) for row in report.estimates))


def test_the_page_has_a_table_of_it(monkeypatch: pytest.MonkeyPatch, open_page) -> None:
    install(monkeypatch, ScriptedClient(spread))
    page = open_tab(open_page(arch="torchvision:resnet50", dtype="float32", batch="32"), "Communication")
    (panel,) = (tab for tab in page.tabs if tab.label == "Communication")
    assert panel.dataframe[0].value.to_dict("records") == [
        {"Collective": "all-gather", "Over": "shard", "Calls": 66, "GiB": 3.0},
        {"Collective": "all-reduce", "Over": "replicate", "Calls": 33, "GiB": 0.5},
    ]


def test_one_gpu_has_none(client, open_page) -> None:
    page = open_page(arch="torchvision:resnet50", dtype="float32", batch="32")
    assert "Communication" not in [tab.label for tab in page.tabs]


def test_another_tab_is_open_where_the_one_that_was_is_gone(client, open_page) -> None:
    page = open_tab(open_page(arch="torchvision:resnet50", dtype="float32", batch="32"), "Communication")
    assert [tab.label for tab in page.tabs if tab.children] == ["Phases"]


def test_the_command_prints_it() -> None:
    report = spread(parse_query(QUERY))
    assert "Between the ranks in a step" not in format_report(report_for(parse_query(QUERY)))
    lines = format_report(replace(report, focus=report_for(parse_query(QUERY)).focus)).splitlines()
    place = lines.index("Between the ranks in a step, float32 at batch 32:")
    assert lines[place + 1 : place + 4] == [
        "collective  over       calls       bytes",
        "all-gather  shard         66    3.00 GiB",
        "all-reduce  replicate     33  512.00 MiB",
    ]

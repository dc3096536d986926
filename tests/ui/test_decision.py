"""What to change, how far it goes, which GPU: the page's part, with answers made by hand."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

from sizer.base.errors import JobError
from sizer.query.request import Request
from sizer.query.text import parse_query
from sizer.report.decision import describe_fewest
from sizer.ui import service
from sizer.ui.decision_tables import budgets_chart, budgets_frame, ranks_chart, ranks_frame
from sizer.ui.decision_view import EACH, PRICE, cheapest, costs_of, devices_chart, devices_frame, how_much
from sizer.ui.links import frame_csv
from tests.ui.clients import ScriptedJob
from tests.ui.conftest import markup, texts
from tests.ui.decisions import budgets_for, devices_for, limits_for, ranks_for
from tests.ui.reports import report_for
from tests.ui.specs import rows_with

SMALL_GPU = "custom:2GiB@8.0"  # which nothing here fits, so that what to change is open
QUERY = "arch=torchvision:resnet50&dtype=float32&batch=32"


def test_levers_are_shown_with_what_they_save(client, open_page):
    page = open_page(arch="torchvision:resnet50", dtype="float32", batch="32", gpu=SMALL_GPU)
    shown = markup(page)
    assert shown.index("**Checkpointing**") < shown.index("**Sgd**")
    assert "−6.00 GiB" in texts(page)
    assert "✕ 9.00 GiB" in texts(page)
    assert "saves nothing" in shown and "The peak stays." in shown
    assert "image must be 224" in shown
    assert "empty_cache() does not help." in shown
    assert "**To make it fit: Checkpointing.** The process then takes 4.00 GiB." in shown
    assert "checkpointing()" in [code.value for code in page.code]


def growing() -> None:
    from dataclasses import replace

    import streamlit as st

    from sizer.query.text import parse_query
    from sizer.ui.decision_view import _show_levers
    from tests.ui.decisions import levers_for

    query = "arch=torchvision:resnet50&dtype=float32&batch=32"
    whole = levers_for(query)
    count = st.session_state["count"]
    left = {"pending": ("x",) * (4 - count), "pending_titles": tuple(row.title for row in whole.rows[count:])}
    search = {} if count == 4 else {"smallest": None, "search": ""}
    _show_levers(replace(whole, rows=whole.rows[:count], **left, **search), parse_query(query))


def test_every_lever_has_its_place_from_the_beginning():
    places = []
    for count in range(5):
        page = AppTest.from_function(growing)
        page.session_state["count"] = count
        page.run()
        assert not page.exception
        found = [text.value for text in (*page.markdown, *page.caption)]
        places.append([next(i for i, block in enumerate(rows_of(page)) if name in block) for name in NAMES])
        assert ("Looking for the fewest changes" in " ".join(found)) == (count < 4)
    assert places == [places[-1]] * 5


NAMES = ("Checkpointing", "Sgd", "Fused", "Image")


def rows_of(page: AppTest) -> list[str]:
    """Return the texts of each row of columns, in their order."""
    columns = [[element.value for element in (*column.markdown, *column.caption)] for column in page.columns]
    return [" ".join(text for column in columns[first : first + 6] for text in column) for first in range(0, len(columns), 6)]


def test_nothing_is_computed_for_a_question_that_fits_before_it_is_asked_for(client, open_page):
    page = open_page(arch="torchvision:resnet50", dtype="float32", batch="2")
    assert "**Checkpointing**" not in markup(page)
    page.session_state["decision_where_it_fits"] = "What to change"
    assert "**Checkpointing**" in markup(page.run())


def control_of(page: AppTest):
    return next(control for control in page.segmented_control if control.label == "What next?")


def filling() -> None:
    from sizer.query.text import parse_query
    from sizer.ui.decision_view import show_decision
    from tests.ui.reports import report_for

    request = parse_query("arch=torchvision:resnet50&dtype=float32&batch=32&gpu=custom:2GiB@8.0")
    show_decision(request, report_for(request).estimates[0], to_come=True)


def test_while_the_page_fills_the_answers_have_their_place_and_nothing_is_computed(client):
    page = AppTest.from_function(filling).run()
    assert not page.exception
    assert control_of(page).disabled
    assert "**Checkpointing**" not in markup(page)


def test_what_was_stopped_before_it_was_whole_can_be_asked_on(client, open_page):
    page = open_page(arch="torchvision:resnet50", dtype="float32", batch="2")
    query = "arch=torchvision:resnet50&dtype=float32&batch=32,64"
    report = replace(report_for(parse_query(query)), pending=("float32",))
    page.session_state["answer"] = service.Answer(query=query, report=report, missing="you stopped it.")
    page.text_input(key="batch").set_value("32,64").run()
    assert page.warning
    assert not control_of(page).disabled


@pytest.mark.parametrize("key", ["apply_checkpointing", "apply_smallest"])
def test_one_click_puts_a_lever_into_the_form(client, open_page, key):
    page = open_page(arch="torchvision:resnet50", dtype="float32", batch="32,64", gpu=SMALL_GPU)
    page.button(key=key).click().run()
    asked = client.requests[-1]
    assert asked.checkpointing is True
    assert asked.batches == (32, 64), "the batch sizes that were there stay"
    assert page.toggle(key="checkpointing").value is True


def open_tab(page: AppTest, name: str) -> AppTest:
    page.session_state["decision"] = name
    return page.run()


def test_limits_are_shown_and_applied(client, open_page):
    page = open_tab(
        open_page(arch="torchvision:resnet50", dtype="float32", batch="32", gpu=SMALL_GPU), "How far it goes"
    )
    assert {"74 to 96", "none"} <= set(texts(page))
    assert "not even 16 fits" in markup(page)
    assert "; the largest batch is 74" in page.main.title[0].value, "the limits narrow what the headline says"
    page.button(key="limit_batch").click().run()
    assert client.requests[-1].batches == (32, 74)


def test_every_device_has_a_row_and_a_point(client, open_page):
    page = open_tab(open_page(arch="torchvision:resnet50", dtype="float32", batch="32", gpu=SMALL_GPU), "Which GPU?")
    assert page.get("vega_lite_chart")
    frame = devices_frame(devices_for(QUERY).rows)
    assert list(frame["Verdict"]) == ["✓ fits", "✓ fits", "✕ does not fit", "no kernel"], "what it fits comes first"
    assert frame["Left"][0] == pytest.approx(24084 / 1024 - 10)
    assert frame["Left"][2] == pytest.approx(7813 / 1024 - 10)
    assert "**It fits 2 devices of 4; the smallest: GeForce RTX 4090 (24 GB), A100 (80 GB).**" in markup(page)
    points = rows_with(devices_chart(devices_for(QUERY).rows), "verdict")
    assert [row["verdict"] for row in points] == ["does not fit", "fits", "fits"]


def test_the_fewest_gpus_are_named_and_asked_for(client, open_page):
    page = open_tab(
        open_page(arch="torchvision:resnet50", dtype="float32", batch="32", gpu=SMALL_GPU), "On how many GPUs?"
    )
    assert "It fits on 2 GPUs by FSDP2; the largest batch of each is 33 to 34." in texts(page)
    assert [button.label for button in page.get("download_button") if "torchrun" in button.label] == [
        "torchrun script: FSDP2 on 2 GPUs"
    ]
    page.button(key="ranks_FSDP2_2").click().run()
    assert (client.requests[-1].parallel, client.requests[-1].ranks) == ("fsdp", 2)


def test_a_compiled_step_is_shown_over_its_budget(client, open_page):
    page = open_tab(open_page(arch="torchvision:resnet50", dtype="float32", batch="32", gpu=SMALL_GPU), "Compiled")
    assert "**The lowest tested peak is 20.00 GiB, at budget 0.4. A smaller budget needs more" in markup(page)
    frame = budgets_frame(budgets_for(QUERY))
    compiled = [f"compiled, budget {budget}" for budget in ("1", "0.4", "0")]
    assert list(frame["Step"]) == ["eager", "eager, checkpointing", *compiled]
    assert list(frame["Allocated"].fillna(0)) == pytest.approx([40, 0, 30, 20, 25], rel=0.01)
    assert frame["Operators"][1] == "no blocks to checkpoint"
    drawn = budgets_chart(budgets_for(QUERY))
    assert sorted(row["budget"] for row in rows_with(drawn, "budget")) == [0.0, 0.4, 1.0]
    assert [row["step"] for row in rows_with(drawn, "step")] == ["eager"]
    for refused in ({"gpu": "cpu"}, {"gpu": SMALL_GPU, "cudnn_benchmark": "1"}):
        other = open_page(arch="torchvision:resnet50", dtype="float32", batch="32", **refused)
        assert not any("Compiled" in group.options for group in other.get("button_group"))


@pytest.mark.parametrize(
    ("section", "submit"), [("On how many GPUs?", "submit_ranks"), ("Which GPU?", "submit_devices")]
)
def test_a_section_ends_with_its_question(client, open_page, monkeypatch, section, submit):
    asked: list[tuple[Request, ScriptedJob]] = []

    def begin(query: str) -> ScriptedJob:
        asked.append((parse_query(query), ScriptedJob(dict, ["tracing FSDP2"] * 99)))
        return asked[-1][1]

    monkeypatch.setattr(client, submit, begin)
    page = open_tab(open_page(arch="torchvision:resnet50", dtype="float32", batch="32", gpu=SMALL_GPU), section)
    assert "tracing FSDP2" in [caption.value for caption in page.caption]
    page.selectbox(key="optimizer").set_value("sgd").run()
    assert [request.optimizer for request, _ in asked][-1] == "sgd"
    assert all(job.left for _, job in asked), "whoever looks again in a moment goes on with it, nobody else keeps it"
    before = len(asked)
    page = open_tab(page, "How far it goes")
    assert "tracing FSDP2" not in [caption.value for caption in page.caption]
    assert len(asked) == before and all(job.left for _, job in asked)


def test_what_ended_early_is_shown_as_far_as_it_came_and_not_asked_for_again(client, open_page, monkeypatch):
    asked: list[ScriptedJob] = []

    def stopped() -> None:
        raise JobError("the job was stopped after 120 s (wall clock)")

    def begin(query: str) -> ScriptedJob:
        asked.append(ScriptedJob(stopped))
        asked[-1].partial = limits_for(query)
        return asked[-1]

    monkeypatch.setattr(client, "submit_limits", begin)
    page = open_tab(
        open_page(arch="torchvision:resnet50", dtype="float32", batch="32", gpu=SMALL_GPU), "How far it goes"
    )
    page.run()
    assert len(asked) == 1
    assert "2 of 2 tried: this is what was found." in markup(page)
    assert "74 to 96" in texts(page)
    assert "stopped after 120 s" in " ".join(texts(page)) + markup(page)
    page.button(key="decide_again").click().run()
    assert len(asked) == 2


def test_fewer_gpus_with_checkpointing_are_named_first():
    found = replace(ranks_for(QUERY), fewest_changed=1, change="with checkpointing")
    assert next(describe_fewest(found)) == "It fits on 1 GPU with checkpointing; unchanged, on 2."
    nowhere = replace(found, fewest=None)
    assert next(describe_fewest(nowhere)) == "It fits on 1 GPU with checkpointing; unchanged, on none of up to 16 GPUs."
    assert "with none of the tested changes" in next(describe_fewest(replace(nowhere, fewest_changed=None)))


def test_how_much_was_tried_before_a_limit():
    found = ranks_for(QUERY)
    assert how_much(replace(found, pending=("a",) * 18)) == "4 of 22 tried"
    devices = devices_for(QUERY)
    assert how_much(replace(devices, pending=("cpu", "t4"))) == "4 of 5 tried", "the CPU has a row already"
    assert how_much(replace(limits_for(QUERY), pending=("new",))) == "2 of 3 tried"


def test_the_smallest_change_is_shown_where_no_device_is_enough(client, open_page, monkeypatch):
    def begin(query: str) -> ScriptedJob:
        found = devices_for(query)
        rows = tuple(replace(row, cell=row.cell and replace(row.cell, fits=False)) for row in found.rows)
        helped = (replace(found.rows[1], query=f"{query}&checkpointing=1"),)
        return ScriptedJob(lambda: replace(found, rows=rows, change="with checkpointing", changed=helped))

    monkeypatch.setattr(client, "submit_devices", begin)
    page = open_tab(open_page(arch="torchvision:resnet50", dtype="float32", batch="32", gpu=SMALL_GPU), "Which GPU?")
    shown = markup(page)
    assert "It fits 0 devices of 4. It fits 1 device with checkpointing; the smallest: GeForce RTX 4090 (24 GB)." in shown
    assert "**With checkpointing**, it fits these" in shown


def test_inference_is_not_asked_on_how_many(client, open_page):
    page = open_page(arch="torchvision:resnet50", dtype="float32", batch="32", gpu=SMALL_GPU, mode="inference")
    assert control_of(page).options == ["What to change", "How far it goes", "Which GPU?"]


def test_every_way_of_training_has_a_row_and_a_point():
    rows = ranks_for(QUERY).rows
    frame = ranks_frame(rows)
    assert list(frame["Verdict"]) == ["✓ fits", "✕ does not fit", "✕ does not fit", "no kernel"], "what fits comes first"
    assert list(frame["Most of it"]) == ["optimizer state 40.00 GiB, parameter 12.00 GiB", "", "", ""]
    table = frame_csv(frame).splitlines()
    assert table[0] == "gpus,by,verdict,process,allocated,most_of_it,between_the_gpus_in_a_step,link"
    assert table[1].startswith("2,FSDP2,✓ fits,60.0,60.0,") and f"?{rows[2].query}" in table[1]
    drawn = rows_with(ranks_chart(rows, 80 * 2**30), "by")
    points = [(row["by"], row["gpus"], row["process"]) for row in drawn]
    assert points == [("One GPU", 1, 96.0), ("DDP", 2, 98.0), ("FSDP2", 2, 60.0)]


def test_prices_are_compared_where_they_are_typed_in():
    frame = devices_frame(devices_for(QUERY).rows)
    assert cheapest(costs_of(frame)) == ""
    frame[PRICE] = pd.array([0.5, 1.0, 0.1, 0.01], dtype="Float64")
    # 0.5 / 23 = 0.0217; 1.0 / 79 = 0.0127; the third does not fit, the last cannot be traced
    costs = costs_of(frame)
    assert list(costs["Device"]) == ["GeForce RTX 4090 (24 GB)", "A100 (80 GB)"]
    assert list(costs[EACH]) == [pytest.approx(0.5 / 23), pytest.approx(1.0 / 79)]
    assert cheapest(costs) == (
        "The cheapest that fits: GeForce RTX 4090 (24 GB) at 0.50 per hour. The least per hour and sample of a batch: "
        "A100 (80 GB), 0.0127 at batch 79."
    )

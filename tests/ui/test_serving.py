"""A server as a task of the page: its form, its answer, and a change applied."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from streamlit.testing.v1 import AppTest

from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.serving import ENGINES
from sizer.query.request import Request
from sizer.query.text import format_query, parse_query
from sizer.report.report import Report
from sizer.report.served import Served
from sizer.serving.answer import answer_vllm
from sizer.ui.server_view import PREFIX, budget_chart, budget_parts
from tests.serving.models import decoder, flags, profiler
from tests.ui.clients import ScriptedClient
from tests.ui.conftest import install, markup, texts
from tests.ui.reports import report_for
from tests.ui.test_page import address_of


def open_tab(page: AppTest, name: str) -> AppTest:
    """The page after a tab below the server's answer was opened."""
    page.session_state["details_of_server"] = name
    return page.run()


def served_for(request: Request) -> Served:
    changes = {"max_num_seqs": request.max_num_seqs or 256, "kv_bytes": request.kv_bytes}
    return answer_vllm(
        decoder(), flags(**changes), profiler, find_gpu(request.gpu), model="org/model", want=request.want
    )


def server_report(request: Request) -> Report:
    report = report_for(replace(request, mode="inference"))
    query = format_query(request, complete=True)
    return replace(report, query=query, estimates=(), max_batch=(), focus=None, kv_caches=(), loop=(), serve=served_for(request))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ScriptedClient:
    return install(monkeypatch, ScriptedClient(server_report))


ADDRESS = {"arch": "hf:qwen3-8b", "mode": "serve", "gpu": "rtx-4090"}


def test_a_link_opens_with_requests_at_once(client, open_page):
    page = open_page(**ADDRESS, want="8x32k")
    served = served_for(client.requests[-1])
    held = f"{served.requests_at_once:,.1f} requests of 8,192 tokens at once"
    assert page.main.title[0].value == f"{held} on one GeForce RTX 4090 (24 GB)"
    badge = {True: "✓ holds it", False: "✕ too small"}[served.fits]
    assert f"{badge} · {served.kv_tokens:,} KV tokens" in markup(page), "one verdict: on the server and on what is wanted"
    assert "**Share**" in markup(page) and page.get("download_button")
    assert served.command in texts(page)
    assert not page.code, "which loads its highlighter before a browser draws the answer"
    assert page.text_input(key="serve_want_requests").value == "8"
    assert page.text_input(key="serve_want_tokens").value == "32768"
    charts = [json.loads(chart.proto.spec) for chart in page.get("vega_lite_chart")]
    assert [chart["description"] for chart in charts] == ["Parts of the server's budget, in GiB"]


def test_the_parts_of_the_bar_are_the_budget(client):
    served = served_for(parse_query("arch=hf:qwen3-8b&mode=serve&gpu=rtx-4090"))
    assert sum(budget_parts(served).values()) == served.budget_bytes


@pytest.mark.parametrize("engine", ENGINES)
def test_every_part_of_the_bar_has_a_colour(client, engine: str):
    served = served_for(parse_query("arch=hf:qwen3-8b&mode=serve&gpu=rtx-4090"))
    parts = [name for name in Served.__dataclass_fields__ if name.endswith("_bytes")]
    whole = replace(served, engine=engine, graphs_in_budget=True, **dict.fromkeys(parts, 2**30))
    assert len(budget_parts(whole)) == 7  # with adapters, a draft and graphs
    assert budget_chart(whole)


def test_the_form_asks_for_a_server(client, open_page):
    page = open_page(**ADDRESS)
    page.text_input(key="serve_want_requests").set_value("4")
    page.text_input(key="serve_want_tokens").set_value("16k")
    page.text_input(key="serve_max_num_seqs").set_value("64")
    page.text_input(key="serve_tp").set_value("2").run()
    asked = client.requests[-1]
    assert (asked.mode, asked.want, asked.max_num_seqs, asked.tp, asked.parallel) == ("serve", (4, 16_384), 64, 2, "none")
    assert address_of(page)["want"] == "4x16384"
    page.text_input(key="serve_util").set_value("2").run()
    assert any("util" in text for text in texts(page))


def test_another_task_and_back_keeps_the_flags(client, open_page):
    page = open_page(**ADDRESS, util="0.8")
    assert page.text_input(key="serve_util").value == "0.8"
    task = next(control for control in page.segmented_control if control.label == "Task")
    assert task.value == "serve"


def test_a_change_is_applied_to_the_address(client, open_page):
    page = open_page(**ADDRESS)
    open_tab(page, "What to change")
    lever = served_for(client.requests[-1]).levers[0]
    page.button(key="serve_lever_0").click().run()
    key, value = lever.query.split("=")
    assert address_of(page)[key] == value


def test_a_server_without_room_shows_its_message(client, open_page):
    page = open_page(**ADDRESS, kv_bytes="32MiB")
    assert any("estimated maximum model length is 4096" in text for text in texts(page))
    assert "✕ does not start" in markup(page)


def test_tabs_show_contexts_and_flags(client, open_page):
    page = open_page(**ADDRESS)
    served = served_for(client.requests[-1])
    assert len(page.dataframe[0].value) == len(served.contexts)
    open_tab(page, "Flags")
    assert "gpu_memory_utilization" in list(page.dataframe[0].value["Flag"])


def test_a_generation_offers_the_same_model_on_a_server(monkeypatch, open_page):
    answers = ScriptedClient(lambda request: server_report(request) if request.mode == "serve" else report_for(request))
    install(monkeypatch, answers)
    page = open_page(arch="hf:qwen3-8b", mode="generate", dtype="bfloat16", batch="32", seq="2048", gpu="rtx-4090")
    assert "One batch in transformers." in markup(page)
    page.button(key="serve_offer").click().run()
    assert address_of(page) == {**ADDRESS, "want": "32x2560"}
    assert answers.requests[-1].mode == "serve"


def ask_next(page: AppTest, answer: str) -> AppTest:
    """The page after one of the answers below "What next?" was asked for, and has come."""
    control = next(one for one in page.segmented_control if one.label == "What next?")
    return control.set_value(answer).run().run()


def test_which_gpu_has_a_row_for_each_device_those_that_hold_it_first(client, open_page):
    page = ask_next(open_page(**ADDRESS, want="8x32k"), "Which GPU?")
    assert "The server can hold 8 requests of 32,768 tokens at once on 1 device of 3; the smallest: H100" in markup(page)
    shown = page.dataframe[0].value
    assert shown["Verdict"].tolist() == ["✓ holds it", "✕ too small", "vLLM's rules are not known on devices of mps"]
    assert shown["Requests at once"].tolist()[:2] == [13.8, 0.9]
    assert shown["Weights"].tolist()[0] == 15.0
    assert "gpu=h100-80gb" in shown["Link"].tolist()[0]
    descriptions = [json.loads(chart.proto.spec)["description"] for chart in page.get("vega_lite_chart")]
    assert "Requests at once of a server on each device, by the memory of the device" in descriptions


def test_how_many_gpus_names_the_fewest(client, open_page):
    page = ask_next(open_page(**ADDRESS, want="8x32k"), "On how many GPUs?")
    said = texts(page)
    assert "The server can hold 8 requests of 32,768 tokens at once on 2 GPUs:" in said
    assert "tensor parallel of 2: 9.0 requests of 32,768 tokens at once" in said
    shown = page.dataframe[0].value
    assert (shown["GPUs"].tolist(), shown["Verdict"].tolist()) == ([2, 1], ["✓ holds it", "✕ too small"])


def test_an_engine_without_ranks_is_asked_for_devices_alone(client, open_page):
    page = open_page(**ADDRESS, engine="llama.cpp")
    control = next(one for one in page.segmented_control if one.label == "What next?")
    assert control.options == ["Which GPU?"]


def test_what_is_not_counted_has_a_tab(client, open_page):
    assert len(open_tab(open_page(**ADDRESS), "Not counted").exception) == 0


def test_no_older_answer_stays_under_that_of_a_server(monkeypatch, open_page):
    install(monkeypatch, ScriptedClient(lambda request: (server_report if request.mode == "serve" else report_for)(request)))
    page = open_page(arch="torchvision:resnet50", dtype="float32", batch="1")
    page.query_params = {"arch": "hf:qwen3-8b", "mode": "serve"}
    page.run()
    assert "requests of" in page.title[0].value
    assert not any("The last answer" in text for text in texts(page))


def test_a_layout_of_another_engine_does_not_stay(client, open_page):
    page = open_page(**ADDRESS, weights="awq", kv="fp8")
    page.segmented_control(key=f"{PREFIX}engine").set_value("llama.cpp").run()
    assert not page.exception
    assert page.selectbox(key=f"{PREFIX}weights").value == "checkpoint"
    assert page.selectbox(key=f"{PREFIX}kv").value == "auto"
    page.selectbox(key=f"{PREFIX}weights").set_value("q4_k_m").run()
    page.selectbox(key=f"{PREFIX}kv").set_value("q8_0").run()
    page.segmented_control(key=f"{PREFIX}engine").set_value("sglang").run()
    assert not page.exception
    assert page.selectbox(key=f"{PREFIX}weights").value == "checkpoint"
    assert page.selectbox(key=f"{PREFIX}kv").value == "auto"

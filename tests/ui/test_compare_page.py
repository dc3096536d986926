"""The page that compares questions: its fields, what is shown as answers come, its link and its file."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import pytest
from streamlit.testing.v1 import AppTest

import sizer
from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError
from sizer.base.units import format_both, format_bytes
from sizer.commands.differences import format_comparison
from sizer.query.text import format_query, parse_query, read_questions, with_value
from sizer.report.largest_batch import MaxBatch
from sizer.report.side_by_side import FIGURES, OF_SERVER, side_by_side, side_of
from sizer.ui import compare
from sizer.ui.compare_figures import LONGEST, bars_chart, figures_frame, focused, growth_chart, keys_frame
from sizer.ui.compare_questions import parameters_of
from sizer.ui.focus import PEAK_KINDS
from sizer.ui.links import LONGEST_ADDRESS
from tests.ui.clients import ScriptedClient, ScriptedJob
from tests.ui.conftest import install, markup, texts
from tests.ui.reports import report_for
from tests.ui.specs import rows_with

FIRST = "arch=torchvision:resnet50&dtype=float32&batch=1,32&focus=float32:32"
SECOND = "arch=torchvision:resnet50&mode=inference&dtype=float32&batch=1,32&focus=float32:32"
THIRD = "arch=torchvision:resnet50&dtype=bfloat16&batch=2,8&gpu=t4&focus=bfloat16:8"
HOSTILE = "**bold** [link](http://x.example)"


def asked(page: AppTest) -> list[str]:
    """What the fields of the questions say, the empty one left out."""
    return [field.value for field in page.text_input if field.key.startswith("question_") and field.value]


def address(page: AppTest) -> list[str]:
    given = page.query_params.get("q", [])
    return [given] if isinstance(given, str) else list(given)


def figures(*queries: str):
    requests = read_questions(queries)
    return side_by_side(requests, [side_of(request, report_for(request)) for request in requests])


SERVER = "arch=hf:qwen3-0.6b&mode=serve&engine=llama.cpp&weights=q8_0&gpu=t4&max_model_len=8k"


def test_servers_are_compared_by_their_cache_and_requests():
    of_vllm = SERVER.replace("8k", "auto").replace("engine=llama.cpp&weights=q8_0&", "")
    requests = read_questions([SERVER, f"{SERVER}&kv=q8_0", of_vllm])
    found = side_by_side(requests, [side_of(request, sizer.estimate(format_query(request))) for request in requests])
    first, second, third = found.questions
    assert (first.starts, first.requests_at_once, first.request_tokens) == (True, 1.0, 8192)
    assert second.differences["kv_cache_bytes"] == second.kv_cache_bytes - first.kv_cache_bytes < 0
    assert third.differences["requests_at_once"] == third.requests_at_once - 1.0
    frame = figures_frame(found, [1, 2, 3])
    assert list(frame.index) == ["cell", "parameters", "weights", "KV cache", "KV tokens", "requests at once", "verdict"]
    assert list(frame.loc["verdict"][["1", "2", "3"]]) == ["✓ starts"] * 3
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["kv_tokens"] for row in rows[:2]] == ["8192", "8192"]
    assert "\n".join(format_comparison(found)).count("starts") == 3


def test_a_server_and_a_generation_have_the_figures_of_both():
    generation = "arch=hf:qwen3-0.6b&mode=generate&dtype=bfloat16&batch=1&gpu=t4"
    requests = read_questions([SERVER, generation])
    reports = [sizer.estimate(format_query(requests[0])), report_for(parse_query(FIRST))]
    found = side_by_side(requests, [side_of(request, report) for request, report in zip(requests, reports, strict=True)])
    assert found.figures == FIGURES
    assert {"KV tokens", "largest batch", "verdict"} < set(figures_frame(found, [1, 2]).index)
    assert "requests at once" in "\n".join(format_comparison(found))


# ------------------------------------------------------------------------------------------------------------- the fields


def test_an_empty_page_offers_an_example(client, open_page):
    page = open_page("compare")
    assert "Compare two to four questions" in page.info[0].value
    assert not client.requests
    assert [field.label for field in page.text_input] == ["Another question"]


def test_a_link_holds_all_questions(client, open_page):
    page = open_page("compare", q=[FIRST, SECOND, THIRD])
    assert asked(page) == [FIRST, SECOND, THIRD]
    assert client.requests == [parse_query(query) for query in (FIRST, SECOND, THIRD)]
    link = next(code.value for code in page.code if code.value.startswith("?"))
    told = [parse_query(query) for query in parse_qs(urlsplit(link).query)["q"]]
    assert told == client.requests
    assert any(code.value == f"python -m sizer compare '{FIRST}' '{SECOND}' '{THIRD}'" for code in page.code)


def test_questions_are_named_changed_and_removed(client, open_page):
    page = open_page("compare")
    page.text_input(key="question_1").set_value("resnet50&batch=8").run()
    page.text_input(key="question_2").set_value("http://127.0.0.1:8501/?v=1&arch=torchvision:vit_b_16&batch=8").run()
    assert asked(page) == ["arch=torchvision:resnet50&batch=8", "arch=torchvision:vit_b_16&batch=8"] == address(page)
    page.text_input(key="question_1").set_value("resnet18").run()
    assert asked(page)[0] == "arch=torchvision:resnet18"
    page.button(key="remove_1").click().run()
    assert asked(page) == ["arch=torchvision:vit_b_16&batch=8"] == address(page)


def test_a_question_in_words_becomes_a_query(client, open_page):
    page = open_page("compare")
    page.text_input(key="question_1").set_value("lora of mistral 7b v0.3, batch 2 on a 4090").run()
    query = "arch=hf:mistral-7b-v0.3&dtype=bfloat16&batch=2&gpu=rtx-4090&train=adapter"
    assert asked(page) == [query] == address(page)
    page.text_input(key="question_2").set_value("an unknown model on a 4090").run()
    assert asked(page) == [query, "an unknown model on a 4090"]


def test_one_thing_is_changed(client, open_page):
    page = open_page("compare", q=[FIRST])
    page.text_input(key="change_value").set_value("1")
    next(button for button in page.button if button.label == "Add").click().run()
    changed = format_query(with_value(parse_query(FIRST), "checkpointing", "1"))
    assert asked(page) == [FIRST, changed] == address(page)
    page.text_input(key="change_value").set_value("2")
    next(button for button in page.button if button.label == "Add").click().run()
    assert asked(page) == [FIRST, changed]
    assert any("checkpointing" in line for line in texts(page)) and "Allowed: 0, 1" in texts(page)


def test_what_cannot_be_read_is_named_and_leaves_the_others(client, open_page):
    page = open_page("compare", q=[FIRST, f"arch=torchvision:resnet18&gpu={HOSTILE}", SECOND])
    assert "question 2: gpu" in texts(page)
    assert client.requests == [parse_query(FIRST), parse_query(SECOND)]
    assert list(page.dataframe[1].value.columns) == ["1", "3", "3 − 1"]
    assert "x.example" not in markup(page)


def test_an_address_that_would_be_too_long_stays_empty():
    assert parameters_of([FIRST, SECOND]) == {"q": [FIRST, SECOND]}
    assert parameters_of([FIRST, f"arch=config:{'e' * LONGEST_ADDRESS}"]) == {}


def test_more_than_four_are_refused(client, open_page):
    page = open_page("compare", q=[FIRST, SECOND, THIRD, "arch=hf:gpt2", "arch=hf:gpt2&batch=1"])
    assert "Given: 5" in texts(page) and "Allowed: 2 to 4" in texts(page)
    assert len(asked(page)) == 4


def test_a_model_page_adds_its_question(client, open_page):
    page = open_page(arch="torchvision:resnet50", dtype="float32", batch="1,32", focus="float32:32")
    next(button for button in page.button if button.label == "Compare with another question").click().run()
    assert asked(page) == [FIRST] == address(page)
    assert page.session_state["questions"] == [FIRST]


# ------------------------------------------------------------------------------------------------------------ the answers


def test_tables_hold_the_figures_of_the_reports(client, open_page):
    page = open_page("compare", q=[FIRST, SECOND])
    keys, shown = (frame.value for frame in page.dataframe)
    assert keys.loc["mode"].tolist() == ["training", "inference"]
    first, second = (report_for(parse_query(query)).find("float32", 32) for query in (FIRST, SECOND))
    peak, difference = second.peak_allocated_bytes, first.peak_allocated_bytes - second.peak_allocated_bytes
    share = f"−{100 * difference / first.peak_allocated_bytes:.0f}\N{NO-BREAK SPACE}%"
    assert shown.loc["peak allocated"].tolist() == [
        format_both(first.peak_allocated_bytes),
        format_both(peak, like=first.peak_reserved_bytes),
        f"−{format_bytes(difference, like=first.peak_reserved_bytes)}, {share}",
    ]
    assert shown.loc["weights"].tolist()[2] == "0"
    assert shown.loc["verdict"].tolist() == ["✓ fits", "✓ fits", ""]


def test_a_largest_batch_that_is_still_searched_is_to_come():
    request = parse_query(FIRST)
    begun = replace(report_for(request), max_batch=(), pending=("float32",))
    found = side_by_side([request, request], [side_of(request, begun), side_of(request, replace(begun, pending=()))])
    assert figures_frame(found, (1, 2)).loc["largest batch"].to_list() == ["…", "at least 32", ""]


def test_a_largest_batch_of_those_that_were_tried_is_at_least_that_and_has_no_difference():
    request = parse_query(FIRST)
    report = report_for(request)
    tried = replace(report, max_batch=(MaxBatch(dtype="float32", batch=32, possible_batch=32, reason="", tried=True),))
    found = side_by_side([request, request], [side_of(request, one) for one in (report, tried)])
    assert figures_frame(found, (1, 2)).loc["largest batch"].to_list()[1:] == ["at least 32", ""]
    assert "largest_batch" not in found.questions[1].differences


def test_questions_that_are_equal_say_so():
    found = figures(FIRST, FIRST.replace("focus=float32:32", "focus=float32:1"))
    assert found.differ == {}
    assert figures_frame(found, [1, 2]).loc["cell"].tolist() == ["float32, batch 32", "float32, batch 1", ""]


def test_a_long_value_is_cut():
    config = encode_config(json.dumps({"model_type": "llama", "vocab_size": 100, "hidden_size": 16}))
    found = figures(FIRST, f"arch=config:{config}&dtype=float32&batch=32")
    cut = keys_frame(found, [1, 2]).loc["arch", "2"]
    assert cut.endswith("…") and len(cut) == LONGEST
    assert cut.startswith("config:")


def test_curves_have_a_point_per_batch_and_bars_sum_to_the_peak():
    reports = {number: report_for(parse_query(query)) for number, query in ((1, FIRST), (3, THIRD))}
    titles = {1: "1 · first", 3: "3 · third"}
    kind = PEAK_KINDS["process"]
    points = rows_with(growth_chart(reports, titles, kind), "question", "batch")
    # a division by 2**30 is exact
    assert sorted((point["question"], point["batch"], point["size"] * 2**30) for point in points) == sorted(
        (titles[number], row.batch, row.process_bytes) for number, report in reports.items() for row in report.estimates
    )
    parts = rows_with(bars_chart(reports, kind), "question", "category")
    for number, estimate in focused(reports).items():
        sizes = [part["size"] for part in parts if part["question"] == number]
        assert sum(sizes) * 2**30 == pytest.approx(estimate.process_bytes, rel=1e-12)


def test_the_file_is_named_after_the_questions_and_has_a_row_each():
    requests = read_questions([FIRST, THIRD])
    assert compare.file_stem(list(requests)) == "sizer-compare-resnet50-by-dtype-batch-gpu"
    rows = list(csv.DictReader(io.StringIO(figures(FIRST, THIRD).to_csv())))
    assert [row["request.gpu"] for row in rows] == ["a100-80gb", "t4"]
    assert set(FIGURES) - set(OF_SERVER) < rows[0].keys()
    assert rows[0].keys().isdisjoint((*OF_SERVER, "starts", "serves"))


def test_headings_tell_questions_apart():
    requests = dict(enumerate(read_questions([FIRST, SECOND, "arch=hf:gpt2"]), start=1))
    titles = compare.headings(requests)
    assert titles[1].startswith("1 · resnet50, mode training")
    assert titles[3].startswith("3 · ")


class _Slow(ScriptedClient):
    """A client whose second question takes a while: its job has told nothing when the page first looks."""

    def submit(self, query: str, *, stops: bool = False) -> ScriptedJob:
        request = parse_query(query)
        waiting = ["tracing"] * 3 if request.mode == "inference" and len(self.requests) < 2 else []
        self.requests.append(request)
        self.jobs.append(ScriptedJob(lambda: self._make(request), waiting))
        return self.jobs[-1]


def test_answers_come_one_by_one(monkeypatch, open_page):
    client = install(monkeypatch, _Slow(report_for))
    page = open_page("compare", q=[FIRST, SECOND])
    assert [request.mode for request in client.requests] == ["training", "inference"], "what has ended is not asked again"
    assert client.jobs[1].left, "the run that waited has left its job"
    assert page.dataframe[1].value.loc["verdict"].tolist() == ["✓ fits", "✓ fits", ""]


def test_a_question_without_an_answer_leaves_the_others(monkeypatch, open_page):
    def answer(request):
        if request.mode == "inference":
            raise BuildError("it cannot be built", given=HOSTILE)
        return report_for(request)

    client = install(monkeypatch, ScriptedClient(answer))
    page = open_page("compare", q=[FIRST, SECOND, THIRD])
    assert any(line.startswith("Question 2 has no figures: it cannot be built") for line in texts(page))
    shown = page.dataframe[1].value
    assert shown.loc["weights", "2"] == "–" and shown.loc["weights", "3"] == "0.0511 GB (0.0476 GiB)"
    assert "x.example" not in markup(page)
    before = len(client.requests)
    page.run()
    assert len(client.requests) == before, "what has failed is not asked again by itself"
    page.button(key="again").click().run()
    assert len(client.requests) == before + 1


@pytest.mark.parametrize("kind", PEAK_KINDS)
def test_charts_are_of_the_kind_that_is_chosen(client, open_page, kind):
    page = open_page("compare", q=[FIRST, SECOND])
    next(control for control in page.segmented_control if control.label == "Memory").set_value(kind).run()
    curves, bars = (json.loads(chart.proto.spec) for chart in page.get("vega_lite_chart"))
    assert curves["description"].startswith(f"{PEAK_KINDS[kind].title} memory at the peak over batch size")
    assert bars["description"].startswith("Memory at the peak by category")

"""Several questions beside each other: how they are read, what tells them apart, and the command that prints it."""

from __future__ import annotations

import csv
import io
import json

import pytest

from sizer.__main__ import main
from sizer.base.errors import RequestError
from sizer.query.text import as_query, format_query, key_differences, parse_query, read_questions, with_keys, with_value
from sizer.report.side_by_side import FIGURES, OF_ESTIMATE, OF_SERVER, side_by_side, side_of
from sizer.service.client import JobClient
from sizer.service.settings import Settings
from tests.processes.running import TESTS
from tests.ui.reports import report_for

FIRST = "arch=torchvision:resnet50&dtype=float32&batch=1,32&focus=float32:32"
SECOND = "arch=torchvision:resnet50&mode=inference&dtype=float32&batch=1,32&focus=float32:32"


@pytest.fixture
def compare(capsys):
    """Runs the command with jobs that answer at once; (exit status, stdout, stderr)."""

    def run(*arguments: str, function: str = "tests.service.scripted:report") -> tuple[int, str, str]:
        settings = Settings(function=function, preload=(), max_jobs=1, readable=(TESTS,))
        status = main(["compare", *arguments], make_client=lambda: JobClient(settings))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def refuse_vision(job: dict, progress) -> dict:
    """The report on a query, but an error for what is not ResNet-50."""
    from sizer.base.errors import BuildError

    request = parse_query(job["query"])
    if request.name != "resnet50":
        raise BuildError("there is no such network", given=request.name)
    return report_for(request).to_dict()


# ------------------------------------------------------------------------------------------------------------- questions


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("resnet50", "arch=resnet50"),
        (" resnet50&batch=8 ", "arch=resnet50&batch=8"),
        ("arch=hf:gpt2&batch=8", "arch=hf:gpt2&batch=8"),
        ("http://127.0.0.1:8501/?v=1&arch=hf:gpt2", "v=1&arch=hf:gpt2"),
        ("?arch=hf:gpt2", "arch=hf:gpt2"),
        ("https://huggingface.co/org/name", "arch=https://huggingface.co/org/name"),
        ("", ""),
    ],
)
def test_a_question_is_a_query_a_name_or_a_link(text, query):
    assert as_query(text) == query


def test_what_is_refused_is_named_with_its_question():
    with pytest.raises(
        RequestError, match=r"question 2: gpu: given 't5'.*\nquestion 3: arch: given 'hf:nothing'"
    ) as caught:
        read_questions([FIRST, f"{FIRST}&gpu=t5", "arch=hf:nothing"])
    assert [refusal.key for refusal in caught.value.refusals] == ["question 2: gpu", "question 3: arch"]


@pytest.mark.parametrize(("count", "todo"), [(1, "give another one"), (5, "leave some out")])
def test_there_are_two_to_four(count, todo):
    with pytest.raises(RequestError, match=f"questions to compare: given {count}, allowed 2 to 4; {todo}"):
        read_questions([FIRST] * count)


@pytest.mark.parametrize(
    ("key", "value", "changed"),
    [
        ("checkpointing", "1", "checkpointing=1&focus=float32:32"),
        ("dtype", "bfloat16,float16", "dtype=bfloat16,float16&focus=bfloat16:32"),
        ("batch", "2,4", "batch=2,4&focus=float32:4"),
        ("batch", "", "focus=float32:32"),
        ("arch", "resnet18", "arch=torchvision:resnet18&focus=float32:32"),
    ],
)
def test_one_value_is_changed_and_the_focus_stays_near(key, value, changed):
    items = dict(item.split("=") for item in FIRST.split("&")) | dict(item.split("=") for item in changed.split("&"))
    if not value:
        del items[key]
    query = "&".join(f"{name}={text}" for name, text in items.items())
    assert with_value(parse_query(FIRST), key, value) == parse_query(query)


def test_a_value_that_is_not_taken_is_refused():
    with pytest.raises(RequestError, match="checkpointing: given '2', allowed 0, 1"):
        with_value(parse_query(FIRST), "checkpointing", "2")


def test_keys_differ_or_are_the_same_in_all():
    requests = read_questions([FIRST, f"{SECOND}&image=64&gpu=t4"])
    differ, same = key_differences(requests)
    assert differ == {
        "mode": ("training", "inference"),
        "image": ("the model's usual size", "64"),
        "gpu": ("a100-80gb", "t4"),
    }
    assert same["batch"] == "1,32"
    assert "focus" not in same and "seq" not in same


def test_differences_are_those_of_the_reports():
    requests = read_questions([FIRST, SECOND])
    reports = [report_for(request) for request in requests]
    found = side_by_side(requests, [side_of(*pair) for pair in zip(requests, reports, strict=True)])
    first, second = (report.find("float32", 32) for report in reports)
    assert found.questions[0].differences == {}
    for name in OF_ESTIMATE:
        assert found.questions[1].differences[name] == getattr(second, name) - getattr(first, name)
    assert found.questions[1].differences["parameters"] == 0
    assert found.questions[1].differences["gradients_bytes"] == -first.gradients_bytes


def test_a_figure_that_one_lacks_has_no_difference():
    requests = read_questions([FIRST, SECOND])
    found = side_by_side(requests, [side_of(requests[0], None, "why"), side_of(requests[1], report_for(requests[1]))])
    assert found.questions[0].error == "why"
    assert found.questions[1].differences == {}


# --------------------------------------------------------------------------------------------------------------- command


def test_compare_prints_what_differs_and_the_differences(compare):
    status, out, err = compare(FIRST, SECOND)
    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["mode", "training", "inference"] in lines
    assert ["1", "2", "2", "-", "1"] in lines
    weights = ["0.102", "GB", "(0.0952", "GiB)"]  # of a table in which the largest figure has GiB
    assert ["weights", *weights, *weights, "0"] in lines
    assert ["gradients", *weights, "0.00", "GB", "(0.00", "GiB)", "-0.0952", "GiB"] in lines
    assert any(line[:5] == ["The", "same", "in", "all:", "arch=torchvision:resnet50,"] for line in lines)


def test_json_and_csv_say_the_same(compare):
    told = json.loads(compare(FIRST, SECOND, "--json")[1])
    rows = list(csv.DictReader(io.StringIO(compare(FIRST, SECOND, "--csv")[1])))
    assert told["differ"] == {"mode": ["training", "inference"]}
    assert [row["request.mode"] for row in rows] == ["training", "inference"]
    found_names = [name for name in FIGURES if name not in OF_SERVER]
    for side, row in zip(told["questions"], rows, strict=True):
        assert side["query"] == row["query"]
        for name in found_names:
            assert str(side[name]) == row[name]
            assert str(side["differences"].get(name, "")) == row[f"differences.{name}"].lstrip("'")
    estimate = report_for(parse_query(SECOND)).find("float32", 32)
    assert told["questions"][1]["peak_allocated_bytes"] == estimate.peak_allocated_bytes


def test_a_question_without_an_answer_leaves_the_others(compare):
    other = format_query(with_value(parse_query(FIRST), "arch", "resnet18"))
    status, out, err = compare(other, FIRST, SECOND, function="tests.test_compare_command:refuse_vision")
    assert (status, err) == (2, "")
    assert "1 has no figures: there is no such network: given resnet18" in out
    assert next(line for line in out.splitlines() if line.startswith("weights")).split()[1] == "-"


def test_bad_questions_are_refused_before_anything_is_traced(compare):
    status, out, err = compare(FIRST, "arch=hf:nothing")
    assert (status, out) == (2, "")
    assert err.startswith("sizer: question 2: arch: given 'hf:nothing'")


def test_flags_need_no_query_before_them():
    assert with_keys("", {"gpu": "l40s", "seq": None, "batch": (1, 2)}) == "gpu=l40s&batch=1,2"
    assert with_keys("resnet50", {"gpu": "l40s"}) == f"{as_query('resnet50')}&gpu=l40s"

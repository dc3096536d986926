"""Answers from kept tapes: the same as those of a process that traces, to the byte, and without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from sizer.commands.estimate_command import WORKER
from sizer.estimating.estimator import Estimator
from sizer.query.text import parse_query
from sizer.service.local.asking import ask
from sizer.service.variables import FOLDER_VARIABLE
from tests.service.test_local import run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

IMPORTS = "importing torch"
slow = pytest.mark.slow
one_more = pytest.mark.exhaustive

CONVOLUTIONS = "arch=torchvision:squeezenet1_1&image=64&batch=1,2,4"
CLASSIFIED = "arch=torchvision:squeezenet1_1&image=64&batch=1,2&dtype=float32&mode=inference&gpu=t4"
LANGUAGE = "arch=hf:gpt2&seq=16&batch=1,2,4&dtype=float32,bfloat16,float16"
ADAPTED = "arch=hf:gpt2&seq=16&batch=2&dtype=bfloat16&train=adapter&accumulate=2"
SHARDED = "arch=hf:gpt2&seq=16&batch=2,4&dtype=bfloat16&parallel=fsdp&ranks=2&gpu=h100-80gb"
DETECTION = "arch=torchvision:fasterrcnn_mobilenet_v3_large_320_fpn&dtype=float32&batch=1&mode=inference"
GENERATION = "arch=hf:gpt2&mode=generate&seq=8&new=4&dtype=bfloat16&batch=1,2"


def other(query: str, **values: str) -> str:
    """Return a query with other values."""
    pairs = dict(item.split("=", 1) for item in query.split("&"))
    return "&".join(f"{key}={value}" for key, value in {**pairs, **values}.items())


def answer(query: str) -> tuple[str, bool]:
    """Return the JSON that the command prints for a query, and whether its worker imported torch."""
    said: list[str] = []
    found = ask(WORKER, query, {"form": "json", "width": None}, said.append)
    return found["text"].strip(), IMPORTS in said


def traced(query: str) -> str:
    """Return the JSON of a query, all of which is traced in this process."""
    *_, report = Estimator(parse_query(query)).reports()
    return report.to_json()


@pytest.fixture(scope="module")
def keep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], None]]:
    """Answer a query once, and keep its tapes in a folder that later workers use."""
    known: set[str] = set()

    def keep_once(query: str) -> None:
        if query not in known:
            assert answer(query) == (traced(query), True)
            known.add(query)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("kept")))
        yield keep_once


@pytest.mark.parametrize(
    ("kept", "values"),
    [
        (CONVOLUTIONS, {}),
        (CONVOLUTIONS, {"gpu": "rtx-3090", "focus": "bfloat16:2"}),
        (CONVOLUTIONS, {"batch": "3,77", "dtype": "float32,amp-float16", "gpu": "h100-80gb"}),
        (CONVOLUTIONS, {"batch": "65536", "dtype": "float32", "gpu": "rtx-3060-12gb"}),  # it does not fit
        (CONVOLUTIONS, {"batch": "2", "dtype": "bfloat16", "expandable": "1"}),
        (CONVOLUTIONS, {"batch": "2", "dtype": "float16", "outputs": "kept"}),
        (CONVOLUTIONS, {"batch": "2", "dtype": "float32", "gpu": "custom:20GiB@8.0"}),
        (CLASSIFIED, {"batch": "1,5", "gpu": "v100-16gb"}),
        pytest.param(LANGUAGE, {"batch": "1,8", "gpu": "a100-40gb"}, marks=slow),
        pytest.param(LANGUAGE, {"batch": "3", "dtype": "bfloat16", "gpu": "rtx-4090"}, marks=one_more),
        pytest.param(ADAPTED, {"accumulate": "8", "gpu": "a100-40gb"}, marks=slow),
        pytest.param(SHARDED, {"batch": "3", "gpu": "h200"}, marks=one_more),
        pytest.param(DETECTION, {"gpu": "rtx-3090"}, marks=one_more),
        pytest.param(GENERATION, {"batch": "3", "gpu": "a100-40gb"}, marks=slow),
    ],
)
def test_kept_tapes_answer_as_traces_do_without_torch(
    keep: Callable[[str], None], kept: str, values: dict[str, str]
) -> None:
    keep(kept)
    query = other(kept, **values)
    assert answer(query) == (traced(query), False)


@pytest.mark.parametrize(
    ("kept", "values"),
    [
        (CLASSIFIED, {"gpu": "cpu"}),  # other rules
        pytest.param(CLASSIFIED, {"torch": "2.11"}, marks=slow),
        pytest.param(CLASSIFIED, {"image": "96"}, marks=one_more),
        pytest.param(LANGUAGE, {"dtype": "bfloat16", "gpu": "t4"}, marks=slow),  # no flash attention
        pytest.param(LANGUAGE, {"dtype": "amp-bfloat16"}, marks=one_more),  # a dtype that was not traced
        pytest.param(LANGUAGE, {"dtype": "bfloat16", "optimizer": "sgd"}, marks=slow),
    ],
)
def test_what_is_not_kept_is_traced_and_then_kept(
    keep: Callable[[str], None], kept: str, values: dict[str, str]
) -> None:
    keep(kept)
    query = other(kept, **values)
    expected = traced(query)
    assert [answer(query), answer(query)] == [(expected, True), (expected, False)]


ASKED = """
import hashlib, json, sys
from sizer.service.local.answering import answer
from sizer.service.settings import Settings
found = answer({task!r}, {query!r}, None, Settings(), lambda text: None, part="9/12")
print(hashlib.sha256(json.dumps(found).encode()).hexdigest(), "torch" in sys.modules)
"""


def test_a_table_of_devices_comes_from_kept_tapes_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    program = ASKED.format(task="devices", query=other(CONVOLUTIONS, batch="2", dtype="float32"))
    first, second = (run_python(program).split() for _ in range(2))
    assert second == [first[0], "False"] and first[1] == "True"


def test_packages_that_are_refused_are_seen_to_be_installed() -> None:
    program = """
import importlib.util, sys
from sizer.service.local.replaying import NotStoredError, Refusing
sys.meta_path.insert(0, Refusing())
assert importlib.util.find_spec("torch").submodule_search_locations
assert importlib.util.find_spec("json").loader is not None
for name in ("torch", "torch.nn"):
    try:
        __import__(name)
    except NotStoredError as error:
        print(error)
assert "torch" not in sys.modules
"""
    assert run_python(program) == "torch\ntorch\n"

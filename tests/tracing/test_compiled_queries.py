"""Queries with compile=default: each phase's figures against PyTorch's own over the null driver, to the byte.

`tests/null_driver/compiled_queries.json` holds what `tests.null_driver.compiled_queries` recorded.
"""

from __future__ import annotations

import json
import logging
import re

import pytest

from sizer.base.errors import BuildError, RequestError
from sizer.base.versions import installed_version
from sizer.catalogue.gpus import GPUS
from sizer.estimating.estimator import estimate
from sizer.estimating.scopes import choices_of, work_scope_of
from sizer.estimating.store import EmptyStore, StoredTapes
from sizer.estimating.tracer import Tracer
from sizer.query.text import parse_query
from sizer.report.report import Report
from sizer.tracing.compiled import names
from sizer.tracing.device import Device
from tests.null_driver.compiled_queries import QUERIES, RECORDED, query_of

WANTED = json.loads(RECORDED.read_text())
OLDER = installed_version() < names.OLDEST_READ
compiles = pytest.mark.skipif(OLDER, reason="this PyTorch's compiler is refused by name (test_own_code.py)")
# The load phase alone has the two tables of Llama's rotary embeddings more at its peak, 512 bytes each: fully_shard has moved them
# to the device before `to_empty` makes them there, and the trace logs them after bitsandbytes' weights.
MORE_IN_LOADING, TABLES = re.compile(r"parallel=[fh]sdp|train=adapter&weights=(?!.*parallel)"), 1_024
# What the others of a kind show, in a few seconds.
FEW = (
    "llama dtype=bfloat16&budget=0.5",
    "llama dtype=bfloat16&accumulate=3&checkpointing=1",
    "llama dtype=bfloat16&train=adapter&weights=nf4",
    "llama dtype=bfloat16&parallel=ddp&ranks=8",
    "llama dtype=bfloat16&parallel=fsdp&ranks=8",
    "llama dtype=bfloat16&tp=2&optimizer_impl=loop",
)
ALEXNET = "arch=torchvision:alexnet&image=64&compile=default&gpu=h100-80gb"


@pytest.fixture(autouse=True)
def _quiet():
    """Dynamo's log of recompilations is not kept: pytest keeps each record with the tensors that it names."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def phases(report: Report) -> list[list]:
    """A row for each phase: its name, the bytes allocated at its end, the most allocated, the reserved."""
    (row,) = report.estimates
    return [[one.phase, one.allocated_bytes, one.peak_allocated_bytes, one.reserved_bytes] for one in row.phases]


def test_every_query_is_recorded():
    assert WANTED["queries"].keys() == set(QUERIES)


@compiles
@pytest.mark.skipif(installed_version() != (2, 15), reason="recorded with PyTorch 2.15")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.exhaustive) for name in QUERIES]
)
@pytest.mark.filterwarnings("ignore")  # of PyTorch, about gradients' strides under DDP and views under FSDP2
def test_each_phase_is_what_pytorch_allocates(name: str):
    if "weights=" in name:
        pytest.importorskip("bitsandbytes")
    found, wanted = phases(estimate(parse_query(query_of(name, WANTED["gpu"])))), WANTED["queries"][name]
    if MORE_IN_LOADING.search(name):
        found[0][2] += TABLES
    assert found == wanted


@compiles
def test_an_eager_question_is_the_same_after_a_compiled_one():
    eager = parse_query(ALEXNET.replace("compile=default", "dtype=float32&batch=8"))
    before = estimate(eager).to_json()
    assert estimate(parse_query(ALEXNET)).compiled.regions
    assert estimate(eager).to_json() == before


@compiles
def test_the_report_says_what_was_compiled_and_what_was_assumed():
    kept: dict[str, bytes] = {}

    class ResultStore:
        get, put = kept.get, kept.__setitem__

    report = estimate(parse_query(ALEXNET), store=ResultStore())
    (region,) = report.compiled.regions
    assert re.fullmatch(r"a module of torch\.nn: \d+ operators", region)
    assert f"torch.compile, compiled region: {region}" in report.notes
    assert any("memory that compilation itself takes on the device is not counted" in note for note in report.notes)
    assert json.loads(report.to_json())["compiled"]["regions"] == [region]
    assert Report.from_dict(json.loads(report.to_json())).compiled == report.compiled
    told: list[str] = []
    again = estimate(parse_query(ALEXNET), store=ResultStore(), progress=told.append)
    assert again.to_json() == report.to_json()  # `compiled` is kept with the tapes
    assert not any(text.startswith("tracing") for text in told)


def test_kept_results_are_of_one_way_to_compile_on_one_gpu():
    ways = ("", "&compile=default", "&compile=default&compile_scope=model", "&compile=default&budget=0.5")
    asked = [parse_query(f"arch=hf:gpt2&dtype=bfloat16&batch=8{keys}") for keys in ways]
    assert len(set(map(choices_of, asked))) == len(set(map(work_scope_of, asked))) == 4
    request = asked[1]
    h100, h200 = (
        StoredTapes(EmptyStore(), request, Device("cuda", (9, 0), answers_for=GPUS[key]), {}).name("bfloat16")
        for key in ("h100-80gb", "h200")
    )
    assert h100 != h200  # Inductor decides by the number of multiprocessors
    eager = StoredTapes(EmptyStore(), asked[0], Device("cuda", (9, 0)), {}).name("bfloat16")
    assert "compiled" not in eager


@compiles
def test_tensors_are_named_as_in_the_model():
    request = parse_query(ALEXNET)
    _, notes = Tracer(request, GPUS["h100-80gb"]).trace_noted("bfloat16", 8)
    assert "classifier.1.weight" in notes.parameters.values()
    assert not any("_orig_mod" in name for name in notes.parameters.values())


def test_a_model_without_repeated_blocks_is_refused_by_name():
    with pytest.raises(RequestError, match="compile_scope: given 'blocks' with a model that repeats no block"):
        estimate(parse_query(f"{ALEXNET}&compile_scope=blocks"))


@pytest.mark.parametrize(
    "key, values",
    [
        ("adapter", "train=adapter&adapter=vera"),
        ("train", "train=without-tower"),
        ("weights", "train=adapter&weights=fp8"),
        ("parallel", "parallel=pp&pp=2"),
        ("sp", "tp=2&sp=1"),
        ("outputs", "outputs=kept"),
    ],
)
def test_what_was_not_compared_is_refused_by_name(key: str, values: str):
    with pytest.raises(RequestError, match=f"{key}: given .* with compile=default, allowed .* not compared"):
        parse_query(f"arch=hf:gpt2&compile=default&{values}")


def test_cuda_graphs_of_shards_are_refused_by_name():
    with pytest.raises(RequestError, match="parallel: given 'fsdp' with compile=reduce-overhead, allowed none, ddp"):
        parse_query("arch=hf:gpt2&compile=reduce-overhead&parallel=fsdp&ranks=8")


def test_answers_that_do_not_compile_say_so():
    from sizer.decision.devices import devices
    from sizer.decision.limits import limits
    from sizer.decision.ranks import ranks
    from sizer.decision.script import write_script
    from sizer.device.trial.launch import start

    request = parse_query(ALEXNET)
    for answer in (limits, ranks, lambda request: devices(request, gpus=[])):
        with pytest.raises(RequestError, match="not for compiled code: given compile=default, allowed compile=off"):
            next(answer(request))
    with pytest.raises(RequestError, match="a measurement: not for compiled code"):
        start(ALEXNET, "cuda:0")
    with pytest.raises(BuildError, match="no script is written for compiled code"):
        write_script(request, Tracer(request, GPUS["h100-80gb"]))

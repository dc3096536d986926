"""On how many GPUs: every row is the estimate of the same work on that many."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import pytest

from sizer.base.codec import decode, encode
from sizer.base.config_json import encode_config
from sizer.base.errors import RequestError
from sizer.decision.ranks import hopeless, ranks, ways
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from sizer.report.decision import RankReport, RankRow, describe_fewest
from tests.decision.questions import TWO_LAYERS, anew
from tests.tracing.models import LLAMA

# 53.6 M parameters: on one GPU 0.8 GiB of weights, gradients and optimizer state alone.
QUERY = f"{TWO_LAYERS}&seq=64&dtype=float32&batch=2&gpu=custom:3GiB@8.0"

# Llama whose heads divide by 8
SPLIT = "arch=config:" + encode_config(json.dumps(LLAMA | {"num_key_value_heads": 8, "num_hidden_layers": 1}))

ASKED = (1, 2, 16)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return []


@pytest.fixture(scope="module")
def grown(texts: list[str]) -> list[RankReport]:
    with mock.patch("sizer.decision.ranks.GPUS", ASKED), mock.patch("sizer.decision.ranks.PIPELINES", (2,)):
        return list(ranks(parse_query(QUERY), progress=texts.append))


def test_every_way_of_training_has_a_row_on_every_number(grown):
    found = [(row.gpus, row.title) for row in grown[-1].rows]
    spread = ["DDP", "ZeRO-1", "FSDP2"]
    assert found == [
        (1, "One GPU"),
        *((2, way) for way in spread),
        *((16, way) for way in (*spread, "HSDP of 8", "FSDP2 of 8, pipeline parallel", "FSDP2, tensor parallel of 8")),
    ]


def test_a_row_is_what_asking_for_it_gives(grown):
    for row in grown[-1].rows:
        if row.cell is None:  # GPT-2 has no plan for either
            key = {"FSDP2 of 8, pipeline parallel": "pp", "FSDP2, tensor parallel of 8": "tp"}[row.title]
            assert row.reason.startswith(f"{key}: given"), row.title
            continue
        if row.gpus == 16 and row.parallel in ("ddp", "hsdp"):  # which were traced on fewer
            assert row.cell == anew(row.query), row.title
        assert sum(row.at_peak.values()) == pytest.approx(row.cell.peak_allocated_bytes, rel=0.01)
        assert list(row.at_peak.values()) == sorted(row.at_peak.values(), reverse=True)


def test_a_way_that_keeps_more_whole_than_a_device_has_is_not_traced_for_more_gpus():
    request = parse_query("arch=hf:qwen3-0.6b&seq=64&dtype=float32&batch=1&gpu=custom:2GiB@8.0")
    by_zero1 = {way.gpus: way for way in ways(request) if way.request.parallel == "zero1"}
    whole = 596_049_920 * 4
    first = RankRow(parallel="zero1", title="ZeRO-1", gpus=2, query="", at_peak={"parameter": whole, "gradient": whole})
    row = hopeless(by_zero1[8], [first])
    assert (row.gpus, row.cell, row.title) == (8, None, "ZeRO-1")
    assert row.reason.startswith("does not fit")
    assert len(row.reason) <= 60  # of a table's column
    assert estimate(parse_query(row.query)).estimates[0].fits is False
    for other in (first, replace(first, change="with checkpointing"), replace(first, parallel="ddp")):
        smaller = replace(other, at_peak={"parameter": 2**30, "gradient": 2**30})
        assert hopeless(by_zero1[8], [smaller]) is None
    assert hopeless(by_zero1[8], [replace(first, change="with checkpointing")]) is None
    assert hopeless(next(way for way in ways(request) if way.request.parallel == "fsdp"), [first]) is None


def test_the_largest_batch_is_that_of_the_fewest_that_fit(grown):
    found = grown[-1]
    assert found.fewest == min(row.gpus for row in found.rows if row.cell and row.cell.fits is True)
    searched = [row for row in found.rows if row.searched]
    assert (
        searched == [row for row in found.rows if row.gpus == found.fewest and row.cell and row.cell.fits is True] != []
    )
    for row in searched:
        (most,) = estimate(parse_query(row.query)).max_batch
        assert (row.batch, row.possible_batch) == (most.batch, most.possible_batch)
    assert len([*describe_fewest(found)]) == len(searched)


def test_what_does_not_depend_on_the_ranks_is_traced_once(grown, texts):
    # DDP and HSDP once, the others on each number of GPUs; at batch 2 alone until the largest is looked for
    begun = next(place for place, text in enumerate(texts) if text.startswith("largest batch"))
    traced = [text for text in texts[:begun] if text.startswith("tracing")]
    assert traced == ["tracing float32 at batch 2"] * (1 + 1 + 2 + 2 + 1)


def test_it_grows_row_by_row(grown):
    assert [len(report.rows) for report in grown[:11]] == [*range(11)]
    assert [len(report.pending) for report in grown[:11]] == [*range(10, -1, -1)]
    assert decode(RankReport, encode(grown[-1])) == grown[-1]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (f"{QUERY}&mode=inference", r"^parallel: given 'ddp' without mode=training"),
        (f"{TWO_LAYERS}&dtype=float32&batch=2&gpu=cpu", r"^parallel: given 'ddp' with gpu=cpu"),
        (f"{QUERY}&optimizer=adamw-8bit", r"^optimizer: given 'adamw-8bit' with parallel=ddp"),
        (QUERY.replace("batch=2", "batch=2,4"), r"^this answer is for one dtype and batch size"),
    ],
)
def test_what_ranks_cannot_share_is_refused(query, message):
    with pytest.raises(RequestError, match=message):
        list(ranks(parse_query(query)))


def test_what_was_asked_of_parallel_training_stays_where_it_applies():
    asked = ways(parse_query(f"{QUERY}&parallel=fsdp&ranks=4&reshard=0&checkpointing=1"))
    assert {way.request.parallel: way.request.reshard for way in asked} == {
        "none": 1, "ddp": 1, "zero1": 1, "fsdp": 0, "hsdp": 0,
    }  # fmt: skip
    offloaded = ways(parse_query(f"{QUERY}&parallel=hsdp&offload=1"))
    assert {way.request.parallel for way in offloaded if way.request.offload} == {"fsdp", "hsdp"}
    split = ways(parse_query(f"{QUERY}&parallel=fsdp&tp=2&sp=1&lp=1"))
    assert {way.title for way in split if way.request.sp} == {"FSDP2, tensor, sequence and loss parallel of 8"}
    assert all(way.request.checkpointing and way.request.world == way.gpus for way in asked)


def test_a_group_that_the_ranks_are_too_few_for_is_a_row_with_the_reason():
    with mock.patch("sizer.decision.ranks.GPUS", (1, 2)):
        *_, found = ranks(parse_query(f"{QUERY}&parallel=fsdp&ranks=8&reshard=4"))
    reasons = {(row.gpus, row.title): row.reason for row in found.rows if row.cell is None and row.parallel == "fsdp"}
    assert reasons.keys() == {(2, "FSDP2")} and reasons[2, "FSDP2"].startswith("reshard: given 4 with ranks=2")


def test_a_pipeline_has_a_stage_on_each_host_and_the_samples_of_all_gpus(monkeypatch):
    query = f"{SPLIT}&seq=16&dtype=float32&batch=2&gpu=h100-80gb"
    assert [(way.gpus, way.request.pp) for way in ways(parse_query(query)) if way.request.pp > 1] == [(64, 8)]
    monkeypatch.setattr("sizer.decision.ranks.PIPELINES", (2, 4, 8))
    pipelines = [way for way in ways(parse_query(query)) if way.request.pp > 1]
    assert [(way.gpus, way.request.pp) for way in pipelines] == [(16, 2), (32, 4), (64, 8)]
    with mock.patch("sizer.decision.ranks.ways", lambda request: pipelines):
        *_, found = ranks(parse_query(query))
    made, refused = found.rows  # 1 layer is no 4 stages, nor 8
    asked = parse_query(made.query)
    assert (made.gpus, asked.ranks, asked.pp, asked.batches, asked.microbatch) == (16, 8, 2, (4,), 2)
    assert made.cell == anew(made.query)
    assert refused.gpus == 32 and "at most 3, else a stage is empty" in refused.reason
    told = replace(found, rows=(replace(made, searched=True, tried=True, batch=4, possible_batch=4),))
    assert [*describe_fewest(told)] == [
        "It fits on 16 GPUs by FSDP2 of 8, pipeline parallel; the largest batch of each is at least 4."
    ]
    schedule = f"{SPLIT}&batch=8&dtype=float32&parallel=fsdp&pp=4&schedule=gpipe"
    (two, *_) = (way.request for way in ways(parse_query(schedule)) if way.request.pp > 1)
    assert (two.batches, two.microbatch, two.schedule) == ((8,), 1, "gpipe")


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # PyTorch's own, of logits that tensor parallel has gathered
def test_tensor_parallel_stays_within_a_host():
    with mock.patch("sizer.decision.ranks.GPUS", (1, 8, 16)):
        *_, found = ranks(parse_query(f"{SPLIT}&seq=16&dtype=float32&batch=1&gpu=h100-80gb"))
    (split,) = (row for row in found.rows if row.title == "FSDP2, tensor parallel of 8")
    assert (split.gpus, parse_query(split.query).tp) == (16, 8)
    assert split.cell == anew(split.query)
    assert split.cell.peak_allocated_bytes < found.rows[0].cell.peak_allocated_bytes


# Eight layers keep 3 GiB for the backward pass, on any number of GPUs. Recomputed, they keep a tenth of it.
DEEP = "arch=config:" + encode_config('{"model_type": "gpt2", "n_layer": 8, "vocab_size": 1000}')
LONG = f"{DEEP}&seq=1024&dtype=bfloat16&batch=16&gpu=custom:3GiB@8.0"


def test_the_smallest_change_is_named_where_it_fits_on_none():
    with mock.patch("sizer.decision.ranks.GPUS", (1, 2, 8)), mock.patch("sizer.decision.ranks.PIPELINES", ()):
        found = list(ranks(parse_query(LONG)))[-1]
    plain = [row for row in found.rows if not row.change]
    assert found.fewest is None and not any(row.cell and row.cell.fits is True for row in plain)
    changed = [row for row in found.rows if row.change == found.change and row.cell and row.cell.fits is True]
    assert changed and {row.gpus for row in changed} == {found.fewest_changed}
    for row in changed:
        assert row.cell == anew(row.query)
    other = [row for row in found.rows if row.change.endswith("in amp-bfloat16")]
    assert {row.title for row in other} == {row.title for row in changed}, "pure and mixed precision are side by side"
    first = next(describe_fewest(found))
    assert first.startswith("It fits on ") and found.change in first and first.endswith("on none of up to 8 GPUs.")
    assert decode(RankReport, encode(found)) == found

"""Which GPU, how many, and what to change for a server: every row is the plan of its own question."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import sizer
from sizer.base.codec import decode, encode
from sizer.base.config_json import encode_config
from sizer.base.errors import RequestError
from sizer.catalogue.gpus import GPUS
from sizer.commands.decisions import format_devices, format_levers, format_ranks
from sizer.decision.devices import devices
from sizer.decision.levers import levers
from sizer.decision.ranks import ranks
from sizer.decision.serving import ways
from sizer.query.text import parse_query
from sizer.report.decision import DeviceReport, LeverReport, RankReport
from sizer.report.served import figures_of
from sizer.serving.words import describe_served_devices, describe_served_ranks

# 8 heads, 2 layers, 0.5 GiB of weights in 16 bits
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 65_536,
}
MODEL = f"arch=config:{encode_config(json.dumps(CONFIG))}&mode=serve"
# a request of 32,768 tokens takes 2 layers × 2 × 2,048 elements × 2 bytes = 512 MiB
WANT = f"{MODEL}&max_model_len=32k&want=32x32k"
ASKED = ("h200", "rtx-3050-laptop-4gb", "rtx-4090", "m2-ultra-64gb", "l4", "cpu")


@pytest.fixture(scope="module")
def grown() -> list[DeviceReport]:
    return list(devices(parse_query(WANT), gpus=[GPUS[key] for key in ASKED]))


@pytest.fixture(scope="module")
def split() -> RankReport:
    return list(ranks(parse_query(f"{MODEL}&max_model_len=32k&want=128x32k&gpu=l4")))[-1]


def test_devices_that_hold_what_is_wanted_come_first_by_memory(grown: list[DeviceReport]):
    found = grown[-1]
    assert (found.serves, found.pending, len(grown)) == (True, (), len(ASKED))
    # 16 GiB of cache are wanted; of 22 and 24 GiB a share of 0.92 leaves more than that, of 4 it does not
    fits = [(row.gpu, row.serve and row.serve.fits) for row in found.rows]
    assert fits[:4] == [("l4", True), ("rtx-4090", True), ("h200", True), ("rtx-3050-laptop-4gb", False)]
    assert [none for _, none in fits[4:]] == [None, None]


def test_a_row_is_what_asking_for_that_device_gives(grown: list[DeviceReport]):
    for row in grown[-1].rows:
        if row.serve is not None:
            assert row.serve == figures_of(sizer.estimate(row.query).serve), row.gpu


def test_a_device_without_rules_of_the_engine_is_named(grown: list[DeviceReport]):
    reasons = {row.gpu: row.reason for row in grown[-1].rows if row.serve is None}
    assert reasons == {
        "m2-ultra-64gb": "vLLM's rules are not known on devices of mps",
        "cpu": "vLLM's rules are not known on devices of cpu",
    }
    *_, llama = devices(parse_query(f"{MODEL}&engine=llama.cpp&max_model_len=4k"), gpus=[GPUS["m2-ultra-64gb"], GPUS["cpu"]])
    assert all(row.serve is not None for row in llama.rows)


def test_more_memory_of_the_same_kind_holds_no_less():
    # the same capability and multiprocessors, so that flags and profile run are equal
    gpus = [GPUS[key] for key in ("h100-80gb", "h200")]
    *_, found = devices(parse_query(f"{MODEL}&max_num_seqs=64&max_num_batched_tokens=2048"), gpus=gpus)
    by_memory = sorted(found.rows, key=lambda row: row.total_bytes)
    assert by_memory[0].serve.kv_tokens < by_memory[1].serve.kv_tokens


def test_memory_in_use_over_a_device_is_refused_in_its_row():
    *_, found = devices(parse_query(f"{MODEL}&gpu=h200&used=20GiB"), gpus=[GPUS["t4"], GPUS["h200"]])
    reasons = {row.gpu: row.reason for row in found.rows}
    assert reasons["h200"] == ""
    assert reasons["t4"].startswith("used: given 20.00 GiB with gpu=t4, allowed less than the server's share")


def test_the_ways_are_every_split_of_a_host_and_tensor_parallel_stays_in_it():
    asked = parse_query(MODEL)
    found = [(way.tp, way.pp, way.dp) for way in ways(asked, 8)]
    assert found[:4] == [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)]
    # of 1, 2, 4 and 8 GPUs as a product of three powers of two: 1, 3, 6, 10; of 16, 32 and 64 with tp=8: 2, 3, 4
    assert len(found) == len(set(found)) == 1 + 3 + 6 + 10 + 2 + 3 + 4
    assert {tp * pp * dp for tp, pp, dp in found} == {1, 2, 4, 8, 16, 32, 64}
    assert {tp for tp, pp, dp in found if tp * pp * dp > 8} == {8}
    assert {way.tp for way in ways(asked, 9)} == {1}
    assert {way.tp for way in ways(asked, 12)} == {1, 2, 4}


def test_the_fewest_gpus_hold_what_is_wanted(split: RankReport):
    fitting = [row for row in split.rows if row.serve is not None and row.serve.fits is True]
    assert split.fewest == min(row.gpus for row in fitting) > 1
    assert list(split.rows[: len(fitting)]) == fitting
    for row in (*fitting[:3], split.rows[-1]):
        if row.serve is not None:
            assert row.serve == figures_of(sizer.estimate(row.query).serve), row.title
    assert all(row.serve.want.fits is True for row in fitting)


def test_more_stages_than_layers_are_refused_in_their_row(split: RankReport):
    refused = {row.title for row in split.rows if row.serve is None}
    assert "pipeline parallel of 4" in refused
    assert {row.reason for row in split.rows if row.title == "pipeline parallel of 4"} == {
        "pp: given 4, allowed at most the model's 2 layers; ask for less"
    }


def test_tensor_parallel_never_raises_weights_and_copies_hold_as_many_each(split: RankReport):
    rows = {row.title: row.serve for row in split.rows if row.gpus <= 8}
    weights = [rows[title].weights_bytes for title in ("One GPU", *(f"tensor parallel of {tp}" for tp in (2, 4, 8)))]
    assert weights == sorted(weights, reverse=True)
    one, two = rows["One GPU"], rows["data parallel of 2"]
    assert (two.kv_tokens, two.gpus) == (one.kv_tokens, 2)
    assert two.requests_at_once == pytest.approx(2 * one.requests_at_once, abs=0.02)


def test_an_engine_without_ranks_is_refused():
    with pytest.raises(RequestError, match=r"engine: given 'llama.cpp', with an unknown split over GPUs, allowed vllm"):
        list(ranks(parse_query(f"{MODEL}&engine=llama.cpp")))


def test_sglang_answers_both():
    *_, found = devices(parse_query(f"{MODEL}&engine=sglang"), gpus=[GPUS["h100-80gb"]])
    assert found.rows[0].serve.starts is True
    *_, spread = ranks(parse_query(f"{MODEL}&engine=sglang"))
    assert spread.fewest == 1


@pytest.mark.parametrize(
    "more", ["&util=0.2", "&gpu=rtx-3050-laptop-4gb&max_model_len=auto", "", "&gpu=t4&tp=2", "&engine=sglang&gpu=t4"]
)
def test_levers_are_those_of_the_estimate(more: str):
    asked = f"{MODEL}{more}"
    *_, found = levers(parse_query(asked))
    served = sizer.estimate(asked).serve
    assert (found.base, found.serve) == (None, figures_of(served))
    assert tuple(row.serve for row in found.rows) == served.levers
    for row in found.rows:
        changed = dict(item.split("=", 1) for item in row.query.split("&"))
        assert {item.partition("=")[0] for item in row.key.split("&")} <= changed.keys()
        if "auto" not in more:
            alone = sizer.estimate(row.query).serve
            assert (alone.kv_cache_bytes, alone.starts) == (row.serve.kv_cache_bytes, row.serve.starts), row.title


def test_what_cannot_start_says_so():
    *_, found = levers(parse_query(f"{MODEL}&kv_bytes=512MiB"))
    assert found.search == "It does not start. The rows are sets of changes that make it start, the smallest first."
    assert [row.serve.starts for row in found.rows] == [True] * len(found.rows) != []
    *_, none = levers(parse_query(f"{MODEL}&kv_bytes=1KiB&kv=fp8"))
    assert none.search == "It does not start, and with none of the tested changes."
    assert list(format_levers(none))[-1] == "Nothing that is known here makes room for more requests."


def test_the_answers_survive_the_way_to_the_page(grown: list[DeviceReport], split: RankReport):
    *_, changed = levers(parse_query(MODEL))
    for kind, report in ((DeviceReport, grown[-1]), (RankReport, split), (LeverReport, changed)):
        assert decode(kind, json.loads(json.dumps(encode(report)))) == report


def test_the_answers_in_words(grown: list[DeviceReport], split: RankReport):
    said = describe_served_devices(grown[-1])
    assert said.startswith("The server can hold 32 requests of 32,768 tokens at once on 3 devices of 6; the smallest: L4")
    lines = list(format_devices(grown[-1]))
    assert lines[0].split()[:5] == ["gpu", "memory", "verdict", "requests", "of"]
    assert lines[-1] == said
    told = list(describe_served_ranks(split))
    assert told[0] == f"The server can hold 128 requests of 32,768 tokens at once on {split.fewest} GPUs:"
    assert list(format_ranks(split))[-len(told) :] == told
    unsure = replace(split.rows[0], gpus=1, serve=replace(split.rows[0].serve, fits="uncertain"))
    said = [*describe_served_ranks(replace(split, rows=(*split.rows, unsure)))]
    assert said[0] == f"{told[0][:-1]}; it may on 1:"
    *_, changed = levers(parse_query(MODEL))
    text = list(format_levers(changed))
    assert text[0].startswith("Starts. ")
    assert "It starts unchanged." in text
    *_, none = ranks(parse_query(f"{MODEL}&gpu=rtx-3050-laptop-4gb&want=60000x64k"))
    assert list(describe_served_ranks(none)) == [
        "The server can surely hold 60,000 requests of 65,536 tokens at once on none of up to 64 GPUs."
    ]

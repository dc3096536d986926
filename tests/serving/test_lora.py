"""Slots of LoRA adapters: by hand, by version, and as vLLM 0.33's own classes make them.

tests/measured/published/vllm_lora.csv is recorded with vLLM 0.33.0's Python on meta tensors: what `LRUCacheLoRAModelManager` makes
for 128 requests and a step of 2,048 tokens. vLLM is not needed to run these tests.
"""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

import sizer
from sizer.base.errors import RequestError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.query.text import parse_query
from sizer.serving.architecture import Weight
from sizer.serving.command import vllm_command
from sizer.serving.flags import resolve_flags
from sizer.serving.graphs import graph_bytes
from sizer.serving.launch import read_launch, with_command
from sizer.serving.layout import tensors
from sizer.serving.levers import vllm_changes
from sizer.serving.lora import lora_bytes, slots
from sizer.serving.startup import compare, read_startup
from sizer.serving.words import sum_line
from tests.serving.log_table import ROWS
from tests.serving.logs import architecture_of
from tests.serving.models import LAYERS, decoder, flags

METADATA = 8 * 2048 * 4 + 8 * 256 * 3 + 4 * 2048 * 4  # indices of 2,048 tokens and 256 requests
KEYS = ("tp", "max_loras", "max_lora_rank", "fully_sharded_loras", "ep")
# A pair of matrices of rank 8 for each matrix of a layer: qkv, o, gate_up, down; bfloat16.
LAYER = 2 * 8 * (3 * 1024 + 2048 + 2 * 1024 + 2 * 1024 + 8192 + 4096 + 1024)
ASKED = "arch=hf:smollm2-135m&mode=serve&gpu=l4"


def recorded() -> list[dict[str, str]]:
    with ROWS.with_name("vllm_lora.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", recorded(), ids=lambda row: "-".join(row.values()))
def test_slots_are_vllms_own(row: dict[str, str]):
    asked = "&".join(f"{key}={row[key]}" for key in KEYS)
    query = f"arch=hf:{row['preset']}&mode=serve&gpu=h100-80gb&max_num_seqs=128&max_num_batched_tokens=2048&{asked}"
    architecture = architecture_of(row["preset"])
    found = resolve_flags(parse_query(query), architecture, find_gpu("h100-80gb"), 132)
    # a few counters of the kernels are left out
    assert sum(slots(architecture, found)) == pytest.approx(int(row["bytes"]), abs=2048)


def test_slots_by_hand():
    plain = replace(decoder(), model_type="qwen2")  # whose embedding and head have none
    assert sum(slots(plain, flags(loras=1, lora_rank=8))) == METADATA + LAYERS * LAYER
    assert sum(slots(plain, flags(loras=3, lora_rank=16))) == METADATA + LAYERS * LAYER * 6
    assert lora_bytes(plain, flags()) == 0


def test_ranks_split_one_matrix_or_both():
    plain = replace(decoder(), model_type="qwen2")
    half, both = (sum(slots(plain, flags(loras=1, lora_rank=8, tp=2, lora_sharded=one))) for one in (False, True))
    # of the first matrices those of o and down are split by their inputs, of the second ones those of qkv and gate_up
    halved = 2 * 8 * (3 * 1024 + 1024 + 512 + 1024 + 2 * 1024 + 4096 + 2048 + 1024)
    assert half == METADATA + LAYERS * halved
    assert both == METADATA + LAYERS * LAYER // 2


def test_embedding_and_logits_by_version():
    names = {"llama": (0, 11, 0), "mistral": (0, 14, 0), "qwen3": (0, 16, 0)}
    bare = sum(slots(replace(decoder(), model_type="qwen2"), flags(release=(0, 33, 0), loras=2, lora_rank=8)))

    def more(kind: str, release: tuple[int, int, int]) -> int:
        return sum(slots(replace(decoder(), model_type=kind), flags(release=release, loras=2, lora_rank=8))) - bare

    rows = 2 * 2 * 8 * (1000 + 1024) * 2  # two slots of bfloat16: rows and hidden elements of the embedding, and of the logits
    assert [more(kind, (0, 33, 0)) for kind in names] == [rows, 0, rows]
    assert [more("mistral", one) for one in ((0, 14, 0), (0, 15, 0))] == [rows, 0]
    assert [more("qwen3", one) for one in ((0, 15, 0), (0, 16, 0))] == [0, rows]
    # up to 0.11.2 an adapter may add 256 tokens: rows of A, 1,256 of the logits padded to 1,280, two tensors of 256 rows; 512 more
    # rows of the embedding, padded from 1,024, and 256 of the head
    added = 2 * 2 * (8 * (256 + 280) + 2 * 256 * 1024)
    assert more("llama", (0, 11, 2)) == rows + added + (512 + 256) * 1024 * 2


def test_a_tied_embedding_of_qwen3_has_slots_twice_up_to_0_27():
    tied = replace(decoder(), model_type="qwen3", weights=decoder().weights[:-1])
    sizes = [sum(slots(tied, flags(release=one, loras=1, lora_rank=8))) for one in ((0, 27, 1), (0, 28, 0))]
    assert sizes[0] - sizes[1] == 2 * 8 * (1000 + 1024)


def test_experts_have_slots_from_0_11_1_on():
    weights = (
        Weight(name="model.layers.0.mlp.experts.gate_up_proj", shape=(8, 512, 1024)),
        Weight(name="model.layers.0.mlp.experts.down_proj", shape=(8, 1024, 256)),
    )
    sparse = replace(decoder(), weights=weights, model_type="qwen2_moe", experts=8, expert_width=256)
    found = [sum(slots(sparse, flags(release=one, loras=1, lora_rank=8))) - METADATA for one in ((0, 11, 0), (0, 11, 1))]
    assert found == [0, 2 * 8 * 8 * 3 * (1024 + 256)]
    joined = replace(sparse, model_type="gpt_oss")
    found = [sum(slots(joined, flags(release=one, loras=1, lora_rank=8))) - METADATA for one in ((0, 11, 1), (0, 12, 0))]
    assert found == [2 * 8 * 8 * 3 * (1024 + 256), 2 * 8 * 8 * (1024 + 512 + 256 + 1024)]


def test_graphs_are_captured_with_and_without_adapters():
    counts = {}
    for release, second in (((0, 11, 0), False), ((0, 11, 1), False), ((0, 22, 0), True), ((0, 24, 0), True)):
        alone, with_slots = (graph_bytes(decoder(), flags(release=release, second_runner=second, loras=n)) for n in (0, 4))
        counts[release] = with_slots // alone
    assert counts == {(0, 11, 0): 1, (0, 11, 1): 2, (0, 22, 0): 1, (0, 24, 0): 2}


def test_gpt_oss_runs_on_marlin_with_adapters():
    architecture, gpu = architecture_of("gpt-oss-20b"), find_gpu("h100-80gb")
    query = "arch=hf:gpt-oss-20b&mode=serve&gpu=h100-80gb"
    plain, adapted = (resolve_flags(parse_query(query + more), architecture, gpu, 132) for more in ("", "&max_loras=1"))
    assert (plain.marlin, adapted.marlin) == (False, True)
    # 14,712,879,104 with vLLM 0.33's classes
    assert sum(tensors(architecture, adapted)) == pytest.approx(14_712_879_104, rel=0.001)


def test_an_answer_has_the_slots_and_their_command():
    plain, one, four = (sizer.estimate(ASKED + more).serve for more in ("", "&max_loras=1", "&max_loras=4&max_lora_rank=64"))
    assert plain.lora_bytes == 0 < one.lora_bytes < four.lora_bytes
    assert (one.flags["max_lora_rank"], four.flags["max_loras"]) == (16, 4)
    assert plain.weights_bytes == four.weights_bytes
    assert f" + {four.lora_bytes / 2**30:.2f} LoRA adapters + " in sum_line(four) and "LoRA" not in sum_line(plain)
    assert four.command.endswith(" --enable-lora --max-loras 4 --max-lora-rank 64") and "lora" not in plain.command
    assert plain.kv_tokens > one.kv_tokens > four.kv_tokens
    assert "--max-loras 1" in {lever.flags for lever in four.levers}
    changes = vllm_changes(decoder(), flags(loras=1, lora_rank=1, lora_sharded=True), 0)
    assert not any("tp" in change.fields for change in changes)  # two ranks do not divide a rank of 1
    assert "--fully-sharded-loras" in vllm_command("m", flags(loras=1, lora_sharded=True), quantizes=False)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("max_loras=0", r"max_loras: given '0', allowed whole numbers from 1 to 1,024"),
        ("max_lora_rank=24", r"max_lora_rank: given '24', allowed 1, 8, 16, 32, 64, .*; write the next larger one"),
        ("max_lora_rank=1&engine_version=0.10.2", r"max_lora_rank: given 1, allowed 8, 16, .*, 512 in this version"),
        ("fully_sharded_loras=1", r"fully_sharded_loras: given 1 without max_loras, allowed .*; write for example max_loras=4"),
        ("max_loras=2&engine=sglang", r"max_loras: given '2' without engine=vllm"),
        ("max_lora_rank=8&fully_sharded_loras=1&tp=3", r"max_lora_rank: given 8, allowed a max_lora_rank that tp=3 divides"),
    ],
)
def test_bad_values_are_refused_by_name(more: str, message: str):
    with pytest.raises(RequestError, match=f"^{message}"):
        sizer.estimate(f"{ASKED}&{more}")


def test_a_command_is_read_with_its_adapters():
    asked = "vllm serve Qwen/Qwen3-8B --enable-lora --max-loras 4 --max-lora-rank 64 --lora-modules a=/b c=/d --max-cpu-loras 8"
    launch = read_launch(f"{asked} --fully-sharded-loras --lora-dtype bfloat16 --lora-target-modules o_proj")
    assert launch.items == {"mode": "serve", "max_loras": "4", "max_lora_rank": "64", "fully_sharded_loras": "1"}
    assert launch.unmatched == ("--lora-target-modules o_proj: fewer layers have slots: more tokens than planned",)
    assert read_launch("vllm serve Qwen/Qwen3-8B --enable-lora").items["max_loras"] == "1"
    # vLLM reads these with --enable-lora alone
    without = read_launch("vllm serve Qwen/Qwen3-8B --max-loras 4 --max-lora-rank 24 --fully-sharded-loras")
    assert (without.items, without.irrelevant) == ({"mode": "serve"}, 3)
    assert without.read == (("model Qwen/Qwen3-8B", "arch=hf:qwen3-8b"),)


def test_a_log_with_adapters_is_compared_with_their_slots():
    text = (
        "INFO [utils.py:253] non-default args: {'model': 'HuggingFaceTB/SmolLM2-135M', 'enable_lora': True, 'max_lora_rank': 64}\n"
        "INFO Initializing a V1 LLM engine (v0.13.0) with config: model='HuggingFaceTB/SmolLM2-135M', max_seq_len=8192\n"
        "INFO [gpu_model_runner.py:3] Model loading took 0.30 GiB memory\nINFO GPU KV cache size: 5,000 tokens\n"
    )
    log = read_startup(text)
    assert log.query() == "mode=serve&engine_version=0.13.0&max_model_len=8192&max_loras=1&max_lora_rank=64"
    assert log.uncounted == ()
    served = sizer.estimate(f"arch={log.arch}&gpu=l4&{log.query()}").serve
    planned = (served.weights_bytes + served.lora_bytes) / 2**30
    assert compare(log, served)[0].startswith(f"weights: 0.30 GiB in the log, {planned:.2f} planned")
    command = "vllm serve Qwen/Qwen3-8B --enable-lora --max-loras 2\n"
    body = "INFO Available KV cache memory: 25.91 GiB\nINFO GPU KV cache size: 566,016 tokens\n"
    assert with_command(read_startup(command + body), command + body).query() == "mode=serve&max_loras=2"

"""What questions share: an answer from what a question with another value of one key kept is the answer without anything kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.base.config_json import encode_config
from sizer.estimating.estimator import estimate
from sizer.estimating.scopes import choices_of, module_choices_of
from sizer.query.keys import KEYS, MODULE, NOTHING, REPLAY
from sizer.query.text import parse_query

SIZES = '"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2'
LLAMA = encode_config(f'{{"model_type": "llama", {SIZES}}}')
LANGUAGE = f"arch=config:{LLAMA}&dtype=float32&batch=2&seq=16"
RESNET = encode_config('{"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}')
VISION = f"arch=config:{RESNET}&dtype=float32&batch=2"
DETECTION = "arch=torchvision:fasterrcnn_mobilenet_v3_large_320_fpn&dtype=float32&batch=2"
ADAPTER = f"{LANGUAGE}&train=adapter"
FOUR_BITS = f"{ADAPTER}&weights=nf4"
PARALLEL = f"{LANGUAGE}&parallel=fsdp&ranks=2"
PIPELINE = f"{LANGUAGE}&pp=2"
SERVER = f"arch=config:{LLAMA}&mode=serve&gpu=l4"
SHARED_HEAD = SERVER.replace(LLAMA, encode_config(f'{{"model_type": "llama", {SIZES}, "num_key_value_heads": 1}}'))

# By key, a question and two values of the key; None leaves it out.
DIFFERENCES: dict[str, tuple[str, str | None, str | None]] = {
    "v": (LANGUAGE, None, "1"),
    "head": (LANGUAGE, None, "LlamaForSequenceClassification"),
    "mode": (LANGUAGE, None, "inference"),
    "dtype": (LANGUAGE.replace("&dtype=float32", ""), "float32", "bfloat16"),
    "batch": (LANGUAGE.replace("&batch=2", ""), "2", "4,8"),
    "seq": (f"arch=config:{LLAMA}&dtype=float32&batch=2", "16", "32"),
    "image": (VISION, "64", "96"),
    "new": (f"{LANGUAGE}&mode=generate", "4", "8"),
    "cache": (f"{LANGUAGE}&mode=generate&new=4", None, "static"),
    "optimizer": (LANGUAGE, None, "sgd"),
    "optimizer_impl": (LANGUAGE, None, "loop"),
    "attention": (LANGUAGE, None, "eager"),
    "checkpointing": (LANGUAGE, None, "1"),
    "gpu": (LANGUAGE, "h100-80gb", "t4"),
    "expandable": (LANGUAGE, None, "1"),
    "torch": (LANGUAGE, None, "2.11"),
    "train": (LANGUAGE, None, "head"),
    "adapter": (ADAPTER, None, "vera"),
    "r": (ADAPTER, None, "4"),
    "alpha": (ADAPTER, None, "4"),
    "targets": (ADAPTER, None, "q_proj"),
    "adapter_dropout": (ADAPTER, None, "0.1"),
    "modules_to_save": (ADAPTER, None, "lm_head"),
    "weights": (ADAPTER, None, "nf4"),
    "compute": (FOUR_BITS, None, "bfloat16"),
    "prepare": (FOUR_BITS, None, "0"),
    "classes": (VISION, None, "10"),
    "trainable_layers": (DETECTION, None, "1"),
    "cudnn_benchmark": (VISION, None, "1"),
    "accumulate": (LANGUAGE, None, "2"),
    "outputs": (LANGUAGE, None, "kept"),
    "loss": (LANGUAGE, None, "chunked:2"),
    "step": (LANGUAGE, None, "in_backward"),
    "evaluate": (LANGUAGE, None, "logits:2"),
    "parallel": (LANGUAGE, None, "ddp"),
    "ranks": (f"{LANGUAGE}&parallel=fsdp", "2", "4"),
    "replicate": (f"{LANGUAGE}&parallel=hsdp&ranks=2", "2", "4"),
    "reshard": (PARALLEL, None, "0"),
    "offload": (PARALLEL, None, "1"),
    "tp": (f"{LANGUAGE}&parallel=fsdp&ranks=2", None, "2"),
    "sp": (f"{LANGUAGE}&tp=2&optimizer_impl=loop", None, "1"),
    "lp": (f"{LANGUAGE}&tp=2&optimizer_impl=loop", None, "1"),
    "cp": (PARALLEL, None, "2"),
    "pp": (PARALLEL, None, "2"),
    "schedule": (PIPELINE, None, "gpipe"),
    "microbatch": (PIPELINE.replace("batch=2", "batch=8"), None, "2"),
    "rank": (PIPELINE, "0", "1"),
    "engine": (SERVER, None, "sglang"),
    "engine_version": (SERVER, None, "0.9.2"),
    "util": (SERVER, None, "0.5"),
    "max_model_len": (SERVER, None, "1024"),
    "max_num_seqs": (SERVER, None, "16"),
    "max_num_batched_tokens": (SERVER, None, "4096"),
    "kv": (SERVER, None, "fp8"),
    "enforce_eager": (SERVER, None, "1"),
    "api": (SERVER, None, "offline"),
    "sampler": (SERVER, "sort", "triton"),
    "prefix_caching": (SERVER, None, "0"),
    "kv_bytes": (SERVER, None, "1GiB"),
    "used": (SERVER, None, "1GiB"),
    "outside": (SERVER, None, "1GiB"),
    "graphs": (SERVER, None, "1GiB"),
    "want": (SERVER, None, "2x512"),
    "cpu_offload_gb": (SERVER, None, "0.05"),
    "dcp": (f"{SHARED_HEAD}&tp=2", None, "2"),
    "gpu_layers": (f"{SERVER}&engine=llama.cpp", None, "1"),
    "cpu_moe": (f"{SERVER}&engine=llama.cpp", "0", "0"),
    "fa": (f"{SERVER}&engine=llama.cpp", None, "0"),
    "speculative": (SERVER, "ngram:2", "ngram:4"),
    "attn_dp": (f"{SERVER}&engine=sglang&tp=2", None, "2"),
    "pool": (f"{SERVER}&engine=sglang", None, "max_total_tokens:128"),
    "max_loras": (SERVER, None, "2"),
    "max_lora_rank": (SERVER, None, "8"),
    "fully_sharded_loras": (f"{SERVER}&max_loras=1&max_lora_rank=8", "0", "1"),
    "dp": (f"{SERVER}&tp=1", None, "2"),
    "focus": (LANGUAGE, None, "float32:2"),
}
# Keys that need an optional package, a mixture of experts, an encoder or a compiler: other tests ask such questions with a cache.
ELSEWHERE = {
    *("arch", "inputs", "compile", "compile_scope", "budget", "objective", "reference", "group", "rollout", "activations"),
    *("optimizer_offload", "autocast", "liger", "fla", "frames", "stream", "vae", "guidance", "output", "without", "cached", "ep"),
}


class InMemoryStore(dict):
    """What earlier questions kept, by name."""

    def put(self, name: str, data: bytes) -> None:
        self[name] = data


def question(key: str, value: str | None) -> str:
    base = DIFFERENCES[key][0]
    return base if value is None else f"{base}&{key}={value}"


def test_every_key_is_asked_for():
    assert DIFFERENCES.keys() | ELSEWHERE == KEYS.keys()
    assert not DIFFERENCES.keys() & ELSEWHERE


# Those of MODULE share no name. These take longest, and go the way of others.
LONG = {"cudnn_benchmark", "sp", "lp", "replicate", "reshard", "optimizer_impl", "offload"}
SHARING = [key for key in DIFFERENCES if KEYS[key].affects != MODULE]


@pytest.mark.parametrize("key", [pytest.param(key, marks=[pytest.mark.exhaustive] * (key in LONG)) for key in SHARING])
def test_nothing_is_shared_that_the_key_changes(key: str):
    one, other = (parse_query(question(key, value)) for value in DIFFERENCES[key][1:])
    kept = InMemoryStore()
    estimate(one, store=kept)
    assert estimate(other, store=kept).to_json() == estimate(other).to_json()


@pytest.mark.parametrize("key", DIFFERENCES)
def test_questions_share_what_the_key_does_not_affect(key: str):
    one, other = (parse_query(question(key, value)) for value in DIFFERENCES[key][1:])
    affects = KEYS[key].affects
    if "mode=serve" not in question(key, None):  # of a server all shares the module of its architecture
        assert (module_choices_of(one) == module_choices_of(other)) is (affects != MODULE)
        assert (choices_of(one) == choices_of(other)) is (affects in (REPLAY, NOTHING))


@pytest.mark.parametrize("key", ["optimizer", "train", "seq"])
def test_a_key_with_a_wrong_row_is_caught(key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(KEYS, key, replace(KEYS[key], affects=REPLAY))
    with pytest.raises(AssertionError, match="assert"):
        test_nothing_is_shared_that_the_key_changes(key)

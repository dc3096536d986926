"""Training recipes over the null driver: what PyTorch's own code allocates for queries with `loss`, `step`, `objective` and others.

python -m tests.null_driver.recipes [NAME…]

records what recipes.json lacks, each query in a process of its own (`--one QUERY`). Queries of APART are recorded again with
storages that TRL's offloading tells apart (`--apart QUERY`).
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import subprocess
import sys
import weakref
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from sizer.base.config_json import encode_config
from sizer.catalogue.hardware import HARDWARE
from sizer.query.text import parse_query
from sizer.running.small_values import Values
from tests.architecture.tiny_configs import TINY
from tests.null_driver.build import null_environment
from tests.null_driver.rank_queries import peaks
from tests.null_driver.record import record

ROOT = Path(__file__).parent.parent.parent
RECORDED = Path(__file__).parent / "recipes.json"
KEYS = {
    "in-backward": "dtype=bfloat16&step=in_backward",
    "in-backward-fused-checkpointing": "dtype=bfloat16&step=in_backward&optimizer_impl=fused&checkpointing=1",
    "torch": "dtype=bfloat16&loss=torch",
    "chunked": "dtype=bfloat16&loss=chunked:8",
    "chunked-in-backward": "dtype=bfloat16&loss=chunked:8&step=in_backward",
    "lora-chunked": "dtype=bfloat16&loss=chunked:4&train=adapter",
    "evaluate-loss": "dtype=bfloat16&evaluate=loss",
    "evaluate-logits": "dtype=bfloat16&evaluate=logits:4",
    "amp-evaluate-logits": "dtype=amp-bfloat16&evaluate=logits:2",
    "trl-evaluate-loss": "dtype=bfloat16&loss=trl&evaluate=loss",
    "trl-evaluate-logits": "dtype=bfloat16&autocast=1&loss=trl&evaluate=logits:2",
    "autocast": "dtype=bfloat16&autocast=1",
    "autocast-lora-checkpointing": "dtype=bfloat16&autocast=1&train=adapter&checkpointing=1",
    "liger": "dtype=bfloat16&loss=liger",
    "trl": "dtype=bfloat16&loss=trl",
    "cce": "dtype=bfloat16&loss=cce",
}
PREFERENCES = {
    "dpo": "dtype=bfloat16&objective=dpo",
    "dpo-precomputed": "dtype=bfloat16&objective=dpo&reference=precomputed",
    "dpo-lora": "dtype=bfloat16&objective=dpo&train=adapter",
    "dpo-lora-checkpointing": "dtype=bfloat16&objective=dpo&train=adapter&checkpointing=1",
    "autocast-dpo-lora": "dtype=bfloat16&autocast=1&objective=dpo&train=adapter",
    "dpo-nf4": "dtype=bfloat16&objective=dpo&train=adapter&weights=nf4",
    "dpo-nf4-checkpointing": "dtype=bfloat16&objective=dpo&train=adapter&weights=nf4&autocast=1&checkpointing=1",
    "amp-dpo": "dtype=amp-bfloat16&objective=dpo",
    "kto": "dtype=bfloat16&objective=kto",
    "kto-lora": "dtype=bfloat16&objective=kto&train=adapter",
    "kto-precomputed": "dtype=bfloat16&objective=kto&reference=precomputed",
    "orpo": "dtype=bfloat16&objective=orpo",
    "orpo-lora-checkpointing": "dtype=bfloat16&objective=orpo&train=adapter&checkpointing=1",
    "autocast-orpo-nf4": "dtype=bfloat16&autocast=1&objective=orpo&train=adapter&weights=nf4",
    "reward": "dtype=bfloat16&objective=reward&classes=1&head={head}ForSequenceClassification",
    "reward-lora": "dtype=bfloat16&objective=reward&train=adapter&classes=1&head={head}ForSequenceClassification",
}
GROUPS = {
    "grpo": "dtype=bfloat16&objective=grpo&group=2&new=24",
    "grpo-lora-checkpointing": "dtype=bfloat16&objective=grpo&group=2&new=24&train=adapter&checkpointing=1",
    "grpo-accumulate": "dtype=bfloat16&objective=grpo&group=4&new=24&accumulate=2",
    "grpo-colocated": "dtype=bfloat16&objective=grpo&group=2&new=24&reference=none&rollout=colocated:0.3",
    "grpo-nf4": "dtype=bfloat16&objective=grpo&group=2&new=24&train=adapter&weights=nf4",
    "amp-grpo": "dtype=amp-bfloat16&objective=grpo&group=2&new=24",
}
OFFLOADED = {
    "offload": "dtype=bfloat16&activations=offload",
    "offload-trl": "dtype=bfloat16&activations=offload&loss=trl",
    "offload-checkpointing": "dtype=bfloat16&activations=offload&checkpointing=1",
    "offload-lora": "dtype=bfloat16&activations=offload&train=adapter",
    "offload-dpo": "dtype=bfloat16&activations=offload&objective=dpo",
}
OF_TORCHAO = {
    "torchao-optimizer": "dtype=bfloat16&optimizer_offload=1",
    "torchao-optimizer-sgd": "dtype=float32&optimizer_offload=1&optimizer=sgd-momentum&accumulate=2",
    "torchao-optimizer-lora-checkpointing": "dtype=bfloat16&optimizer_offload=1&train=adapter&checkpointing=1",
    "torchao-optimizer-amp-chunked": "dtype=amp-bfloat16&optimizer_offload=1&loss=chunked:8",
}
KEYS |= PREFERENCES | GROUPS | OFFLOADED | OF_TORCHAO
# by the name of a query
PACKAGES = dict.fromkeys(PREFERENCES | GROUPS | OFFLOADED, "trl") | dict.fromkeys(OF_TORCHAO, "torchao")
PACKAGES |= {"liger": "liger-kernel", "cce": "cut-cross-entropy"}
PACKAGES |= dict.fromkeys(("trl", "trl-evaluate-loss", "trl-evaluate-logits"), "trl")
# Triton's kernels launch nothing, so cut cross-entropy's two functions of single numbers are not compiled, as in the trace
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
MODELS = {"rtx-4090": "arch=hf:gpt2&batch=4&seq=256", "h100-80gb": "arch=hf:qwen2.5-0.5b&batch=2&seq=512"}
HEADS = {"rtx-4090": "GPT2", "h100-80gb": "Qwen2"}
QUERIES = {
    f"{gpu}/{name}": f"{model}&{keys.format(head=HEADS[gpu])}&gpu={gpu}"
    for gpu, model in MODELS.items()
    for name, keys in KEYS.items()
}
ROLLOUTS = {"rtx-4090": "arch=hf:gpt2&batch=64&seq=8", "h100-80gb": "arch=hf:qwen2.5-0.5b&batch=64&seq=8"}
PAIRS = {
    "contrastive": "dtype=bfloat16&objective=contrastive",
    "contrastive-cached": "dtype=bfloat16&objective=contrastive:16",
    "contrastive-cached-lora-checkpointing": "dtype=bfloat16&objective=contrastive:16&train=adapter&checkpointing=1",
    "amp-contrastive-cached": "dtype=amp-bfloat16&objective=contrastive:32",
}
ENCODERS = {"rtx-4090": "arch=hf:bert-base-uncased&batch=64&seq=64", "h100-80gb": "arch=hf:modernbert-base&batch=48&seq=128"}
QUERIES |= {f"{gpu}/{name}": f"{model}&{keys}&gpu={gpu}" for gpu, model in ENCODERS.items() for name, keys in PAIRS.items()}
PAIRS_ON_RANKS = {
    "ranks-contrastive-ddp": "dtype=amp-bfloat16&objective=contrastive&parallel=ddp&ranks=2",
    "ranks-contrastive-cached-ddp": "dtype=bfloat16&autocast=1&objective=contrastive:16&parallel=ddp&ranks=2",
    "ranks-contrastive-zero1": "dtype=bfloat16&objective=contrastive&parallel=zero1&ranks=2&rank=0",
}
QUERIES |= {f"rtx-4090/{name}": f"{ENCODERS['rtx-4090']}&{keys}&gpu=rtx-4090" for name, keys in PAIRS_ON_RANKS.items()}
PACKAGES |= dict.fromkeys((*PAIRS, *PAIRS_ON_RANKS), "sentence-transformers")
QUERIES |= {  # completions without a reference, whose rollout takes more than the steps behind it do at first
    f"{gpu}/grpo-rollout": f"{model}&dtype=bfloat16&objective=grpo&reference=none&new=24&gpu={gpu}"
    for gpu, model in ROLLOUTS.items()
}
PACKAGES["grpo-rollout"] = "trl"
LAYERS = {  # of Liger, which has none for GPT-2
    "layers": "dtype=bfloat16&liger=1",
    "layers-liger": "dtype=bfloat16&liger=1&loss=liger",
    "layers-trl-checkpointing": "dtype=bfloat16&liger=1&loss=trl&checkpointing=1",
    "layers-lora-autocast": "dtype=bfloat16&liger=1&loss=trl&train=adapter&autocast=1",
    "layers-nf4": "dtype=bfloat16&liger=1&train=adapter&weights=nf4",
    "amp-layers": "dtype=amp-bfloat16&liger=1",
    "layers-dpo": "dtype=bfloat16&liger=1&objective=dpo",
    "layers-grpo": "dtype=bfloat16&liger=1&objective=grpo&group=2&new=24",
    "layers-offload": "dtype=bfloat16&liger=1&loss=trl&activations=offload",
}
QUERIES |= {f"{gpu}/{name}": f"{MODELS['h100-80gb']}&{keys}&gpu={gpu}" for gpu in MODELS for name, keys in LAYERS.items()}
GATED = {"model_type": "gemma2", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "vocab_size": 4096}
GELU = f"arch=config:{encode_config(json.dumps(GATED))}&batch=2&seq=64"
QUERIES["rtx-4090/layers-gelu"] = f"{GELU}&dtype=bfloat16&liger=1&gpu=rtx-4090"
PACKAGES |= dict.fromkeys((*LAYERS, "layers-gelu"), "liger-kernel")
SCALED = {"model_type": "cohere", "num_attention_heads": 4, **{name: size for name, size in GATED.items() if name != "model_type"}}
SCALES = f"arch=config:{encode_config(json.dumps(SCALED))}&batch=2&seq=64"
GRANITE = f"arch=config:{encode_config(json.dumps({**SCALED, 'model_type': 'granite', 'logits_scaling': 8.0}))}&batch=2&seq=64"
QUERIES |= {  # logits that the model caps or scales, as TRL's loss does
    "rtx-4090/trl-capped": f"{GELU}&dtype=bfloat16&loss=trl&gpu=rtx-4090",
    "h100-80gb/trl-scaled": f"{SCALES}&dtype=amp-bfloat16&loss=trl&gpu=h100-80gb",
}
PACKAGES |= dict.fromkeys(("trl-capped", "trl-scaled"), "trl")
QUERIES |= {  # states that are multiplied in the place of logits, and a head of which PEFT trains a copy
    "rtx-4090/cce-scaled": f"{SCALES}&dtype=bfloat16&loss=cce&gpu=rtx-4090",
    "rtx-4090/cce-granite": f"{GRANITE}&dtype=bfloat16&loss=cce&gpu=rtx-4090",
    "rtx-4090/liger-saved": f"{MODELS['h100-80gb']}&dtype=bfloat16&loss=liger&train=adapter&modules_to_save=lm_head&gpu=rtx-4090",
    "rtx-4090/trl-saved": f"{MODELS['h100-80gb']}&dtype=bfloat16&loss=trl&train=adapter&modules_to_save=embed_tokens&gpu=rtx-4090",
}
PACKAGES |= dict.fromkeys(("cce-scaled", "cce-granite"), "cut-cross-entropy") | {"liger-saved": "liger-kernel", "trl-saved": "trl"}
LLAVA = f"arch=config:{encode_config(json.dumps(TINY['llava']))}&batch=2&seq=32&gpu=h100-80gb"
QUERIES |= {
    "h100-80gb/without-tower": f"{LLAVA}&dtype=bfloat16&train=without-tower",
    "h100-80gb/amp-without-tower-checkpointing": f"{LLAVA}&dtype=amp-bfloat16&train=without-tower&checkpointing=1",
}
SMALL = {"model_type": "llama", **dict.fromkeys(("hidden_size", "intermediate_size"), 512), "num_hidden_layers": 4}
SMALL |= {"vocab_size": 8000, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
RANKS = {  # each rank has samples of its own; TRL shards a reference as a single group
    "ranks-trl-ddp": "dtype=bfloat16&loss=trl&parallel=ddp&ranks=2",
    "ranks-trl-lora-ddp": "dtype=bfloat16&loss=trl&autocast=1&train=adapter&parallel=ddp&ranks=2",
    "ranks-trl-fsdp": "dtype=amp-bfloat16&loss=trl&checkpointing=1&parallel=fsdp&ranks=4",
    "ranks-liger-fsdp": "dtype=amp-bfloat16&liger=1&loss=liger&parallel=fsdp&ranks=4",
    "ranks-chunked-fsdp": "dtype=bfloat16&loss=chunked:8&parallel=fsdp&ranks=4",
    "ranks-dpo-ddp": "dtype=amp-bfloat16&objective=dpo&parallel=ddp&ranks=2",
    "ranks-dpo-fsdp": "dtype=amp-bfloat16&objective=dpo&parallel=fsdp&ranks=2",
    "ranks-dpo-lora-fsdp": "dtype=bfloat16&objective=dpo&train=adapter&accumulate=2&parallel=fsdp&ranks=2",
    "ranks-kto-zero1": "dtype=bfloat16&objective=kto&parallel=zero1&ranks=2&rank=0",
    "ranks-orpo-fsdp": "dtype=bfloat16&objective=orpo&parallel=fsdp&ranks=2",
    "ranks-grpo-ddp": "dtype=bfloat16&objective=grpo&group=2&new=24&parallel=ddp&ranks=2",
    "ranks-grpo-zero1": "dtype=bfloat16&objective=grpo&group=2&new=24&reference=none&parallel=zero1&ranks=2&rank=0",
    "ranks-trl-lora-fsdp": "dtype=bfloat16&autocast=1&loss=trl&train=adapter&parallel=fsdp&ranks=2",
    "ranks-evaluate-logits-ddp": "dtype=bfloat16&evaluate=logits:3&parallel=ddp&ranks=2",
    "ranks-amp-evaluate-logits-zero1": "dtype=amp-bfloat16&evaluate=logits:2&parallel=zero1&ranks=2&rank=0",
    "ranks-evaluate-logits-fsdp": "dtype=amp-bfloat16&evaluate=logits:2&parallel=fsdp&ranks=2",
}
OF_SMALL = f"arch=config:{encode_config(json.dumps(SMALL))}&batch=2&seq=256&gpu=rtx-4090"
QUERIES |= {f"rtx-4090/{name}": f"{OF_SMALL}&{keys}" for name, keys in RANKS.items()}
OF_RANKS = [name for name in RANKS if "chunked" not in name and "evaluate" not in name]
PACKAGES |= {name: "liger-kernel" if "liger" in name else "trl" for name in OF_RANKS}
LINEAR = {"model_type": "qwen3_5_text", "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 8000}
LINEAR |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 4}
LINEAR |= {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 128}
KIMI = {"model_type": "kimi_linear", "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 64}
KIMI |= {"num_hidden_layers": 4, "vocab_size": 8000, "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8}
KIMI |= {"num_experts_per_tok": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
KIMI |= {"linear_num_heads": 4, "linear_head_dim": 64, **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))}
OF_KIMI = f"arch=config:{encode_config(json.dumps(KIMI))}&batch=2&seq=96"
OF_LINEAR = f"arch=config:{encode_config(json.dumps(LINEAR))}&batch=2&seq=300"
FLA = {  # linear attention by flash-linear-attention
    "fla": "dtype=bfloat16&fla=1",
    "amp-fla-checkpointing": "dtype=amp-bfloat16&fla=1&checkpointing=1",
    "fla-lora": "dtype=bfloat16&fla=1&train=adapter",
    "fla-inference": "dtype=float16&fla=1&mode=inference",
    "fla-generate": "dtype=bfloat16&fla=1&mode=generate&new=24",
    "fla-liger": "dtype=bfloat16&fla=1&liger=1&loss=liger",
    "ranks-fla-fsdp": "dtype=amp-bfloat16&fla=1&parallel=fsdp&ranks=2",
}
QUERIES |= {f"{gpu}/{name}": f"{OF_LINEAR}&{keys}&gpu={gpu}" for gpu in MODELS for name, keys in FLA.items()}
QUERIES |= {f"{gpu}/fla-kimi": f"{OF_KIMI}&dtype=bfloat16&fla=1&gpu={gpu}" for gpu in MODELS}
PACKAGES |= dict.fromkeys((*FLA, "fla-kimi"), "fla-core") | {"fla-liger": "liger-kernel"}


# TRL's offloading knows storages by their addresses, which the allocator gives again to others. Sizer tells storages apart.
APART = ("rtx-4090/offload-dpo", "rtx-4090/layers-offload", "h100-80gb/layers-offload")


def _run(name: str, option: str) -> dict:
    """Return what a process prints of a query, with `failure` None if it did not fail."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.null_driver.recipes", option, QUERIES[name]],
        cwd=ROOT,
        env={**os.environ, **null_environment(HARDWARE[name.partition("/")[0]]), **UNCOMPILED},
        capture_output=True,
        text=True,
        timeout=500,
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failure": done.stderr[-300:]}


def main(names: list[str]) -> None:
    """Record what the file lacks."""
    kept = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    for name in names or QUERIES:
        if name in kept:
            continue
        kind = name.partition("/")[2]
        found = _run(name, "--one")
        if found["failure"] is None and name in APART:
            found["apart"] = _run(name, "--apart")
            found["failure"] = found["apart"].pop("failure")
        print(name, found, flush=True)
        if found.pop("failure") is None:
            packages = ("torch", "transformers", *((PACKAGES[kind],) if kind in PACKAGES else ()))
            versions = {one: version(one).split("+")[0] for one in packages}
            kept[name] = {**found, "query": QUERIES[name], "versions": versions}
            RECORDED.write_text(json.dumps(dict(sorted(kept.items())), indent=2) + "\n", encoding="utf-8")


def tell_storages_apart() -> None:
    """Have TRL's offloading know each storage by a number that no other storage has had."""
    from trl.models import activation_offloading

    numbers: dict[int, tuple[int, weakref.ref]] = {}
    numbered = itertools.count(1)

    def key_of(tensor: Tensor) -> tuple[int, torch.dtype]:
        storage = tensor.untyped_storage()
        if (address := storage._cdata) not in numbers:
            number = next(numbered) * 2**40  # more than the bytes of any storage
            numbers[address] = number, weakref.ref(storage, lambda _: numbers.pop(address))
        return numbers[address][0] + tensor.storage_offset(), tensor.dtype

    activation_offloading._get_unique_tensor_key = key_of


def choose_at_once() -> None:
    """Have Triton take the first configuration of each kernel, as if it had compared them in an earlier process."""
    autotuner = importlib.import_module("triton.runtime.autotuner")
    autotuner.Autotuner._bench = lambda *args, **kwargs: [1.0, 1.0, 1.0]


def one(query: str) -> None:
    """Print the figures of a query in bytes; those of a rank of several have no phases."""
    if parse_query(query).fla:
        choose_at_once()
    if parse_query(query).parallel != "none":
        allocated, reserved, _ = peaks(query)
        print(json.dumps({"failure": None, "allocated": allocated, "reserved": reserved, "phases": {}}), flush=True)
        os._exit(0)
    values = Values(ctypes.CDLL(None))  # as in `sizer run`: kernels count what masks select
    found = record(query, values=values.installed()).measurement
    phases = {phase.phase: phase.peak_allocated_bytes for phase in found.phases}
    told = {"allocated": found.peak_allocated_bytes, "reserved": found.peak_reserved_bytes, "phases": phases}
    print(json.dumps({"failure": found.failure, **told}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--apart"]:
        tell_storages_apart()
    one(sys.argv[2]) if sys.argv[1:2] in (["--one"], ["--apart"]) else main(sys.argv[1:])

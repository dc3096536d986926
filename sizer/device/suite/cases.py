"""The cases of the suite: one query each, with exactly one dtype and one batch size, and the configs of their models.

The configs are in shapes that people use. No key in them is a default of transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from sizer.base.config_json import encode_config
from sizer.query.text import parse_query

LLAMA_1B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "sliding_window": None,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "tie_word_embeddings": False,
}
# The same families, small enough for a CPU.
SMALL_GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 4096,
    "n_embd": 256,
    "n_head": 4,
}
SMALL_GPT2 |= {"n_layer": 4, "n_positions": 256, "bos_token_id": 0, "eos_token_id": 0}
SMALL_LLAMA = LLAMA_1B | {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 4096}
SMALL_LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}
SMALL_MIXTRAL = MIXTRAL | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 2048}
SMALL_MIXTRAL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}


# ---------------------------------------------------------------------------------------------------------------- cases


_ADAPTER = {"train": "adapter"}
_ANSWER = {"mode": "inference"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One piece of work of the suite; `name` is the stem of its files."""

    name: str
    query: str

    @property
    def ranks(self) -> int:
        """Return the number of ranks that train together, each on its own device; 1 for a single device."""
        return parse_query(self.query).world


@cache
def list_cases() -> tuple[Case, ...]:
    """Return the cases for an accelerator, cheapest first within each family; none needs more than 80 GiB."""
    return (
        *_convolutional(), *_pictures(), *_texts(), *_large_texts(), *_fine_tuned(), *_quantized(), *_generated(), *_ranks(),
    )  # fmt: skip


@cache
def list_small_cases() -> tuple[Case, ...]:
    """Return the cases for a CPU: small models or small inputs, seconds each on two cores."""
    return (
        _vision("resnet18", 2, image=64),
        _vision("mobilenet_v2", 2, image=64, mode="inference"),
        _vision("convnext_tiny", 2, image=64, dtype="bfloat16", optimizer="sgd"),
        _vision("swin_t", 2, image=64),
        _preset("all-minilm-l6-v2", 4, seq=64, dtype="amp-bfloat16"),
        _preset("t5-small", 2, seq=32, optimizer="adafactor"),
        _preset("whisper-tiny", 1, mode="inference"),
        _config("gpt2-small", SMALL_GPT2, 2, seq=64, checkpointing=1),
        _config("llama-small", SMALL_LLAMA, 2, seq=64, dtype="bfloat16"),
        _config("mixtral-small", SMALL_MIXTRAL, 2, seq=32, optimizer="sgd-momentum"),
        _config("llama-small", SMALL_LLAMA, 2, seq=64, dtype="bfloat16", **_ADAPTER),
        _config("llama-small", SMALL_LLAMA, 2, seq=64, dtype="bfloat16", **_ADAPTER, weights="nf4-dq", checkpointing=1),
        _config("llama-small", SMALL_LLAMA, 2, seq=64, **_ANSWER, weights="int8"),
        _config("llama-small", SMALL_LLAMA, 2, seq=64, dtype="bfloat16", mode="generate", new=64),
        _vision("resnet18", 2, image=64, parallel="ddp", ranks=2),
        _config("gpt2-small", SMALL_GPT2, 2, seq=64, parallel="zero1", ranks=2),
        _config("llama-small", SMALL_LLAMA, 2, seq=64, parallel="fsdp", ranks=2),
    )


def cases_for(kind: str) -> tuple[Case, ...]:
    """Return the cases for a device of this kind ("cuda", "mps", "xpu", "cpu")."""
    return list_small_cases() if kind == "cpu" else list_cases()


def _convolutional() -> tuple[Case, ...]:
    momentum = {"optimizer": "sgd-momentum"}
    return (
        _vision("resnet18", 32),
        _vision("resnet50", 32),
        _vision("resnet50", 128),
        _vision("resnet50", 32, dtype="bfloat16"),
        _vision("resnet50", 32, dtype="amp-bfloat16"),
        _vision("resnet50", 32, dtype="amp-float16", **momentum),
        _vision("resnet50", 32, optimizer_impl="fused"),
        _vision("resnet50", 32, checkpointing=1),
        _vision("resnet50", 64, mode="inference"),
        _vision("vgg16", 32, optimizer="sgd"),
        _vision("mobilenet_v2", 64, optimizer="rmsprop"),
        _vision("efficientnet_b0", 64, dtype="amp-bfloat16"),
        _vision("convnext_tiny", 64),
        _vision("regnet_y_400mf", 64, **momentum),
        _vision("densenet121", 32),
        _vision("inception_v3", 32, image=299),
        _vision("deeplabv3_resnet50", 4, image=512),
        _vision("fcn_resnet50", 8, image=512, dtype="bfloat16", mode="inference"),
        _vision("fasterrcnn_resnet50_fpn", 2, **momentum),
        _vision("fasterrcnn_resnet50_fpn", 4, mode="inference"),
        _vision("ssdlite320_mobilenet_v3_large", 16, optimizer="sgd-momentum"),
    )


def _pictures() -> tuple[Case, ...]:
    return (
        _vision("vit_b_16", 32),
        _vision("vit_b_16", 64, dtype="amp-bfloat16"),
        _vision("vit_b_16", 64, dtype="float16", mode="inference"),
        _vision("swin_t", 32),
        _vision("swin_t", 32, dtype="amp-float16"),
    )


def _texts() -> tuple[Case, ...]:
    return (
        _preset("gpt2", 4, seq=1024),
        _preset("gpt2", 4, seq=1024, optimizer_impl="loop"),
        _preset("gpt2", 4, seq=1024, dtype="bfloat16"),
        _preset("gpt2", 4, seq=1024, dtype="bfloat16", attention="eager"),
        _preset("gpt2", 16, seq=1024, dtype="bfloat16", checkpointing=1),
        _preset("gpt2", 4, seq=1024, dtype="amp-float16"),
        _preset("bert-base-uncased", 8, seq=512),
        _preset("bert-base-uncased", 16, seq=512, dtype="amp-float16"),
        _preset("bert-base-uncased", 32, seq=512, dtype="bfloat16", mode="inference"),
        _preset("t5-base", 8, seq=512, optimizer="adafactor"),
        _preset("whisper-small", 8, dtype="amp-bfloat16"),
        _preset("wav2vec2-base-960h", 4),
    )


def _large_texts() -> tuple[Case, ...]:
    return (
        _config("llama-1b", LLAMA_1B, 2, seq=2048, dtype="bfloat16"),
        _config("llama-1b", LLAMA_1B, 2, seq=2048, dtype="amp-bfloat16"),
        _config("llama-1b", LLAMA_1B, 4, seq=2048, dtype="bfloat16", checkpointing=1, optimizer_impl="fused"),
        _config("llama-1b", LLAMA_1B, 2, seq=2048, dtype="bfloat16", optimizer="adafactor"),
        _config("llama-1b", LLAMA_1B, 4, seq=2048, dtype="bfloat16", mode="inference"),
        _config("qwen3-0.6b", QWEN3, 2, seq=2048, dtype="bfloat16"),
        _config("qwen3-moe", QWEN3_MOE, 2, seq=1024, dtype="bfloat16"),
        _config("mixtral", MIXTRAL, 2, seq=1024, dtype="bfloat16"),
    )


def _fine_tuned() -> tuple[Case, ...]:
    return (
        _config("llama-1b", LLAMA_1B, 2, seq=2048, dtype="bfloat16", **_ADAPTER),
        _config("llama-1b", LLAMA_1B, 2, seq=2048, dtype="amp-bfloat16", **_ADAPTER),
        _config("llama-1b", LLAMA_1B, 2, seq=2048, dtype="bfloat16", **_ADAPTER, adapter="dora", checkpointing=1),
        _config("llama-1b", LLAMA_1B, 2, seq=2048, dtype="bfloat16", optimizer="adamw-8bit"),
        _config("llama-1b", LLAMA_1B, 2, seq=2048, dtype="float16", **_ADAPTER, weights="int8"),
        _config("llama-1b", LLAMA_1B, 2, seq=2048, dtype="bfloat16", **_ADAPTER, weights="nf4", accumulate=4),
        _config(
            "llama-8b", LLAMA_8B, 1, seq=2048, dtype="bfloat16", **_ADAPTER, weights="nf4-dq", checkpointing=1,
            optimizer="paged-adamw-8bit",
        ),
    )  # fmt: skip


def _quantized() -> tuple[Case, ...]:
    return (
        _config("llama-1b", LLAMA_1B, 4, seq=2048, dtype="bfloat16", **_ANSWER, weights="nf4"),
        _config("llama-1b", LLAMA_1B, 4, seq=2048, dtype="float16", **_ANSWER, weights="int8"),
        _config("llama-8b", LLAMA_8B, 1, seq=2048, dtype="bfloat16", **_ANSWER, weights="nf4-dq"),
    )


def _generated() -> tuple[Case, ...]:
    return (
        _config("llama-1b", LLAMA_1B, 8, seq=512, dtype="bfloat16", mode="generate", new=256),
        _config("llama-1b", LLAMA_1B, 8, seq=512, dtype="bfloat16", mode="generate", new=256, cache="static"),
        _config("llama-1b", LLAMA_1B, 8, seq=512, dtype="bfloat16", mode="generate", new=128, cache="offloaded"),
        _config("llama-1b", LLAMA_1B, 8, seq=512, dtype="bfloat16", mode="generate", new=128, weights="nf4"),
        _config("qwen3-0.6b", QWEN3, 4, seq=2048, dtype="bfloat16", mode="generate", new=128),
    )


def _ranks() -> tuple[Case, ...]:
    return (
        _vision("resnet50", 32, parallel="ddp", ranks=2),
        _preset("gpt2", 4, seq=1024, parallel="zero1", ranks=2),
        _config("llama-1b", LLAMA_1B, 2, seq=2048, dtype="amp-bfloat16", parallel="fsdp", ranks=2),
    )


def _vision(name: str, batch: int, **keys: object) -> Case:
    return _case(name, f"torchvision:{name}", batch, keys)


def _preset(key: str, batch: int, **keys: object) -> Case:
    return _case(key, f"hf:{key}", batch, keys)


def _config(name: str, config: dict, batch: int, **keys: object) -> Case:
    return _case(name, f"config:{encode_config(json.dumps(config, sort_keys=True))}", batch, keys)


def _case(model: str, arch: str, batch: int, keys: dict[str, Any]) -> Case:
    """Return the case of a model with these keys of the query; its name lists unusual values."""
    dtype = keys.pop("dtype", "float32")
    words = [model, f"b{batch}", dtype, *(_word(key, value) for key, value in keys.items() if key not in _SIZES)]
    pairs = {"arch": arch, "dtype": dtype, "batch": batch, **keys}
    return Case(name="-".join(words), query="&".join(f"{key}={value}" for key, value in pairs.items()))


_SIZES = ("seq", "image", "new")  # one per model: not in the case's name


def _word(key: str, value: object) -> str:
    return {"checkpointing": "checkpointing", "accumulate": f"accumulate{value}"}.get(key, str(value))

"""Small models of every kind of cache that transformers has, and their generations as Sizer traces them."""

from __future__ import annotations

from torch import nn

from sizer.architecture.blueprint import Blueprint
from sizer.architecture.huggingface import huggingface_blueprint
from sizer.tracing.device import Device
from sizer.tracing.steps import Work
from sizer.tracing.trace import build

_PLAIN = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
_GROUPED = {**_PLAIN, "num_attention_heads": 8, "num_key_value_heads": 2}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {
    "LlamaForCausalLM": {"model_type": "llama", **_GROUPED},  # heads that share their keys
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 1000},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 128, **_GROUPED},  # every layer keeps a window
    "Gemma2ForCausalLM": {"model_type": "gemma2", **_GROUPED, "head_dim": 64, "sliding_window": 64},  # every second one
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", **_GROUPED, "head_dim": 64, "sliding_window": 16},
    "GptOssForCausalLM": {
        "model_type": "gpt_oss",
        **_GROUPED,
        "head_dim": 64,
        "num_local_experts": 8,
        "sliding_window": 32,
    },
    "DeepseekV3ForCausalLM": {  # latent attention
        "model_type": "deepseek_v3",
        **_PLAIN,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 64,
        "q_lora_rank": 96,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", **_GROUPED, "num_experts": 8, "moe_intermediate_size": 64},
    "T5ForConditionalGeneration": {
        "model_type": "t5",
        "vocab_size": 1000,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "BartForConditionalGeneration": {
        "model_type": "bart",
        "vocab_size": 1000,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
    },
    "FalconH1ForCausalLM": {  # attention and a state space in every layer
        "model_type": "falcon_h1",
        **_PLAIN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 16,
        "mamba_d_head": 16,
    },
    "MambaForCausalLM": {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 1000},
}
CONFIGS = {head: {**_TOKENS, **config} for head, config in _SIZES.items()}
H100 = ("cuda", (9, 0))


def generation(
    head: str, *, prompt: int = 24, attention: str = "sdpa", **changed: object
) -> tuple[Blueprint, nn.Module]:
    """The blueprint of a model that generates after a prompt, some of its config changed, and its module on meta."""
    blueprint = huggingface_blueprint(
        CONFIGS[head] | changed, name=head, head=head, sequence_length=prompt, mode="generate", attention=attention
    )
    return blueprint, build(blueprint)


def work(new: int, *, cache: str = "dynamic", dtype: str = "bfloat16") -> Work:
    """`new` tokens."""
    return Work(mode="generate", dtype=dtype, new=new, cache=cache)


def device(kind: str = "cuda") -> Device:
    """An H100, or the CPU."""
    return Device(*H100) if kind == "cuda" else Device(kind)

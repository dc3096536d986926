"""Configs of language models in shapes that people use: what the suite builds. No key here is a default of transformers."""

from __future__ import annotations

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

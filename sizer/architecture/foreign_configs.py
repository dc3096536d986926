"""Configs in other formats than transformers': params.json of Meta and Mistral, and OpenAI's and MLX's configs of Whisper.

Each format has a fixed set of keys. A config is read if it has all keys that determine the model and no key that is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LLAMA_VOCABULARY = 32_000  # size of the tokenizer of Llama 1 and 2, if params.json says -1
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # llama_models/llama3/reference_impl/model.py, apply_scaling, 0.0.46


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format: its name, allowed values of the model type, required keys, and optional keys."""

    name: str
    types: tuple[str, ...]
    needs: frozenset[str]
    takes: frozenset[str]
    read: Callable[[dict], dict | None]

    def matches(self, raw: dict) -> bool:
        """Return True if a config has this format."""
        keys = {key for key in raw if not key.startswith("_")} - {"model_type", "quantization", "dtype", "torch_dtype"}
        typed = raw.get("model_type") is None or raw["model_type"] in self.types
        numbers = all(type(raw[key]) in (int, float) for key in self.needs & keys)
        return typed and self.needs <= keys <= self.needs | self.takes and numbers


def as_transformers(raw: dict) -> tuple[dict, tuple[str, ...]]:
    """Return a config in transformers' format, and a note if it had another format; any other config unchanged."""
    for row in FORMATS:
        if row.matches(raw) and (found := row.read(raw)) is not None:
            return found, (f"This is {row.name}; it was read as a config of the type {found['model_type']}.",)
    return raw, ()


def _of_meta(raw: dict) -> dict:
    """Return the config of a params.json of Meta (llama/model.py, FeedForward.__init__, Llama 3)."""
    inner = int(2 * 4 * raw["dim"] / 3)
    inner = int((raw.get("ffn_dim_multiplier") or 1) * inner)
    inner = raw["multiple_of"] * -(-inner // raw["multiple_of"])
    vocabulary = raw.get("vocab_size", -1)
    theta = raw.get("rope_theta", 10_000.0)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": raw["dim"],
        "intermediate_size": inner,
        "num_hidden_layers": raw["n_layers"],
        "num_attention_heads": raw["n_heads"],
        "num_key_value_heads": raw.get("n_kv_heads") or raw["n_heads"],
        "vocab_size": vocabulary if vocabulary > 0 else LLAMA_VOCABULARY,
        "max_position_embeddings": raw.get("max_seq_len", 131_072 if raw.get("use_scaled_rope") else 4096),
        "rms_norm_eps": raw.get("norm_eps", 1e-5),
        "rope_parameters": {"rope_type": "default", **(_LLAMA_3_ROPE if raw.get("use_scaled_rope") else {}), "rope_theta": theta},
        "tie_word_embeddings": False,
    }


def _of_mistral(raw: dict) -> dict | None:
    """Return the config of a params.json of Mistral; None if its experts are of another kind.

    mistral_inference/args.py, TransformerArgs, 1.6.
    """
    found = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "hidden_size": raw["dim"],
        "intermediate_size": raw["hidden_dim"],
        "num_hidden_layers": raw["n_layers"],
        "num_attention_heads": raw["n_heads"],
        "num_key_value_heads": raw["n_kv_heads"],
        "head_dim": raw["head_dim"],
        "vocab_size": raw["vocab_size"],
        "max_position_embeddings": raw.get("max_position_embeddings") or raw.get("max_seq_len") or 32_768,
        "rms_norm_eps": raw["norm_eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10_000.0)},
        "sliding_window": raw.get("sliding_window"),
        "tie_word_embeddings": raw.get("tied_embeddings", False),
    }
    experts = raw.get("moe")
    if experts is None:
        return found
    if not isinstance(experts, dict) or experts.keys() != {"num_experts", "num_experts_per_tok"}:
        return None
    named = {"num_local_experts": experts["num_experts"], "num_experts_per_tok": experts["num_experts_per_tok"]}
    return {**found, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **named}


def _of_whisper(raw: dict) -> dict | None:
    """Return the config of OpenAI's sizes of Whisper (whisper/model.py, ModelDimensions); None if its two widths differ."""
    width = raw["n_audio_state"]
    if raw["n_text_state"] != width:
        return None
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": width,
        "num_mel_bins": raw["n_mels"],
        "max_source_positions": raw["n_audio_ctx"],
        "max_target_positions": raw["n_text_ctx"],
        "vocab_size": raw["n_vocab"],
        "encoder_layers": raw["n_audio_layer"],
        "encoder_attention_heads": raw["n_audio_head"],
        "encoder_ffn_dim": 4 * width,
        "decoder_layers": raw["n_text_layer"],
        "decoder_attention_heads": raw["n_text_head"],
        "decoder_ffn_dim": 4 * width,
    }


_SHARED = {"dim", "n_layers", "n_heads"}
FORMATS = (
    Format(
        name="Meta's params.json",
        types=("llama",),
        needs=frozenset({*_SHARED, "multiple_of", "norm_eps"}),
        takes=frozenset({"n_kv_heads", "vocab_size", "ffn_dim_multiplier", "rope_theta", "use_scaled_rope", "max_seq_len"}),
        read=_of_meta,
    ),
    Format(
        name="Mistral's params.json",
        types=("mistral", "mixtral", "transformer"),
        needs=frozenset({*_SHARED, "head_dim", "hidden_dim", "n_kv_heads", "norm_eps", "vocab_size"}),
        takes=frozenset(
            {"rope_theta", "sliding_window", "moe", "tied_embeddings", "max_seq_len", "max_position_embeddings"}
        ),
        read=_of_mistral,
    ),
    Format(
        name="a config of Whisper in the format of OpenAI and MLX",
        types=("whisper",),
        needs=frozenset(
            {
                *("n_mels", "n_vocab"),
                *(f"n_{part}_{size}" for part in ("audio", "text") for size in ("ctx", "state", "head", "layer")),
            }
        ),
        takes=frozenset(),
        read=_of_whisper,
    ),
)

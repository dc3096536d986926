"""Heads that draft tokens (EAGLE, EAGLE-3): published ones by their repositories, and any by its config.

The published heads have one layer. Their sizes are those of the configs that they were trained with:
sgl-project/SpecForge, configs/*.json, and Tencent/AngelSlim, compressor/speculative/train/configs/*.json, November 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from sizer.base.config_json import canonical_config, decode_config, encode_config, read_config
from sizer.base.errors import ConfigError, RefusedValueError, letters
from sizer.catalogue.presets import find_preset
from sizer.catalogue.serving import DRAFT_MODEL, DRAFTS, EAGLE, EAGLE3

PACKED = "config:"  # a draft's config.json in place of its name, packed as for arch=config:
VOCABULARY = 32_000  # draft_vocab_size of the heads that EAGLE-3's authors published
STATES = 3  # vllm/model_executor/models/llama_eagle3.py, num_aux_hidden_states, 0.33
UNREAD = ("dflash", "dspark", "peagle", "medusa")  # other kinds of heads, by words in their classes and types


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Sizes of a head; `method` is EAGLE or EAGLE3.

    `logits` is the vocabulary of its own logits, `vocabulary` that of its tokens, 0 for those of the model. It reads `states`
    hidden states of `model_hidden` elements, 0 for its own hidden size. `bias`: queries, keys and values have one. `normed`:
    queries and keys are normalized (Qwen3). `norms`: further weights of norms before its first matrix.
    """

    method: str
    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    layers: int = 1
    vocabulary: int = 0
    logits: int = VOCABULARY
    model_hidden: int = 0
    states: int = STATES
    positions: int = 0
    bias: bool = False
    normed: bool = False
    norms: int = 0
    repository: str = "HEAD"


def _row(repository: str, hidden: int, width: int, heads: int, kv_heads: int, head_size: int) -> Head:
    return Head(
        method=EAGLE3,
        hidden=hidden,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        repository=repository,
    )


_ROWS = (
    *(
        _row(repository, 4096, 14_336, 32, 8, 128)
        for repository in (
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
            "lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B",
            "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge",
            "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B",
        )
    ),
    _row("lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge", 8192, 28_672, 64, 8, 128),
    _row("lmsys/SGLang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-SpecForge", 5120, 32_768, 40, 8, 128),
    _row("lmsys/sglang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-v1", 5120, 32_768, 40, 8, 128),
    _row("lmsys/EAGLE3-gpt-oss-120b-bf16", 2880, 17_280, 64, 8, 64),
    _row("zhuyksir/EAGLE3-gpt-oss-20b-bf16", 2880, 17_280, 64, 8, 64),
    _row("lmsys/Qwen3-235B-A22B-EAGLE3", 4096, 24_576, 64, 4, 128),
    _row("lmsys/SGLang-EAGLE3-Qwen3-235B-A22B-Instruct-2507-SpecForge", 4096, 24_576, 64, 4, 128),
    _row("lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge", 2048, 12_288, 32, 4, 128),
    _row("lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge", 2048, 12_288, 32, 4, 128),
    _row("lmsys/SGLang-EAGLE3-Qwen3-Coder-480B-A35B-Instruct-SpecForge-EigenAI", 6144, 16_384, 96, 8, 128),
    _row("lmsys/SGLang-EAGLE3-Qwen3-Next-80B-A3B-Instruct-FP8-SpecForge", 2048, 16_384, 16, 2, 256),
    _row("AngelSlim/Qwen3-1.7B_eagle3", 2048, 6144, 16, 8, 128),
    _row("AngelSlim/Qwen3-4B_eagle3", 2560, 9728, 32, 8, 128),
    _row("AngelSlim/Qwen3-8B_eagle3", 4096, 12_288, 32, 8, 128),
    _row("AngelSlim/Qwen3-14B_eagle3", 5120, 17_408, 40, 8, 128),
    _row("AngelSlim/Qwen3-32B_eagle3", 5120, 25_600, 64, 8, 128),
    _row("AngelSlim/Qwen3-a3B_eagle3", 2048, 6144, 32, 4, 128),
)
HEADS: Mapping[str, Head] = {row.repository.rpartition("/")[2].lower(): row for row in _ROWS}


def find_head(name: str) -> str | None:
    """Return the key of the published head that a repository, a folder or a key names; None for another text."""
    return _by_letters().get(letters(name.strip().rstrip("/").rpartition("/")[2]))


@cache
def _by_letters() -> Mapping[str, str]:
    return {letters(key): key for key in HEADS}


def pack_draft(text: str) -> str:
    """Return the value of `speculative`, without its tokens, for a draft's config: JSON, or packed after "config:".

    Raises RefusedValueError for a text that is no config, or the config of a kind of head that is not counted.
    """
    try:
        plain = decode_config(text.removeprefix(PACKED)) if text.startswith(PACKED) else text
        packed = PACKED + encode_config(canonical_config(plain))
    except ConfigError as error:
        raise RefusedValueError(error.allowed or "a draft's config.json", error.todo or "paste it unchanged", error.what) from error
    if draft_method_of(packed) != DRAFT_MODEL:
        head_of(packed)
    return packed


def repository_of(draft: str) -> str:
    """Return the repository of a draft in a server's command; "DRAFT" or "HEAD" for one without a name."""
    if draft in HEADS:
        return HEADS[draft].repository
    if draft_method_of(draft) == DRAFT_MODEL:
        return "DRAFT" if draft.startswith(PACKED) else find_preset(draft).hub_id
    return "HEAD"


def draft_config(draft: str) -> dict[str, Any]:
    """Return the config of a draft that a request packs."""
    return read_config(decode_config(draft.removeprefix(PACKED)))


def draft_method_of(draft: str) -> str:
    """Return the method of speculative decoding that a request's `speculative` names, DRAFT_MODEL for a preset, "" without one.

    Source: vllm/config/speculative.py, and transformers_utils/configs/eagle.py, 0.33. A config with one layer is a head.
    """
    if not draft or draft in DRAFTS:
        return draft
    if not draft.startswith(PACKED):
        return HEADS[draft].method if draft in HEADS else DRAFT_MODEL
    config = draft_config(draft)
    words = _words(config)
    if "eagle3" in words or config.get("draft_vocab_size"):
        return EAGLE3
    return EAGLE if "eagle" in words or config.get("num_hidden_layers") == 1 else DRAFT_MODEL


def _words(config: Mapping[str, Any]) -> str:
    """Return the names of the classes and types of a config, in small letters."""
    return str([config.get(key) for key in ("architectures", "model_type", "speculators_model_type")]).lower()


def head_of(draft: str) -> Head | None:
    """Return the sizes of the head that a request's `speculative` names by repository or config; None for a method alone.

    Raises RefusedValueError if a config lacks a size.
    """
    if not draft.startswith(PACKED):
        return HEADS.get(draft)
    whole = draft_config(draft)
    if any(word in _words(whole) for word in UNREAD):
        raise RefusedValueError("the config of an EAGLE or EAGLE-3 head, or of a draft model", "ask for eagle3:3 without a config")
    inner = _part(whole, "transformer_layer_config") or _part(whole, "model")
    config = {**inner, **{key: value for key, value in whole.items() if value is not None and key != "model_type"}}
    model_type = str(inner.get("model_type") or whole.get("model_type"))
    eagle = _part(config, "eagle_config")
    hidden, heads = (_size(config, key) for key in ("hidden_size", "num_attention_heads"))
    ids = eagle.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    states = _size(config, "num_aux_hidden_states", len(ids) if isinstance(ids, list) and ids else STATES)
    vocabulary = _size(config, "vocab_size")
    method = draft_method_of(draft)
    model_hidden = _size(config, "target_hidden_size", hidden)
    joined = states * model_hidden
    norms = (joined if eagle.get("norm_before_fc", config.get("norm_before_fc")) else 0) + (joined if config.get("fc_norm") else 0)
    head = Head(
        method=method,
        hidden=hidden,
        width=_size(config, "intermediate_size"),
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_size=_size(config, "head_dim", hidden // heads),
        layers=_size(config, "num_hidden_layers", 1),
        vocabulary=vocabulary,
        logits=_size(config, "draft_vocab_size", vocabulary),
        model_hidden=model_hidden,
        states=states,
        positions=_size(config, "max_position_embeddings", 1),
        bias=config.get("attention_bias") is True,
        normed="qwen3" in model_type and "LlamaForCausalLMEagle3" not in str(whole.get("architectures")),
        norms=norms,
    )
    return head if eagle.get("use_aux_hidden_state", True) is not False else replace(head, states=0)


def _part(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a nested part of a config, empty if it has none."""
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def _size(config: Mapping[str, Any], key: str, otherwise: int = 0) -> int:
    """Return a size of a config, or what stands for a missing one; a size without a default must be there."""
    found = config.get(key)
    if found is None and otherwise:
        return otherwise
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 2**24:
        raise RefusedValueError(f"a draft's config with {key}", "paste its config.json unchanged")
    return found

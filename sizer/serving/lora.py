"""Slots of LoRA adapters: the tensors that vLLM adds to each linear layer before it sizes the cache.

Source: vllm/lora/model_manager.py (models.py up to 0.11), _create_lora_modules, lora/layers and punica_wrapper; vLLM 0.9 to
0.33.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import prod

from sizer.serving.architecture import ENCODER, Architecture, Weight
from sizer.serving.flags import Flags
from sizer.serving.layout import (
    REPLICATED,
    ROWS,
    VOCABULARY_PADDING,
    allocated,
    expert_sizes,
    is_down,
    is_gated,
    is_of_experts,
    is_on_stage,
    matrix_of,
    tensors,
    weights_of,
)

ITEMSIZE = 2  # vllm/config/lora.py, lora_dtype="auto": the model's dtype
HEAD_PADDING = 256  # vllm/platforms/interface.py, get_lora_vocab_padding_size, up to 0.11.2
# Leaves of linear layers that all ranks hold whole.
WHOLE = frozenset(
    (
        *("gate", "router", "shared_expert_gate", "per_layer_input_gate", "per_layer_projection"),
        *("fc1_latent_proj", "fc2_latent_proj"),
    )
)
# Parts of a checkpoint's matrix that have separate slots: of linear attention, of Mamba 2 and of short convolutions.
PARTS = {
    "linear_attn.in_proj_qkv": 3,
    "linear_attn.in_proj_qkvz": 4,
    "linear_attn.in_proj_ba": 2,
    **dict.fromkeys(("mamba.in_proj", "mixer.in_proj"), 5),
    **dict.fromkeys(("mamba.conv1d", "mixer.conv1d", "conv.in_proj"), 3),
}
# Model types with classes that name embedding and head as `embedding_modules`, in addition to `Rules.lora_vocabularies`.
VOCABULARIES = (
    *("llama", "llama4_text", "phi3", "mixtral", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "exaone4"),
    *("falcon_h1", "jamba", "lfm2", "lfm2_moe", "nemotron", "nemotron_h", "minicpm", "minicpm3", "solar", "apertus", "phimoe"),
    "ernie4_5",
)
EMBEDDINGS = ("cohere", "cohere2")  # types with classes that only name the embedding
# Model types with adapters that have one matrix for gate and up of all experts: is_3d_moe_weight of their classes.
JOINED_EXPERTS = ("gpt_oss", "qwen3_vl_moe_text", "qwen3_5_moe_text")


def lora_bytes(architecture: Architecture, flags: Flags, stage: int = 0) -> int:
    """Return the bytes that the allocator counts for the slots of one rank of a stage, 0 without adapters."""
    if not flags.loras:
        return 0
    weights = [*tensors(architecture, flags, stage)]
    return allocated(chain(weights, slots(architecture, flags, stage))) - allocated(weights)


def slots(architecture: Architecture, flags: Flags, stage: int = 0) -> Iterator[int]:
    """Yield the bytes of each tensor that is made for adapters on one rank of a stage.

    Encoders have none: they would need enable_tower_connector_lora.
    """
    tokens, requests = flags.max_num_batched_tokens, flags.max_num_seqs
    yield from (8 * tokens,) * 4 + (8 * requests,) * 3  # punica_wrapper/punica_base.py: indices of tokens and requests
    yield from (4 * tokens,) * 4  # ops/triton_ops/lora_kernel_metadata.py
    each = flags.loras * ITEMSIZE
    yield from (each * elements for elements in _vocabulary(architecture, flags, stage))
    yield from _rows(architecture, flags, stage)
    layers: dict[str, list[tuple[int, int]]] = {}
    for weight in weights_of(architecture, flags, stage):
        if not ENCODER.search(weight.name):
            for name, first, second in _pairs(weight, architecture, flags):
                layers.setdefault(name, []).append((first, second))
    for pairs in layers.values():  # for each layer, all matrices A, then all matrices B
        yield from (each * first for first, _ in pairs)
        yield from (each * second for _, second in pairs)


def _pairs(weight: Weight, architecture: Architecture, flags: Flags) -> Iterator[tuple[str, int, int]]:
    """Yield the name of a layer, and the elements of A and of B for one adapter of a matrix of the checkpoint that is part of it.

    Only one of the two is split among ranks unless adapters are fully sharded.
    """
    names, rank = weight.name.split("."), flags.lora_rank
    if is_of_experts(weight) and flags.rules.lora_experts:
        yield from _experts(weight, architecture, flags)
    if is_of_experts(weight) or names[-1] != "weight" or len(names) < 2 or weight.name.endswith("mixer.gate.weight"):
        return  # vLLM leaves the router of Nemotron out
    leaf, parts = names[-2], PARTS.get(".".join(names[-3:-1]), 1)
    matrix = matrix_of(weight, architecture, flags)
    if leaf in ("conv1d", "per_layer_model_projection"):  # these too are ColumnParallelLinear
        first, second = rank * weight.shape[-1], -(-weight.shape[0] // flags.tp) * rank
    elif leaf in WHOLE or ".router." in weight.name:
        first, second = rank * weight.shape[-1], weight.shape[0] * rank
    elif matrix is not None:
        sharded = flags.lora_sharded and leaf not in REPLICATED
        columns = sharded and leaf not in ROWS
        first = (-(-rank // flags.tp) if columns else rank) * matrix.inputs
        second = (-(-matrix.outputs // flags.tp) if sharded and not columns else matrix.outputs) * rank
    else:
        return
    name = weight.name if matrix is None else matrix.name
    yield from ((name, first, second // parts) for _ in range(parts))


def _experts(weight: Weight, architecture: Architecture, flags: Flags) -> Iterator[tuple[str, int, int]]:
    """Yield the same as `_pairs`, for a matrix of all experts: [experts, outputs, inputs].

    Source: vllm/lora/layers/fused_moe.py, FusedMoEWithLoRA and FusedMoE3DWithLoRA; 0.11.1 and 0.33.
    """
    here, width, hidden = expert_sizes(weight, architecture, flags)
    rank, sharded = flags.lora_rank, flags.tp if flags.lora_sharded else 1
    name = weight.name.rpartition(".")[0]
    if is_down(weight):
        yield name, here * rank * width, here * -(-hidden // sharded) * rank
        return
    gated = is_gated(weight)
    joined = architecture.model_type in JOINED_EXPERTS and flags.rules.lora_joined_experts
    for _ in range(2 if gated and not joined else 1):
        yield name, here * -(-rank // sharded) * hidden, here * (2 if gated and joined else 1) * width * rank


def _vocabulary(architecture: Architecture, flags: Flags, stage: int) -> Iterator[int]:
    """Yield the elements for one adapter of the embedding and of the logits, which no rank splits.

    Source: vllm/lora/layers/vocab_parallel_embedding.py and logits_processor.py, and `embedding_modules` of the model's class.
    """
    kind, more = architecture.model_type, flags.rules.lora_vocabulary
    head = _has_head(architecture, flags)
    if not head and kind not in EMBEDDINGS:
        return
    rows, hidden, rank = architecture.vocabulary, architecture.hidden, flags.lora_rank
    tied = not any(weight.name.endswith("lm_head.weight") for weight in architecture.weights)
    if stage == 0:
        # Up to 0.27, Qwen3's tied head is the embedding module itself, is wrapped a second time and gets a second set of slots.
        twice = tied and kind.startswith("qwen3") and flags.rules.lora_tied_twice and flags.pp == 1
        for _ in range(2 if twice else 1):
            yield (rows + more) * rank
            yield hidden * rank
            if more:
                yield more * hidden
    if head and stage == flags.pp - 1:
        yield rank * hidden
        yield (_padded(rows + more, HEAD_PADDING) if more else rows) * rank
        if more:
            yield more * hidden


def _rows(architecture: Architecture, flags: Flags, stage: int) -> Iterator[int]:
    """Yield the bytes of a map of gathered logits to tokens, and of rows for tokens that adapters may add.

    Source: vllm/lora/layers/logits_processor.py, and model_executor/models/llama.py, lora_vocab and unpadded_vocab_size, up to
    0.11.2.
    """
    if not _has_head(architecture, flags):
        return
    if flags.tp > 1 and stage == flags.pp - 1:
        yield 8 * _padded(architecture.vocabulary, VOCABULARY_PADDING)
    if not flags.rules.lora_vocabulary:
        return
    for weight in architecture.weights:
        head = weight.name.endswith("lm_head.weight")
        if not (head or weight.name.endswith("embed_tokens.weight")) or not is_on_stage(weight.name, architecture, flags, stage):
            continue
        rows, padding = weight.shape[0], HEAD_PADDING if head else VOCABULARY_PADDING
        added = flags.rules.lora_vocabulary * (1 if head else flags.loras)
        padded = _padded(_padded(rows, padding) + added, padding) - _padded(rows, VOCABULARY_PADDING)
        yield -(-padded // flags.tp) * prod(weight.shape[1:]) * weight.itemsize


def _has_head(architecture: Architecture, flags: Flags) -> bool:
    """Return whether embedding and logits of a model have slots."""
    return architecture.model_type in (*VOCABULARIES, *flags.rules.lora_vocabularies.split(", "))


def _padded(rows: int, padding: int) -> int:
    return -(-rows // padding) * padding

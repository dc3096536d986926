"""Speculative decoding: the weights and layers of a draft, and what it allocates in vLLM's profile run.

Source: vllm/config/speculative.py, v1/spec_decode/eagle.py (llm_base_proposer.py from 0.22 on), v1/worker/gpu/spec_decode,
model_executor/models/llama_eagle.py, llama_eagle3.py, deepseek_mtp.py, glm4_moe_mtp.py and qwen3_5_mtp.py; vLLM 0.9 to 0.33.

*Known limitations*: a head without a known config is taken to be a layer of Llama with the model's sizes, as published heads of
dense models are. Heads with attention of DeepSeek's kind (MLA) are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from sizer.base.errors import Refusal, RequestError
from sizer.catalogue.heads import VOCABULARY, Head, head_of
from sizer.catalogue.serving import DRAFT_MODEL, EAGLE3, MTP, NGRAM, format_release
from sizer.serving.architecture import ENCODER, FULL, LAYER, Architecture, Layer, Weight
from sizer.serving.flags import Flags
from sizer.serving.layout import allocated, is_vocabulary, tensors

DRAFT_MODELS = (0, 15, 0)  # the first release with draft models; 0.9 to 0.14 refuse them
# Types of models by the matrix that joins embedding and hidden state in their layers for multi-token prediction: eh_proj or fc.
PROJECTED = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
JOINED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
ITEMSIZE = 2


def with_draft(architecture: Architecture, flags: Flags, model: Architecture | None = None) -> Architecture:
    """Return a model with the draft of its speculative decoding.

    Args:
        architecture: The model.
        flags: The server's flags, which name the method.
        model: The draft model, if the flags name one.

    Raises:
        RequestError: This model or version does not take the draft.
    """
    method = flags.draft_method
    if method in ("", NGRAM):
        return architecture
    if method == DRAFT_MODEL:
        if model is None:
            raise ValueError(flags.draft)
        _check_model(architecture, flags, model)
        if _tables(model) == _tables(architecture):
            model = replace(model, rotary_rows=(), rotary_widths=())
        return replace(architecture, draft=replace(model, name=flags.draft))
    if method == MTP:
        return replace(architecture, draft=_predictor(architecture, flags))
    return replace(architecture, draft=_head(architecture, flags))


def _check_model(architecture: Architecture, flags: Flags, model: Architecture) -> None:
    """Raise RequestError for a draft model that vLLM refuses (verify_equal_vocab_size_if_draft_model, 0.33)."""
    given = f"{flags.draft} with {flags.vocabulary:,} tokens of vocabulary in {architecture.name}"
    if flags.release < DRAFT_MODELS:
        allowed = f"ngram, mtp, eagle or eagle3 before {format_release(DRAFT_MODELS)}"
        raise _refused(f"{flags.draft} with engine_version={format_release(flags.release)}", allowed, "ask for a later version")
    if model.vocabulary != architecture.vocabulary:
        allowed = f"a draft model with the same vocabulary; this one has {model.vocabulary:,} tokens"
        raise _refused(given, allowed, "choose a smaller model of the same family")
    if model.is_compressed or model.heads % flags.tp:
        raise _refused(f"{flags.draft} with tp={flags.tp}", f"a tp that divides its {model.heads} heads", "ask for a smaller tp")


def _tables(architecture: Architecture) -> tuple[object, ...]:
    """Return the sizes of the tables of rotations; equal tables are made once (rotary_embedding/__init__.py, _ROPE_DICT)."""
    return architecture.rotary, architecture.rotary_rows, architecture.rotary_widths, architecture.rotary_itemsize


def _predictor(architecture: Architecture, flags: Flags) -> Architecture:
    """Return the checkpoint's own layers for multi-token prediction; they share the model's embedding."""
    kind = architecture.model_type
    if kind not in (*PROJECTED, *JOINED) or not architecture.mtp_layers:
        allowed = f"a checkpoint with layers for multi-token prediction, of type {', '.join((*PROJECTED, *JOINED))}"
        raise _refused(f"mtp with {architecture.name} of type {kind}", allowed, "ask for eagle3, ngram or a draft model")
    if flags.draft_tokens > (each := architecture.mtp_layers) and flags.draft_tokens % each:
        raise _refused(f"mtp:{flags.draft_tokens}", f"a multiple of the checkpoint's {each} layers", f"ask for mtp:{each}")
    numbers = [number for number, layer in enumerate(architecture.layers) if layer.elements]
    own, hidden = numbers[-1], architecture.hidden
    weights = []
    for number in range(len(architecture.layers), len(architecture.layers) + each):
        prefix = f"mtp.layers.{number}"
        for weight in architecture.weights:
            found = None if ENCODER.search(weight.name) else LAYER.search(weight.name)
            if found is not None and int(found[1]) == own:
                weights.append(replace(weight, name=f"{prefix}.{weight.name[found.end() :]}"))
        if kind in PROJECTED:
            weights.append(_weight(f"{prefix}.eh_proj.weight", hidden, 2 * hidden))
            weights += [_weight(f"{prefix}.{name}.weight", hidden) for name in ("enorm", "hnorm", "shared_head.norm")]
            if not flags.rules.shared_head:
                weights.append(_weight(f"{prefix}.shared_head.lm_head.weight", architecture.vocabulary, hidden))
    if kind in JOINED:
        weights.append(_weight("mtp.fc.weight", -(-hidden // flags.tp), 2 * hidden))
        weights += [_weight(f"mtp.{name}.weight", hidden) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")]
    return _part(architecture, weights, (architecture.layers[own],) * each)


def _head(architecture: Architecture, flags: Flags) -> Architecture:
    """Return an EAGLE head with its own sizes, else one layer of Llama with those of the model.

    The head of EAGLE-3 has logits of its own vocabulary. A head of another hidden size has its own embedding (_should_share and
    _maybe_share_embeddings, 0.33).
    """
    head = head_of(flags.draft)
    if head is None:
        if architecture.latent is not None or architecture.is_compressed:
            given = f"{flags.draft} with {architecture.name}"
            raise _refused(given, "a model whose layers keep keys and values of heads", "ask for mtp, ngram or a draft model")
        head = _usual_head(architecture, flags)
    _check_head(architecture, flags, head)
    third, hidden = head.method == EAGLE3, head.hidden
    queries, keys = (heads * head.head_size for heads in (head.heads, head.kv_heads))
    weights: list[Weight] = []
    for number in range(head.layers):
        prefix = f"model.layers.{len(architecture.layers) + number}"
        inputs = 2 * hidden if third and not number else hidden  # of EAGLE-3: embedding and hidden state beside each other
        parts = [*zip("qkv", (queries, keys, keys), strict=True)]
        weights += [
            *(_weight(f"{prefix}.self_attn.{name}_proj.weight", size, inputs) for name, size in parts),
            _weight(f"{prefix}.self_attn.o_proj.weight", hidden, queries),
            *(_weight(f"{prefix}.mlp.{name}_proj.weight", head.width, hidden) for name in ("gate", "up")),
            _weight(f"{prefix}.mlp.down_proj.weight", hidden, head.width),
            _weight(f"{prefix}.post_attention_layernorm.weight", hidden),
        ]
        weights += [_weight(f"{prefix}.self_attn.{name}_proj.bias", size) for name, size in parts if head.bias]
        weights += [_weight(f"{prefix}.self_attn.{name}_norm.weight", head.head_size) for name in "qk" if head.normed]
        norms = ("input_layernorm", "hidden_norm") if third else ("input_layernorm",) if number else ()
        weights += [_weight(f"{prefix}.{name}.weight", hidden) for name in norms]
    read = (head.model_hidden or hidden) * head.states if third else 2 * hidden
    if read:
        weights.append(_weight("model.fc.weight", hidden, read))
    weights += [_weight("model.fc_norm.weight", head.norms)] if third and head.norms else []
    if hidden != architecture.hidden:
        weights.append(_weight("model.embed_tokens.weight", head.vocabulary or architecture.vocabulary, hidden))
    logits = min(head.logits, architecture.vocabulary) if third else architecture.vocabulary
    if third:
        weights += [_weight("model.norm.weight", hidden), _weight("lm_head.weight", logits, hidden)]
        weights.append(Weight(name="draft_id_to_target_id", shape=(logits,), itemsize=8))
    layer = Layer(kind=FULL, elements=2 * keys, kv_heads=head.kv_heads)
    draft = replace(
        architecture,
        name=head.repository,
        hidden=hidden,
        vocabulary=logits,
        heads=head.heads,
        kv_heads=head.kv_heads,
        head_size=head.head_size,
        intermediate=head.width,
        experts=0,
        latent=None,
        quantization=None,
        expert_quantization=None,
    )
    draft = _part(draft, weights, (layer,) * head.layers)
    rows = (max(flags.max_model_len, head.positions),)
    return replace(
        draft,
        model_type="llama",
        rotary=head.head_size,
        rotary_itemsize=2,
        rotary_rows=rows,
        states_read=head.states if third else 0,
    )


def _usual_head(architecture: Architecture, flags: Flags) -> Head:
    """Return the sizes of a head that nothing else is known of: those of the model."""
    return Head(
        method=flags.draft_method,
        hidden=architecture.hidden,
        width=architecture.intermediate,
        heads=architecture.heads,
        kv_heads=architecture.kv_heads,
        head_size=architecture.head_size,
        logits=VOCABULARY,
    )


def _check_head(architecture: Architecture, flags: Flags, head: Head) -> None:
    """Raise RequestError for a head that was made for another model, or whose heads the ranks do not divide."""
    if (head.model_hidden or head.hidden) != architecture.hidden:
        given = f"a head for hidden states of {head.model_hidden or head.hidden:,} elements with {architecture.name}"
        raise _refused(given, f"a head for {architecture.hidden:,}", "name the head that was trained for this model")
    if head.heads % flags.tp:
        raise _refused(f"{head.repository} with tp={flags.tp}", f"a tp that divides its {head.heads} heads", "ask for a smaller tp")


def _part(architecture: Architecture, weights: list[Weight], layers: tuple[Layer, ...]) -> Architecture:
    """Return an architecture with the weights and layers of a draft alone."""
    return replace(
        architecture,
        weights=tuple(weights),
        layers=layers,
        rotary_rows=(),
        rotary_widths=(),
        step_buffers=(),
        idle_weights=(),
        lent=(),
        encoder=None,
        tower=None,
        vision=None,
        deepstack=0,
    )


def _weight(name: str, *shape: int) -> Weight:
    return Weight(name=name, shape=shape, itemsize=ITEMSIZE)


def draft_bytes(architecture: Architecture, flags: Flags, stage: int = 0) -> int:
    """Return the bytes that the allocator counts for a draft's weights on one rank; the last stage of a pipeline has them."""
    draft = architecture.draft
    if draft is None or stage != flags.pp - 1:
        return 0
    weights = [*tensors(architecture, flags, stage)]
    return allocated(chain(weights, _tensors(draft, flags))) - allocated(weights)


def unshared_bytes(architecture: Architecture, flags: Flags) -> int:
    """Return the bytes of a draft's weights before it shares the model's embedding and head, as SGLang sizes its pool.

    The draft model of a preset shares neither. Source: managers/scheduler.py, init_model_worker, and alloc_memory_pool in
    speculative/eagle_worker_v2.py, of SGLang 0.5.14 and 0.5.23.
    """
    draft = architecture.draft
    if draft is None:
        return 0
    tables = [
        weight
        for weight in architecture.weights
        if is_vocabulary(weight, architecture) and not (weight.name.endswith("per_layer.weight") or ENCODER.search(weight.name))
    ]
    names = [weight.name for weight in draft.weights]
    own = [part for part in ("lm_head", "embed_tokens") if any(part in name for name in names)]
    copies = [weight for weight in tables if not any(part in weight.name for part in own)]
    copies = copies if flags.draft_method != DRAFT_MODEL else []
    weights = [*tensors(architecture, flags)]
    more = [*tensors(replace(_part(architecture, copies, ()), latent=None), flags), *_tensors(draft, flags)]
    return allocated(chain(weights, more)) - allocated(weights)


def _tensors(draft: Architecture, flags: Flags) -> Iterator[int]:
    """Yield the bytes of each tensor of a draft. Only layers for multi-token prediction follow --quantization."""
    own = flags if flags.draft == MTP else replace(flags, layout=draft.quantization, experts=draft.expert_quantization)
    yield from tensors(draft, replace(own, pp=1))


def buffer_bytes(architecture: Architecture, flags: Flags, stage: int = 0) -> int:
    """Return the bytes of the hidden states and embeddings of a step that a draft keeps, if they reduce the cache.

    They exist before the weights are loaded. Source: llm_base_proposer.py, target_dependent_ar/speculator.py; vLLM 0.27 and 0.33.
    """
    draft = architecture.draft
    if draft is None or stage != flags.pp - 1 or not flags.rules.draft_buffers:
        return 0
    count = 2  # hidden states and embeddings
    if flags.second_runner:
        count = 0 if flags.draft_method == DRAFT_MODEL else 1 + (architecture.encoder is not None)
    return count * flags.max_num_batched_tokens * draft.hidden * ITEMSIZE


def drafting_bytes(architecture: Architecture, flags: Flags, layer_bytes: int) -> tuple[int, int]:
    """Return the bytes of hidden states that a draft has the model keep, and the peak while the draft itself runs.

    EAGLE-3 keeps the hidden states of three layers, or of those that its config names. The second model runner joins them while
    all are still there. A draft then reads embeddings and hidden states, next to each other, and runs `layer_bytes` of a layer.
    """
    draft = architecture.draft
    if draft is None:
        return 0, 0
    row = flags.max_num_batched_tokens * ITEMSIZE
    states = draft.states_read * row * architecture.hidden
    held, own = row * architecture.hidden + states, row * draft.hidden
    running = layer_bytes + own if flags.draft_method == DRAFT_MODEL else max(5 * own, layer_bytes + 2 * own)
    if not (states and flags.second_runner):
        return states, held + running
    return states, held + own + max(states, running)


def draft_layers(architecture: Architecture, flags: Flags, stage: int) -> tuple[Layer, ...]:
    """Return the layers of a draft whose caches are on a stage: the last one has them all."""
    return () if architecture.draft is None or stage != flags.pp - 1 else architecture.draft.layers


def _refused(given: str, allowed: str, todo: str) -> RequestError:
    return RequestError(refusals=[Refusal(key="speculative", given=given, allowed=allowed, todo=todo)])

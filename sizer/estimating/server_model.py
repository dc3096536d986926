"""A language model on meta from a server's view: the tensors of its checkpoint and the bytes of a request in each layer.

The names of parameters are transformers'. Values missing in a config are read from the shapes of its parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isqrt, prod
from typing import Any

from torch import nn

from sizer.base.errors import RequestError
from sizer.serving.architecture import (
    CHUNKED,
    COMPRESSED,
    CROSS,
    FULL,
    SLIDING,
    STATE,
    Architecture,
    Layer,
    Tower,
    Weight,
)

_LAYER = re.compile(r"^(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.(.+)$")
_ENCODER = re.compile(r"(?:^|\.)(visual|vision|audio|image)|(?:^|\.)encoder\.")
_GROUPED = re.compile(r"\.(?:experts)\.")
# Parameters of DeepSeek V4 in float32; vllm/models/deepseek_v4/nvidia/model.py and compressor.py, 0.33.
_IN_FLOAT = re.compile(r"\.(?:attn_hc|ffn_hc|hc_head)\.|\.compressor\..*position_bias$")
SERVED_ITEMSIZE = 2  # vllm/config/model.py, dtype="auto": float32 checkpoints are served in a 16-bit dtype
POOLERS = ("bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta-v2", "modernbert", "mpnet")
VIDEO_TOKENS = 32 * (70 + 2 + 6)  # of Gemma 4; vllm/model_executor/models/gemma4_mm.py, get_mm_max_tokens_per_item, 0.22 and 0.33
EXPERT_DTYPES = {"fp4"}  # of DeepSeek V4: experts in MXFP4 next to other matrices in FP8
IMAGE_ROPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")  # model types with sections for images in their rotations
ENCODER_DECODERS = ("t5", "bart", "mt5", "umt5", "mbart", "pegasus", "marian")
_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def read_architecture(module: nn.Module, name: str, checkpoint: Mapping[str, Any]) -> Architecture:
    """Return the facts of a module that a server's plan depends on.

    Args:
        module: A language model of transformers on meta, unquantized.
        name: The name of the model.
        checkpoint: The checkpoint's config.json, which may name a quantization.

    Raises:
        RequestError: The model has no KV cache.
    """
    config = module.config
    text = config.get_text_config(decoder=True)
    facts = {**_own(checkpoint), **_facts(text)}
    model_type = str(facts.get("model_type") or config.model_type)
    _check_decoder(str(config.model_type), model_type, facts)
    weights = tuple(_weights(module))
    heads = _first(facts, "num_attention_heads", "n_head", "num_heads", "decoder_attention_heads") or 1
    hidden = _first(facts, "hidden_size", "n_embd", "d_model")
    kv_heads = _first(facts, "num_key_value_heads", "num_kv_heads") or heads
    if facts.get("multi_query") and not facts.get("new_decoder_architecture"):
        kv_heads = 1
    head = int(facts.get("head_dim") or hidden // heads)
    experts = _first(facts, "num_experts", "num_local_experts", "n_routed_experts")
    width = _first(facts, "moe_intermediate_size", "intermediate_size", "n_inner") or 4 * hidden
    latent = None
    if facts.get("kv_lora_rank"):
        latent = (int(facts["kv_lora_rank"]), int(facts["qk_nope_head_dim"]), int(facts["v_head_dim"]))
    ropes = facts.get("rope_parameters") or {}
    positions = _first(facts, "max_position_embeddings", "n_positions", "max_target_positions", "seq_length")
    encoder = next((found[1] for weight in weights if (found := _ENCODER.search(weight.name)) and found[1]), None)
    layers = tuple(_layers(weights, facts, kv_heads, head, heads))
    lent = _lent(layers, facts)
    whole_items = config.model_type in ("gemma4", "gemma4_unified") and facts.get("use_bidirectional_attention") == "vision"
    widths = tuple(_rotary_widths(ropes, weights, facts, head))
    if not any(layer.elements or layer.state_elements or layer.conv_elements for layer in layers):
        raise _no_cache(model_type)
    return Architecture(
        name=name,
        model_type=model_type,
        hidden=hidden,
        vocabulary=int(facts.get("vocab_size") or 0),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head,
        intermediate=_first(facts, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden,
        positions=positions,
        rotary=_rotary(facts, ropes, head),
        rotary_rows=tuple(_rotary_rows(ropes, positions, of_images=model_type.startswith(IMAGE_ROPES))),
        weights=weights,
        layers=layers,
        experts=experts,
        experts_per_token=_first(facts, "num_experts_per_tok", "experts_per_token", "top_k_experts") or (2 if experts else 0),
        expert_width=width,
        state_itemsize=_state_itemsize(facts, model_type),
        latent=latent,
        encoder=encoder,
        encoder_tokens=int(facts.get("max_source_positions") or 0),
        vision=_vision(config),
        tower=(tower := read_tower(config, hidden)),
        deepstack=_deepstack(config),
        idle_weights=tuple(_idle_weights(weights, facts)),
        rotary_widths=widths,
        rotary_itemsize=4 if "compress_rates" in facts else SERVED_ITEMSIZE,
        step_buffers=tuple(_step_buffers(config, facts, hidden)),
        file_elements=_file_elements(module, ropes, _rotary(facts, ropes, head), max(widths, default=0)),
        uncounted=_uncounted(facts, None if tower is not None else encoder),
        lent=lent,
        mtp_layers=_mtp_layers(facts),
        item_tokens=VIDEO_TOKENS if whole_items else 0,
        **_quantization(checkpoint),
    )


# Pixels of the largest image by the processors' own configs, `max_pixels` or the square of `longest_edge`'s root.
LARGEST_PIXELS = {
    "qwen2_vl": 12_845_056,
    "qwen2_5_vl": 12_845_056,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), 16_777_216),
}


# Types of models whose images have one size, and of encoders without rotations and gates.
SQUARE, PLAIN_TOWERS = ("gemma3", "llava"), ("siglip_vision_model", "clip_vision_model")


def read_tower(config: Any, hidden: int) -> Tower | None:
    """Return the image encoder of a model; None for a model without an implementation of vLLM's dummy run here.

    Source: vllm/model_executor/models/qwen2_vl.py, get_image_size_with_most_features, and preprocessor_config.json of the
    models.
    """
    vision, pixels = getattr(config, "vision_config", None), LARGEST_PIXELS.get(str(config.model_type))
    other = OTHER_TOWERS.get(str(config.model_type))
    if other is not None and (found := other(config, hidden)) is not None:
        return found
    if str(config.model_type) in SQUARE and getattr(vision, "model_type", "") in PLAIN_TOWERS:
        return _read_square(config, vision, hidden)
    if vision is None or pixels is None:
        return None
    merge = int(vision.spatial_merge_size)
    side = int(vision.patch_size) * merge
    tokens = (isqrt(pixels) // side) ** 2
    own = int(getattr(vision, "embed_dim", 0) or vision.hidden_size)
    patch = int(vision.in_channels) * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
    return Tower(
        tokens=tokens,
        patches=tokens * merge**2,
        patch_elements=patch,
        hidden=own,
        width=int(getattr(vision, "intermediate_size", 0) or own * vision.mlp_ratio),
        gated=config.model_type == "qwen2_5_vl",
        interpolates=hasattr(vision, "num_position_embeddings"),
        outputs=hidden * (1 + _deepstack(config)),
    )


def _read_square(config: Any, vision: Any, hidden: int) -> Tower:
    """Return an encoder of SigLIP or CLIP, whose processor makes each image a square of one size.

    The encoder of CLIP has one row more than patches, for the class.

    Source: vllm/model_executor/models/gemma3_mm.py, llava.py, siglip.py and clip.py, 0.33.
    """
    patches = (int(vision.image_size) // int(vision.patch_size)) ** 2
    return Tower(
        tokens=int(getattr(config, "mm_tokens_per_image", 0) or patches),
        patches=patches + (vision.model_type == "clip_vision_model"),
        patch_elements=int(vision.num_channels) * int(vision.patch_size) ** 2,
        hidden=int(vision.hidden_size),
        width=int(vision.intermediate_size),
        outputs=hidden,
        rotates=False,
        held=1,
    )


def _read_pixtral(config: Any, hidden: int) -> Tower | None:
    """Return Pixtral's encoder, with the largest square image. Repositories of Mistral have the same sizes in params.json.

    Source: vllm/model_executor/models/pixtral.py, VisionTransformer and PixtralHFVisionModel, and mistral3.py, 0.33.
    """
    vision = config.vision_config
    if vision.model_type != "pixtral":
        return None
    merge, size = int(getattr(config, "spatial_merge_size", 1)), int(vision.patch_size)
    side = int(vision.image_size) // (size * merge)
    return Tower(
        tokens=side**2,
        patches=(side * merge) ** 2,
        patch_elements=int(vision.num_channels) * size**2,
        hidden=int(vision.hidden_size),
        width=int(vision.intermediate_size),
        gated=True,
        outputs=hidden,
        as_floats=True,
        held=2,
        keeps=True,
    )


LLAMA_TILES = 17  # transformers' image_processing_llama4.py, max_patches, and the whole image
SMOL_TILES = 17  # image_processing_smolvlm.py: the longest edge is 4 tiles; and the whole image


def _read_llama4(config: Any, hidden: int) -> Tower:
    """Return the encoder of Llama 4, whose images are tiles with a row for the class.

    Source: vllm/model_executor/models/mllama4.py, Llama4VisionModel, 0.33.
    """
    vision = config.vision_config
    patches = (int(vision.image_size) // int(vision.patch_size)) ** 2
    return Tower(
        tokens=LLAMA_TILES * round(patches * float(vision.pixel_shuffle_ratio) ** 2),
        patches=LLAMA_TILES * (patches + 1),
        patch_elements=int(vision.num_channels) * int(vision.patch_size) ** 2,
        hidden=int(vision.hidden_size),
        width=int(vision.intermediate_size),
        outputs=hidden,
        as_floats=True,
        held=1,
    )


def _read_smolvlm(config: Any, hidden: int) -> Tower:
    """Return the encoder of SmolVLM and Idefics 3, which holds tiles and their patches.

    Source: vllm/model_executor/models/idefics2_vision_model.py, Idefics2VisionTransformer, 0.33.
    """
    vision = config.vision_config
    patches = (int(vision.image_size) // int(vision.patch_size)) ** 2
    return Tower(
        tokens=SMOL_TILES * patches // int(config.scale_factor) ** 2,
        patches=SMOL_TILES * patches,
        patch_elements=2 * int(vision.num_channels) * int(vision.patch_size) ** 2,
        hidden=int(vision.hidden_size),
        width=int(vision.intermediate_size),
        outputs=hidden,
        rotates=False,
        held=1,
    )


def _read_voxtral(config: Any, hidden: int) -> Tower:
    """Return Voxtral's encoder of sound, with pieces of 30 seconds; four of its rows are a token, two frames of sound a row.

    Source: vllm/model_executor/models/voxtral.py, VoxtralEncoderModel, and whisper.py, WhisperEncoder, 0.33.
    """
    audio = config.audio_config
    rows = int(audio.max_source_positions)
    return Tower(
        tokens=rows // 4,
        patches=rows,
        patch_elements=2 * int(audio.num_mel_bins),
        hidden=int(audio.hidden_size),
        width=int(audio.intermediate_size),
        outputs=hidden,
        rotates=False,
        held=1,
        sound=True,
    )


OTHER_TOWERS = {
    **dict.fromkeys(("mistral3", "llava"), _read_pixtral),
    "llama4": _read_llama4,
    **dict.fromkeys(("smolvlm", "idefics3"), _read_smolvlm),
    "voxtral": _read_voxtral,
}


def _deepstack(config: Any) -> int:
    """Return the number of decoder layers with separate image features (Qwen3-VL)."""
    return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def _vision(config: Any) -> tuple[int, int] | None:
    """Return the layers and the hidden size of a config's vision part, with SGLang's defaults for missing ones.

    Names are those of the installed transformers, with classes that map `depth` and similar names.
    Source: sglang/srt/server_args.py, adjust_mem_fraction_for_vlm, 0.5.12.
    """
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None
    return int(getattr(vision, "num_hidden_layers", 24)), int(getattr(vision, "hidden_size", 1024))


def _own(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a checkpoint's text config; transformers' class may not know all of them."""
    nested = checkpoint.get("text_config")
    return {**checkpoint, **(nested if isinstance(nested, Mapping) else {})}


def _facts(text: Any) -> dict[str, Any]:
    """Return a text config as a dict, with the attributes that its class computes.

    An attribute with a different value for each layer is left out.
    """
    found = dict(text.to_dict())
    for key in _READ:
        try:
            found[key] = getattr(text, key)
        except (AttributeError, RuntimeError):  # not there, or one for each layer: Gemma 4's head_dim
            continue
    return found


_READ = ("layer_types", "head_dim", "rope_parameters", "max_position_embeddings", "sliding_window", "layers_block_type")


def _check_decoder(whole: str, model_type: str, facts: Mapping[str, Any]) -> None:
    if not facts.get("vocab_size") or whole in POOLERS or model_type in POOLERS or model_type in ENCODER_DECODERS:
        raise _no_cache(model_type)


def _no_cache(model_type: str) -> RequestError:
    return RequestError(
        "mode",
        given=f"'serve' with a model of type {model_type}",
        allowed="serve with a decoder, which keeps keys and values of a request",
        todo="ask for mode=inference",
    )


def _weights(module: nn.Module) -> list[Weight]:
    return [
        Weight(name=name, shape=tuple(tensor.shape), itemsize=4 if _IN_FLOAT.search(name) else SERVED_ITEMSIZE)
        for name, tensor in module.named_parameters()
    ]


def _idle_weights(weights: tuple[Weight, ...], facts: Mapping[str, Any]) -> Iterator[Weight]:
    """Yield the matrices that vLLM makes in addition to a checkpoint's.

    They are keys and values of layers that use the cache of other layers, and values of layers that use their keys as values.
    Source: vllm/model_executor/models/gemma3n.py and gemma4.py, QKVParallelLinear of each layer, and logs of Gemma 4 in
    docs/serving.md.
    """
    if facts.get("attention_k_eq_v"):
        names = {weight.name for weight in weights}
        for weight in weights:
            values = weight.name.replace(".self_attn.k_proj.", ".self_attn.v_proj.")
            if values not in names and not _ENCODER.search(weight.name):
                yield Weight(name=values, shape=weight.shape, itemsize=weight.itemsize)
    shared, kinds = int(facts.get("num_kv_shared_layers") or 0), list(facts.get("layer_types") or ())
    if not shared:
        return
    named: dict[tuple[str, int], Weight] = {}
    for weight in weights:
        found = _LAYER.match(weight.name)
        if found and not _ENCODER.search(weight.name) and found[2] in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            named[found[2], int(found[1])] = weight
    own = len(kinds) - shared
    for number in range(own, len(kinds)):
        before = max((one for one in range(own) if kinds[one] == kinds[number]), default=None)
        for leaf in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            if before is not None and (leaf, number) not in named and (model := named.get((leaf, before))) is not None:
                yield Weight(name=model.name.replace(f".{before}.", f".{number}."), shape=model.shape, itemsize=model.itemsize)


def _step_buffers(config: Any, facts: Mapping[str, Any], hidden: int) -> Iterator[int]:
    """Yield the elements for each token of a step of the buffers that are made with a model.

    Source: vllm/model_executor/models/qwen3_vl.py, deepstack_input_embeds, and gemma3n_mm.py and gemma4_mm.py,
    per_layer_embeddings; vLLM 0.11 and 0.33.
    """
    yield from (hidden,) * _deepstack(config)
    if each := int(facts.get("hidden_size_per_layer_input") or 0):
        yield int(facts["num_hidden_layers"]) * each


def _rotary_widths(
    ropes: Mapping[str, Any], weights: tuple[Weight, ...], facts: Mapping[str, Any], head: int
) -> Iterator[int]:
    """Yield the elements of a row of each table of rotations, if layers of each kind have a separate table for their heads.

    A norm over all heads together, as in OLMo 2 and 3, does not give the elements of one head.
    Source: vllm/model_executor/layers/rotary_embedding/gemma4_rope.py: a proportional one has all elements of a head.
    """
    kinds, heads = list(facts.get("layer_types") or ()), {}
    together = head * _first(facts, "num_attention_heads")
    for weight in weights:
        found = _LAYER.match(weight.name)
        if found and found[2] == "self_attn.q_norm.weight" and not _ENCODER.search(weight.name) and int(found[1]) < len(kinds):
            heads[kinds[int(found[1])]] = head if weight.shape[0] == together else weight.shape[0]
    for kind, rope in ropes.items():
        if isinstance(rope, Mapping):
            share = 1 if rope.get("rope_type") == "proportional" else float(rope.get("partial_rotary_factor") or 1)
            yield int(heads.get(kind, head) * share)


def _rotary(facts: Mapping[str, Any], ropes: Mapping[str, Any], head: int) -> int:
    """Return the elements of a row of a table of rotations: sines and cosines of half of the rotated ones each."""
    if facts.get("qk_rope_head_dim"):
        return int(facts["qk_rope_head_dim"])
    nested = next((one for one in ropes.values() if isinstance(one, Mapping)), ropes)
    return int(head * float(nested.get("partial_rotary_factor") or facts.get("partial_rotary_factor") or 1))


def _rotary_rows(ropes: Mapping[str, Any], positions: int, *, of_images: bool = False) -> Iterator[int]:
    """Yield the rows of each table of rotations: of a scaled one the tokens after scaling, of one for images four times as many.

    Some configs of Qwen3-VL leave out the sections of images, which transformers' class then has by default.

    Source: vllm/model_executor/layers/rotary_embedding, linear_scaling_rope.py, yarn_scaling_rope.py, mrope.py; vLLM 0.33.
    """
    nested = [one for one in ropes.values() if isinstance(one, Mapping)] or ([ropes] if ropes else [])
    for rope in nested:
        kind, factor = str(rope.get("rope_type") or rope.get("type") or "default"), rope.get("factor") or 1
        original = _first(rope, "original_max_position_embeddings") or positions
        if rope.get("mrope_section") or of_images:
            yield positions * 4
        elif kind in ("linear", "dynamic"):
            yield round(positions * factor)
        elif kind == "yarn":
            yield round(original * factor)
        elif kind == "longrope":
            yield positions + original
        else:
            yield positions


def _file_elements(module: nn.Module, ropes: Mapping[str, Any], rotary: int, widest: int) -> int:
    """Return the elements of a GGUF file's tables of scaled rotations and of the biases that choose experts.

    Source: llama.cpp b11549, conversion/llama.py, generate_extra_tensors, and conversion/deepseek.py.
    """
    nested = [rope for rope in ropes.values() if isinstance(rope, Mapping)] or [ropes]
    kinds = {str(rope.get("rope_type") or rope.get("type") or "default") for rope in nested}
    tables = {"llama3": rotary // 2, "longrope": rotary, "proportional": widest // 2}
    stored = ("e_score_correction_bias", "expert_bias", "layer_scalar")
    buffers = sum(buffer.numel() for name, buffer in module.named_buffers() if name.endswith(stored))
    return sum(tables.get(kind, 0) for kind in kinds) + buffers


def _state_itemsize(facts: Mapping[str, Any], model_type: str) -> int:
    """Return the bytes of an element of a layer's state: as the config says, else the model's dtype.

    Published configs of Qwen 3.5 say float32 (vllm/model_executor/models/config.py, 0.33); those without the key are taken to.
    """
    usual = "float32" if model_type.startswith("qwen3_5") else "bfloat16"
    said = facts.get("mamba_ssm_dtype") or facts.get("mamba_ssm_cache_dtype") or usual
    return _ITEMSIZES.get(str(said).removeprefix("torch."), SERVED_ITEMSIZE)


def _layers(
    weights: tuple[Weight, ...], facts: Mapping[str, Any], kv_heads: int, head: int, heads: int
) -> list[Layer]:
    """Return the decoder's layers by the parameters that they have: a stack of the encoder is none of them."""
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    for weight in weights:
        found = _LAYER.match(weight.name)
        if found and not _ENCODER.search(weight.name):
            shapes.setdefault(int(found[1]), {})[found[2]] = weight.shape
    kinds = list(facts.get("layer_types") or ())
    window = int(facts.get("sliding_window") or 0) if facts.get("use_sliding_window", True) else 0
    # vllm/model_executor/models/gemma3n.py and gemma4.py, kv_sharing_target_layer_name: the last layers use other layers' cache
    own = len(shapes) - int(facts.get("num_kv_shared_layers") or 0)
    layers = []
    for position, number in enumerate(sorted(shapes)):
        if position >= own:
            layers.append(Layer(kind=FULL))
            continue
        kind = kinds[number] if number < len(kinds) else ("sliding_attention" if window and not kinds else "")
        layers += _layer(shapes[number], kind, facts, window, (kv_heads, head, heads))
    return layers


def _lent(layers: tuple[Layer, ...], facts: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Return the cache that the last layers would have; they use that of the last earlier layer of their kind."""
    kinds, own = list(facts.get("layer_types") or ()), len(layers) - int(facts.get("num_kv_shared_layers") or 0)
    if own == len(layers) or len(kinds) != len(layers):
        return ()
    lenders = dict(zip(kinds[:own], layers[:own], strict=True))
    return tuple(lenders[kind] for kind in kinds[own:])


def _mtp_layers(facts: Mapping[str, Any]) -> int:
    """Return how many layers for multi-token prediction a checkpoint has; configs that leave the number out have one."""
    return next((int(facts[key]) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if facts.get(key) is not None), 1)


def _index_bytes(facts: Mapping[str, Any]) -> int:
    """Return the bytes of a token in the cache of sparse attention's indexer: a key in FP8 and a scale for each 128 elements.

    Source: vllm/model_executor/models/deepseek_v2.py, DeepseekV32IndexerCache, 0.11.0; sglang's pool_configurator.py, 0.5.23.
    """
    if not facts.get("index_topk"):
        return 0
    head = int(facts.get("index_head_dim") or 128)
    return head + head // 128 * 4


def _layer(
    own: Mapping[str, tuple[int, ...]], kind: str, facts: Mapping[str, Any], window: int, sizes: tuple[int, int, int]
) -> list[Layer]:
    """Return the cache of one layer: of its attention, its state, or both; empty for a layer without any."""
    kv_heads, head, heads = sizes
    norm = own.get("self_attn.q_norm.weight", (head,))[0]  # of one head, or of all: layers of Gemma 4 have heads of two sizes
    own_head = head if norm == head * heads else norm
    leaves = {name.split(".")[-2]: shape for name, shape in own.items() if "." in name}
    if (rates := facts.get("compress_rates")) is not None:
        ratio = int(rates.get(kind) or 1)
        keys = _index_bytes(facts) if any(".indexer." in name for name in own) else 0
        return [Layer(kind=COMPRESSED, elements=head, shared=True, window=window, ratio=ratio, index_bytes=keys)]
    if "kv_a_proj_with_mqa" in leaves:
        elements = int(facts["kv_lora_rank"]) + int(facts["qk_rope_head_dim"])
        return [Layer(kind=FULL, elements=elements, shared=True, index_bytes=_index_bytes(facts))]
    found = []
    if state := _state(own, leaves, facts):
        found.append(state)
    cross = "encoder_attn" in " ".join(own)
    attention = any(leaf in leaves for leaf in ("k_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv"))
    if attention and not (state and kind in ("linear_attention", "mamba", "conv")):
        elements = 2 * kv_heads * head
        if "k_proj" in leaves and not cross:
            keys = leaves["k_proj"][0]
            values = leaves["v_proj"][0] if "v_proj" in leaves else keys
            elements = keys + values
        slides = kind == "sliding_attention" and window > 0
        chunk = int(facts.get("attention_chunk_size") or 0) if kind == "chunked_attention" else 0
        count = max(1, elements // (2 * own_head)) if elements % (2 * own_head) == 0 else kv_heads
        found.append(
            Layer(
                kind=CHUNKED if chunk else SLIDING if slides else FULL,
                elements=elements,
                kv_heads=count,
                window=chunk or (window if slides else 0),
            )
        )
        if cross:
            found.append(Layer(kind=CROSS, elements=elements, kv_heads=count))
    return found or [Layer(kind=FULL)]


def _state(
    own: Mapping[str, tuple[int, ...]], leaves: Mapping[str, tuple[int, ...]], facts: Mapping[str, Any]
) -> Layer | None:
    """Return the state of linear attention, of Mamba 1 or 2, or of a short convolution.

    Source: vllm/model_executor/layers/mamba/mamba_utils.py, MambaStateShapeCalculator; vLLM 0.33.
    """
    conv = next((shape for name, shape in own.items() if re.search(r"conv1d\.weight$|(?:^|\.)conv\.conv\.weight$", name)), None)
    if conv is None:
        return None
    channels, kernel = conv[0], conv[-1]
    if any(".linear_attn." in f".{name}" or name.startswith("linear_attn.") for name in own):
        values, keys = int(facts["linear_num_value_heads"]), int(facts["linear_key_head_dim"])
        elements = values * keys * int(facts["linear_value_head_dim"])
    elif any(name.endswith("A_log") for name in own):
        log = next(shape for name, shape in own.items() if name.endswith("A_log"))
        if len(log) == 2:
            elements = prod(log)  # Mamba 1: [channels, state]
        else:
            size = int(facts.get("ssm_state_size") or facts.get("mamba_d_state") or facts.get("state_size") or 128)
            head = int(facts.get("mamba_head_dim") or facts.get("mamba_d_head") or facts.get("head_dim") or 64)
            elements = log[0] * head * size
    else:
        elements = 0
    return Layer(kind=STATE, state_elements=elements, conv_elements=channels * (kernel - 1), conv_channels=channels)


def _uncounted(facts: Mapping[str, Any], encoder: str | None) -> tuple[str, ...]:
    said = []
    if encoder is not None:
        said.append(f"the profile run of the model's {encoder} encoder; its activations reduce the cache")
    if facts.get("index_topk"):
        said.append("buffers of the indexer that chooses tokens for sparse attention")
    return tuple(said)


def _quantization(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return layout, group size, zero points and the layers left out of a checkpoint's `quantization_config`."""
    found = checkpoint.get("quantization_config")
    if not isinstance(found, Mapping):
        nested = checkpoint.get("text_config")
        found = nested.get("quantization_config") if isinstance(nested, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    method = str(found.get("quant_method", "")).lower()
    left = found.get("modules_to_not_convert") or found.get("ignore") or found.get("ignored_layers") or ()
    unquantized = tuple(str(name) for name in left if isinstance(name, str)) if isinstance(left, (list, tuple)) else ()
    group, zero = _integer(found.get("group_size"), 128), not found.get("sym", True)
    layout: str | None = method
    if method == "compressed-tensors":
        layout, group = _compressed(found)
    elif method == "modelopt":
        layout = "nvfp4" if "FP4" in str(found.get("quant_algo", "")).upper() else "fp8"
    elif method == "fbgemm_fp8":
        layout = "fp8"
    if layout not in ("awq", "gptq", "fp8", "w8a8", "mxfp4", "nvfp4"):
        raise RequestError(
            "weights: the checkpoint's layout is not known for servers",
            given=method or "no quant_method",
            allowed="awq, gptq, fp8, mxfp4, compressed-tensors, modelopt",
            todo="ask for weights=full, or for the closest layout",
        )
    experts = "mxfp4" if layout == "fp8" and EXPERT_DTYPES & {found.get("expert_dtype"), checkpoint.get("expert_dtype")} else None
    known = {"quantization": layout, "group": group, "zero_points": zero, "unquantized": unquantized}
    return {**known, "expert_quantization": experts}


def _compressed(found: Mapping[str, Any]) -> tuple[str | None, int]:
    """Return layout and group size of the first group of compressed-tensors."""
    groups = found.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = first.get("weights") if isinstance(first, Mapping) else None
    weights = weights if isinstance(weights, Mapping) else {}
    bits, kind = _integer(weights.get("num_bits"), 8), str(weights.get("type", "int"))
    group = _integer(weights.get("group_size"), 128)
    if kind == "float":
        return ("fp8" if bits == 8 else "nvfp4"), group
    return ("w8a8" if bits == 8 else "gptq"), group


def _first(facts: Mapping[str, Any], *keys: str) -> int:
    """Return the first of several keys that has a number, 0 if none has."""
    return next((int(facts[key]) for key in keys if isinstance(facts.get(key), (int, float)) and facts[key]), 0)


def _integer(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and value > 0 else otherwise

"""The tensors of a GGUF file: names, types and bytes as llama.cpp's converter and quantizer choose them.

Source: llama.cpp b11549 (October 2026), src/llama-quant.cpp, conversion/base.py, gguf-py/gguf/tensor_mapping.py, ggml/src/ggml.c.
Files whose type begins with "iq" are taken to be made with an importance matrix, others without one: a matrix changes the
first eighth of the layers of Q4_0 and Q5_0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from sizer.serving.architecture import ENCODER, STATE, Architecture, Weight
from sizer.serving.layout import is_vocabulary

# Elements of a block and its bytes, ggml/src/ggml.c, type_traits.
BLOCKS = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "iq1_s": (256, 50),
    "iq1_m": (256, 56),
    "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74),
    "iq2_s": (256, 82),
    "iq3_xxs": (256, 98),
    "iq3_s": (256, 110),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
    "mxfp4": (32, 17),
}
# The type of most tensors of a file, llama_ftype_get_default_type.
USUAL = {
    **{name: name for name in BLOCKS if name not in ("q2_k", "q3_k", "q4_k", "q5_k", "mxfp4", "iq2_s")},
    **{f"q{bits}_k_{size}": f"q{bits}_k" for bits in (4, 5) for size in "sm"},
    **{f"q3_k_{size}": "q3_k" for size in "sml"},
    **{"q2_k": "q2_k", "q2_k_s": "q2_k", "iq2_s": "iq2_xs", "iq2_m": "iq2_s", "iq3_xs": "iq3_s", "iq3_m": "iq3_s"},
    "mxfp4": "mxfp4",
}
SMALLER_BLOCKS = {  # tensor_type_fallback: for rows that the blocks of 256 elements do not divide
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"),
    **{"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"},
}
SMALL = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m")
EIGHT, GROUPED = 8, 4  # experts of Mixtral; query heads for each key head
HEADS_BY_LAYER = ("granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "jamba", "bamba")
EMBEDDINGS = {
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs"), "q2_k"),
    **dict.fromkeys(("iq2_s", "iq2_m", "iq3_xxs"), "iq3_s"),
}
OUTPUTS = {"q2_k": "q3_k", "iq3_xxs": "iq3_s", "q3_k_m": "q4_k", "q3_k_l": "q5_k", "iq3_m": "q4_k"}
OUTPUTS_OF_EIGHT = dict.fromkeys(
    ("q2_k", "iq3_xs", "iq3_xxs", "q3_k_s", "q3_k_m", "iq4_nl", "q4_k_s", "q4_k_m", "iq3_s", "iq3_m", "iq4_xs"), "q5_k"
)
FIRST_DOWNS = {"q2_k": "q3_k", "q2_k_s": "q4_k", "iq3_m": "q4_k", "q4_k_s": "q5_k"}  # with a matrix for i-quants

# Types of models whose files were compared with llama.cpp's (tests/measured/llama_cpp).
COMPARED = frozenset(
    (
        *("bloom", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "gemma4_text", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_oss"),
        *("granitemoehybrid", "lfm2", "lfm2_moe", "llama", "llama4_text", "mamba", "mistral", "mixtral", "nemotron_h", "olmo2"),
        *("olmo3", "phi", "phi3", "qwen2", "qwen2_5_vl_text", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"),
        *("qwen3_next", "qwen3_vl_text", "smollm3", "starcoder2"),
    )
)

_PROJECTOR = re.compile(r"(?:^|\.)(?:embed_vision|embed_audio|connector|mm_projector|multi_modal_projector)\.")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_LEAVES = {
    **{f"{name}_proj": f"attn_{name}" for name in "qkv"},
    **dict.fromkeys(("qkv_proj", "query_key_value", "c_attn", "Wqkv", "in_proj_qkv"), "attn_qkv"),
    **dict.fromkeys(("gate_proj", "w1"), "ffn_gate"),
    **dict.fromkeys(("up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h", "w3"), "ffn_up"),
    **dict.fromkeys(("down_proj", "fc2", "dense_4h_to_h", "w2", "output_linear"), "ffn_down"),
    **dict.fromkeys(("q_a_proj", "q_b_proj"), "attn_q_a"),
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "in_proj_z": "attn_gate",
    "in_proj": "ssm_in",
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
    "in_proj_a": "ssm_alpha",
    "in_proj_ba": "ssm_ba",
}
_VECTORS = {f"{name}_{norm}": f"attn_{name}_norm" for name in "qk" for norm in ("norm", "layernorm")}
_VECTORS |= {"conv1d": "ssm_conv1d", "conv": "ssm_conv1d", "per_expert_scale": "ffn_down_exps.scale"}
GEMMA_TOKENS = 262_144  # rows of Gemma 3's embedding that its tokenizer uses; the converter drops the rest
_TRANSPOSED = ("c_attn", "c_fc", "c_proj")  # transformers' Conv1D, except in StarCoder2
_SPLIT = ("gate_up_proj", "input_linear")  # one matrix in transformers, two tensors in a file
WHOLE_GATES = ("phi3", "glm4", "gemma4_text")  # models whose gate and up projections stay one tensor
_FLOAT = ("conv1d", "conv.conv", "wpe", "embed_positions", "indexer.weights_proj", "altup", "position_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a file: `matrices` of `rows` in all with `columns` elements, in `layer`, -1 outside of the layers.

    `role` is its GGUF name without the layer's number, "" if no rule depends on it. `kept` is its type if it is not quantized.
    """

    role: str
    layer: int
    rows: int
    columns: int
    matrices: int = 1
    kept: str | None = None

    @property
    def is_input(self) -> bool:
        """Return True for a table of embeddings, which stays on the host."""
        return self.role in ("token_embd", "per_layer_token_embd", "position_embd")

    @property
    def is_of_experts(self) -> bool:
        """Return True for the matrices of all experts of a layer."""
        return self.matrices > 1 and self.role.startswith("ffn_")

    def bytes_in(self, name: str) -> int:
        """Return the bytes of the tensor in a type."""
        block, size = BLOCKS[name]
        return self.rows * (self.columns // block) * size


def tensors_of(architecture: Architecture) -> tuple[Tensor, ...]:
    """Return the tensors of a model's file in the order of its layers, without the encoder of images or sound."""
    shapes = {weight.name: weight.shape for weight in architecture.weights}
    encodes = (ENCODER.search, _PROJECTOR.search)
    decoder = (weight for weight in architecture.weights if prod(weight.shape) and not any(find(weight.name) for find in encodes))
    found = [tensor for weight in decoder for tensor in _tensors(weight, architecture, shapes)]
    if architecture.file_elements:
        found.append(Tensor(role="", layer=0, rows=1, columns=architecture.file_elements, kept="f32"))
    return tuple(sorted(found, key=lambda tensor: tensor.layer))


def projector_bytes(architecture: Architecture) -> int:
    """Return the bytes of the tensors in a projector's file in 16 bits (`mmproj`), 0 for a model without an encoder.

    Vectors and embeddings of patches and positions have 32 bits (conversion/gemma.py, tensor_force_quant).
    """
    own = [weight for weight in architecture.weights if ENCODER.search(weight.name) or _PROJECTOR.search(weight.name)]
    return sum(prod(one.shape) * (4 if len(one.shape) < 2 or "embed" in one.name.split(".")[-2] else 2) for one in own)


def _tensors(weight: Weight, architecture: Architecture, shapes: dict[str, tuple[int, ...]]) -> Iterator[Tensor]:
    """Yield the tensors of a file for one parameter of transformers; `shapes` are those of all parameters."""
    layer = int(found[1]) if (found := _LAYER.search(weight.name)) else -1
    parts, size = weight.name.split("."), prod(weight.shape)
    leaf = parts[-2] if parts[-1] in ("weight", "bias") and len(parts) > 1 else parts[-1]
    if _stays_float(weight, parts, leaf):
        role = "ffn_bias" if "experts" in parts else _vector(parts, leaf, architecture)
        role = "position_embd" if leaf in ("wpe", "embed_positions") else role
        count, matrices = 2 if leaf.removesuffix("_bias") in _SPLIT else 1, weight.shape[0] if role == "ffn_bias" else 1
        for _ in range(count):
            yield Tensor(role=role, layer=layer, rows=1, columns=size // count, matrices=matrices, kept="f32")
        return
    if is_vocabulary(weight, architecture):
        role = "output" if "head" in weight.name or "embed_out" in weight.name else "token_embd"
        role = "per_layer_token_embd" if "per_layer" in weight.name else role
        rows = min(weight.shape[0], GEMMA_TOKENS) if architecture.model_type.startswith("gemma3") else weight.shape[0]
        yield Tensor(role=role, layer=-1, rows=rows, columns=weight.shape[1])
        return
    if leaf == "per_layer_model_projection":
        yield Tensor(role="", layer=0, rows=weight.shape[0], columns=weight.shape[1], kept="bf16")
        return
    if leaf == "kv_b_proj" and architecture.latent:
        rank, keys, values = architecture.latent
        yield Tensor(role="attn_k_b", layer=layer, rows=architecture.heads * rank, columns=keys, matrices=architecture.heads)
        yield Tensor(role="attn_v_b", layer=layer, rows=architecture.heads * values, columns=rank, matrices=architecture.heads)
        return
    if leaf == "in_proj_qkvz":
        gates = shapes[weight.name.replace(leaf, "out_proj")][1]
        yield Tensor(role="attn_qkv", layer=layer, rows=weight.shape[0] - gates, columns=weight.shape[1])
        yield Tensor(role="attn_gate", layer=layer, rows=gates, columns=weight.shape[1])
        return
    columns = _columns(weight, leaf, architecture)
    role = _role(parts, leaf, architecture)
    halves = leaf in _SPLIT and architecture.model_type not in WHOLE_GATES
    for name in ("ffn_gate", "ffn_up") if halves else (role,):
        rows = size // columns // (2 if halves else 1)
        yield Tensor(role=name, layer=layer, rows=rows, columns=columns, matrices=weight.shape[0] if len(weight.shape) == 3 else 1)


def _stays_float(weight: Weight, parts: list[str], leaf: str) -> bool:
    """Return True for a tensor that stays in float32: vectors, biases, norms, convolutions, and the matrix that chooses experts."""
    named = parts[-1] == "weight" or len(weight.shape) > 2
    if len(weight.shape) < 2 or not named or "bias" in parts[-1] or "norm" in leaf:
        return True
    routes = leaf in ("router", "shared_expert_gate") or (leaf == "gate" and named) or parts[-3:-1] == ["router", "proj"]
    return routes or any(name in weight.name for name in _FLOAT)


def _columns(weight: Weight, leaf: str, architecture: Architecture) -> int:
    """Return the elements of a row in the file: the inputs of the matrix."""
    if len(weight.shape) == 2:
        transposed = leaf in _TRANSPOSED and architecture.model_type == "gpt2"
        return weight.shape[0] if transposed else weight.shape[1]
    down = "down" in leaf or "output" in leaf
    first, second = weight.shape[-2:]
    inputs = architecture.expert_width if down else architecture.hidden
    return inputs if inputs in (first, second) else second


def _role(parts: list[str], leaf: str, architecture: Architecture) -> str:
    """Return the name in the file of a layer's matrix, "" for those that no rule names."""
    attends = any("attn" in part or "attention" in part or part == "mixer" for part in parts)
    if leaf in ("o_proj", "out_proj", "dense", "c_proj"):
        if leaf == "out_proj" and {"linear_attn", "conv", "mixer", "mamba"} & set(parts):
            return "ssm_out"  # also shortconv.out_proj
        return "attn_output" if attends else "ffn_down"
    return _LEAVES.get(leaf, "")


def _vector(parts: list[str], leaf: str, architecture: Architecture) -> str:
    """Return the name in the file of a bias, norm or convolution that the graph of a layer on the host needs, "" for others."""
    role = _role(parts, leaf, architecture) if parts[-1] == "bias" else ""
    return f"{role}.bias" if role in ("attn_q", "attn_k", "attn_v", "attn_qkv") else _VECTORS.get(leaf, "")


def types_of(tensors: tuple[Tensor, ...], name: str, architecture: Architecture) -> tuple[str, ...]:
    """Return the type of each tensor in a file (llama_tensor_get_type).

    Args:
        tensors: The file's tensors in order.
        name: The type of the file, such as "q4_k_m".
        architecture: The model.
    """
    rules = _Rules(tensors, name, architecture)
    return tuple(_fitting(tensor, rules.type_of(tensor)) for tensor in tensors)


def _fitting(tensor: Tensor, name: str) -> str:
    """Return a type whose blocks divide the rows of a tensor (tensor_type_fallback)."""
    for one in (name, SMALLER_BLOCKS.get(name, name)):
        if tensor.columns % BLOCKS[one][0] == 0:
            return one
    return "f16"


class _Rules:
    """Chooses the types of the tensors of one file, in their order (llama_tensor_get_type_impl)."""

    def __init__(self, tensors: tuple[Tensor, ...], name: str, architecture: Architecture) -> None:
        self.name, self.usual = name, USUAL[name]
        self.tied = all(tensor.role != "output" for tensor in tensors)
        self.experts = architecture.experts
        # llama_hparams::n_gqa of the first layer, which has no key heads in hybrid models with a count for each layer
        alone = architecture.model_type in HEADS_BY_LAYER and architecture.layers[0].kind == STATE
        self.grouped = 0 if alone else architecture.heads // max(1, architecture.kv_heads)
        self.layers = len({tensor.layer for tensor in tensors} - {-1})
        self.values = sum(tensor.role in ("attn_v", "attn_qkv") for tensor in tensors)
        self.falcon = architecture.model_type == "falcon"
        # models/llama.cpp and models/qwen2.cpp: 80 layers are the type 70B, with grouped heads
        self.is_70b = self.layers == 80 and architecture.model_type in ("llama", "qwen2", "mistral") and self.grouped > 1
        self.small = name in SMALL
        self.value = self.down = 0
        self.count = {"ffn_gate": 0, "ffn_up": 0}

    def type_of(self, tensor: Tensor) -> str:
        """Return the type of the next tensor."""
        role, name = tensor.role, self.name
        if tensor.kept is not None or self.usual in ("f32", "f16", "bf16"):
            return tensor.kept or self.usual
        if role == "output" or (self.tied and role in ("token_embd", "per_layer_token_embd")):
            return self._head(tensor)
        if name == "mxfp4":
            return "mxfp4" if tensor.matrices > 1 else "q8_0"
        if role in ("token_embd", "per_layer_token_embd"):
            return EMBEDDINGS.get(name, self.usual)
        if role in ("attn_v", "attn_qkv"):
            self.value += 1
            return self._attention_value(self.value - 1)
        if role == "ffn_down":
            self.down += 1
            return self._down(tensor.layer if self.experts > 1 and not self.small else self.down - 1)
        if self.small:
            return self._small(role)
        if role in ("attn_q", "attn_k"):
            if role == "attn_k" and self.experts == EIGHT:
                return "q8_0"
            return {"iq3_xs": "iq3_xxs", "iq3_xxs": "iq2_s"}.get(name, self.usual)
        if role == "attn_output" and not self.falcon:
            return (OUTPUTS_OF_EIGHT if self.experts == EIGHT else OUTPUTS).get(name, self.usual)
        if role == "attn_output":
            return {"q3_k_l": "q4_k"}.get(name, self.usual)
        if role in ("ffn_gate", "ffn_up") and name == "iq3_xs":
            counted = self.count[role]
            self.count[role] += 1
            layer = tensor.layer if self.experts > 1 else counted
            return "iq3_xxs" if self.layers // 8 <= layer < 7 * self.layers // 8 else self.usual
        return self.usual

    def _head(self, tensor: Tensor) -> str:
        """Return the type of the head, or of the embedding that is also the head."""
        if self.name == "mxfp4" or self.falcon or tensor.columns % BLOCKS[self.usual][0]:
            return "q8_0"
        if self.small or self.name == "iq3_xxs":
            return "q5_k"
        return self.usual if self.usual == "q8_0" else "q6_k"

    def _small(self, role: str) -> str:
        """Return the type of another matrix in a file of two bits or less for each element."""
        if role == "attn_k" and self.experts == EIGHT:
            return "q4_k"
        if role == "attn_output":
            if self.experts == EIGHT:
                return "q5_k"
            return {"iq1_s": "iq2_xxs", "iq1_m": "iq2_xxs", "iq2_s": "iq3_s", "iq2_m": "iq3_s"}.get(self.name, self.usual)
        return self.usual

    def _attention_value(self, number: int) -> str:
        """Return the type of the values' matrix of an attention, or of the matrix that contains it."""
        name = self.name
        grouped = self.grouped >= GROUPED
        if self.small:
            least = "iq3_s" if name in ("iq2_s", "iq2_m") else "q2_k"
            return "q4_k" if grouped or self.experts >= GROUPED else least
        found = self.usual
        if name == "q2_k":
            found = "q4_k" if grouped else "q3_k"
        elif name in ("q2_k_s", "iq3_xxs", "iq3_xs", "iq3_s") and grouped:
            found = "q4_k"
        elif name == "q3_k_m":
            found = "q5_k" if number < 2 else "q4_k"
        elif name in ("iq4_nl", "iq4_xs") and grouped:
            found = "q5_k"
        elif name in ("q4_k_m", "q5_k_m") and _has_more_bits(number, self.values):
            found = "q6_k"
        elif name == "q4_k_s" and number < 4:
            found = "q5_k"
        else:
            found = {"iq3_m": "q4_k", "q3_k_l": "q5_k"}.get(name, found)
        if self.is_70b and found in ("q3_k", "q4_k"):
            found = "q5_k"
        return "q8_0" if self.experts == EIGHT else found

    def _down(self, layer: int) -> str:
        """Return the type of a layer's last feed-forward matrix."""
        name, eighth, sixteenth = self.name, layer < self.layers // 8, layer < self.layers // 16
        more = _has_more_bits(layer, self.layers)
        if self.small:
            least = "iq3_s" if name in ("iq2_s", "iq2_m") else "q2_k"
            return least if eighth else self.usual
        if name == "q3_k_m":
            return "q5_k" if sixteenth else "q4_k" if more or not self.falcon else "q3_k"
        if name == "q4_k_m" and self.falcon:
            return "q6_k" if sixteenth else "q5_k" if more else "q4_k"
        if name in ("q4_k_m", "q5_k_m") and more:
            return "q6_k"
        if name == "iq3_m" and self.experts == EIGHT and more:
            return "q4_k"
        if name == "q3_k_l":
            return "q4_k" if self.falcon else "q5_k"
        if eighth and not (name == "q4_k_s" and self.falcon):
            return FIRST_DOWNS.get(name, self.usual)
        return "q3_k" if name == "q2_k" else self.usual


def _has_more_bits(number: int, count: int) -> bool:
    """Return True for the first and last eighth of the layers, and for each third layer between (use_more_bits)."""
    eighth = count // 8
    return number < eighth or number >= 7 * count // 8 or (number - eighth) % 3 == 2

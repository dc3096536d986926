"""Weights as a server lays them out on one rank: merged, padded, split, replicated and quantized, then through the allocator.

Source: vllm/model_executor/layers/linear.py, vocab_parallel_embedding.py, fused_moe/layer.py, rotary_embedding and
quantization; vLLM 0.33 (and 0.9 to 0.28 by their logs, docs/serving.md).
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from sizer.base.units import MIB
from sizer.serving.architecture import ENCODER, LAYER, Architecture, Weight
from sizer.serving.flags import Flags

VOCABULARY_PADDING = 64  # vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE
FP8_BLOCK = 128  # side length of a scale's block; quantization/utils/fp8_utils.py
MXFP4_GROUP, NVFP4_GROUP = 32, 16

MERGED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("w1", "w3"), "w13"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa", "kv_proj"), "fused_qkv_a_proj"),
}
JOINED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")
COLUMNS = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "qkv", "q_b_proj", "kv_b_proj", *JOINED),
        *("gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h", "w1", "w3", "linear_fc1", "input_linear"),
        *("o_a_proj", "in_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_a", "in_proj_b", "conv1d"),
    )
)
ROWS = frozenset(
    (
        *("o_proj", "o_b_proj", "out_proj", "down_proj", "dense", "dense_4h_to_h", "fc2", "linear_fc2", "c_proj", "proj"),
        *("w2", "output_linear"),
    )
)
REPLICATED = frozenset(("q_a_proj", "kv_a_proj_with_mqa", "kv_proj"))
COMPRESSOR = ".compressor."  # DeepSeek V4: each rank has all of it, in 16 bits except the queries of its indexer


@dataclass(frozen=True, slots=True)
class Matrix:
    """A merged matrix of one rank: its name, the elements of its input and output, its bias, and whether it may be quantized."""

    name: str
    inputs: int
    outputs: int
    itemsize: int
    quantized: bool


def tensors(architecture: Architecture, flags: Flags, stage: int = 0) -> Iterator[int]:
    """Yield the bytes of each tensor of one rank of a stage, in the server's order of creation."""
    matrices: dict[str, Matrix] = {}
    for weight in weights_of(architecture, flags, stage):
        if matrix := matrix_of(weight, architecture, flags):
            known = matrices.get(matrix.name)
            matrices[matrix.name] = matrix if known is None else replace(known, outputs=known.outputs + matrix.outputs)
        else:
            yield from _whole(weight, architecture, flags)
    for matrix in matrices.values():
        yield from _linear(matrix, architecture, flags)
    for matrix in matrices.values() if architecture.latent else ():
        # vllm/v1/attention/backends/mla/common.py, 0.11.1, and layers/attention/mla_attention.py, 0.33: W_UK_T and W_UV are
        # views of kv_b_proj, or of a copy in the model's dtype if it is quantized
        if matrix.name.endswith(".kv_b_proj") and (flags.copies_latent or _layout_of(matrix, flags)):
            yield matrix.inputs * matrix.outputs * 2
    if stage == 0:
        for elements in architecture.step_buffers:
            yield flags.max_num_batched_tokens * elements * 2
    widths = architecture.rotary_widths
    if len(widths) != len(architecture.rotary_rows):
        widths = (architecture.rotary,) * len(architecture.rotary_rows)
    for rows, width in zip(architecture.rotary_rows, widths, strict=True):
        yield rows * width * architecture.rotary_itemsize


def weights_of(architecture: Architecture, flags: Flags, stage: int) -> Iterator[Weight]:
    """Yield the checkpoint's weights on a stage, and the further weights that this version of vLLM allocates.

    Source: vllm/model_executor/models/gemma4.py and gemma3n.py, 0.30.0: layers that reuse another layer's cache have no keys.
    """
    for weight in architecture.weights:
        if is_on_stage(weight.name, architecture, flags, stage):
            yield weight
    for weight in architecture.idle_weights:
        found = LAYER.search(weight.name)
        keeps = found is None or architecture.layers[int(found[1])].elements > 0
        if (keeps or flags.rules.shared_keys) and is_on_stage(weight.name, architecture, flags, stage):
            yield weight


def weights_bytes(architecture: Architecture, flags: Flags, stage: int = 0) -> int:
    """Return the bytes that the allocator counts for the weights of one rank of a stage."""
    return allocated(tensors(architecture, flags, stage))


def offloaded_bytes(architecture: Architecture, flags: Flags, stage: int = 0) -> int:
    """Return the bytes of weights that go to the host: whole parameters of the layers, from the first on, until they are enough.

    Embedding and head stay, and so does the encoder in versions before `Rules.offloads_tower`; in later ones it goes first.

    Source: vllm/model_executor/models/utils.py, maybe_offload_to_cpu, 0.11.0, and model_executor/offloader/uva.py, 0.33.
    """
    matrices: dict[str, Matrix] = {}
    layers: dict[int, dict[str, int]] = {}
    for weight in weights_of(architecture, flags, stage) if flags.offload_bytes else ():
        found, encodes = LAYER.search(weight.name), ENCODER.search(weight.name) is not None
        if (encodes and not flags.rules.offloads_tower) or (found is None and not encodes):
            continue
        number = -1 if found is None or encodes else int(found[1])
        matrix, layer = matrix_of(weight, architecture, flags), layers.setdefault(number, {})
        if matrix is None:
            layer[weight.name] = sum(_whole(weight, architecture, flags))
            continue
        known = matrices.get(matrix.name)
        matrix = matrix if known is None else replace(known, outputs=known.outputs + matrix.outputs)
        matrices[matrix.name], layer[matrix.name] = matrix, sum(_linear(matrix, architecture, flags))
    total = 0
    for _, layer in sorted(layers.items()):
        for size in layer.values():
            if total >= flags.offload_bytes:
                return total
            total += size
    return total


def allocated(sizes: Iterable[int]) -> int:
    """Return the bytes that PyTorch's allocator counts for tensors that are created in sequence and never freed.

    A block keeps the rest of its segment if that is 1 MiB or less (sizer.allocator.cuda: c10/cuda/CUDACachingAllocator.cpp,
    should_split; PyTorch 2.6 and 2.15).
    """
    total = 0
    free: list[int] = []
    for size in sizes:
        size = -(-size // 512) * 512
        if size <= MIB:
            total += size
            continue
        position = bisect_left(free, size)
        found = free.pop(position) if position < len(free) else _segment(size)
        if found - size > MIB:
            insort(free, found - size)
            found = size
        total += found
    return total


def _segment(size: int) -> int:
    """Return the bytes that the allocator requests from the driver for a block of more than 1 MiB."""
    return 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB


def stage_layers(layers: int, pp: int) -> tuple[range, ...]:
    """Return the layers of each stage: remaining layers go to the stages before the last (vllm/distributed/utils.py)."""
    counts = [layers // pp] * pp
    for position in range(layers % pp):
        counts[-2 - position] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(pp)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def _stage_layers(architecture: Architecture, flags: Flags, stage: int) -> range:
    return stage_layers(len(architecture.layers), flags.pp)[stage]


def is_on_stage(name: str, architecture: Architecture, flags: Flags, stage: int) -> bool:
    """Return True if a stage holds a weight.

    A stage holds its layers. The first stage also holds the embedding, the last one the weights after the layers.
    """
    if flags.pp == 1:
        return True
    if ENCODER.search(name):
        return stage == 0
    if found := LAYER.search(name):
        return int(found[1]) in _stage_layers(architecture, flags, stage)
    first = "embed" in name or ".wte." in name
    return stage == 0 if first else stage == flags.pp - 1


def matrix_of(weight: Weight, architecture: Architecture, flags: Flags) -> Matrix | None:
    """Return the merged matrix that a weight is part of, None for any other tensor."""
    parts = weight.name.split(".")
    if parts[-1] != "weight" or len(parts) < 2 or len(weight.shape) != 2 or is_vocabulary(weight, architecture):
        return None
    leaf, encoder = parts[-2], bool(ENCODER.search(weight.name))
    if leaf not in COLUMNS | ROWS | REPLICATED:
        return None
    transposed = leaf in ("c_attn", "c_fc", "c_proj")  # transformers' Conv1D
    outputs, inputs = reversed(weight.shape) if transposed else weight.shape
    if COMPRESSOR in weight.name:
        return Matrix(weight.name, inputs, outputs, weight.itemsize, quantized=leaf == "q_b_proj")
    if leaf in COLUMNS:
        outputs = _split_outputs(leaf, outputs, architecture, flags, encoder)
    elif leaf in ROWS:
        inputs = -(-inputs // flags.tp)
    name = ".".join([*parts[:-2], MERGED.get(leaf, leaf)])
    left = any(_matches(pattern, weight.name) for pattern in architecture.unquantized)
    return Matrix(name, inputs, outputs, weight.itemsize, quantized=not (encoder or left))


def _split_outputs(leaf: str, outputs: int, architecture: Architecture, flags: Flags, encoder: bool) -> int:
    """Return the outputs of one rank; key and value heads are replicated if there are more ranks than heads."""
    if encoder:
        return -(-outputs // flags.tp)
    replicated = max(1, architecture.kv_heads // flags.tp)
    if leaf in ("k_proj", "v_proj"):
        return outputs * replicated // architecture.kv_heads
    if leaf in JOINED:
        return (architecture.heads // flags.tp + 2 * replicated) * architecture.head_size
    return -(-outputs // flags.tp)


def _layout_of(matrix: Matrix, flags: Flags) -> str | None:
    """Return the layout of a linear layer's matrix, None if it is not quantized."""
    return flags.layout if matrix.quantized and flags.layout != "mxfp4" else None


def _linear(matrix: Matrix, architecture: Architecture, flags: Flags) -> Iterator[int]:
    """Yield the tensors of one merged linear layer after loading."""
    layout = _layout_of(matrix, flags)
    yield from _quantized(matrix.inputs, matrix.outputs, layout, architecture, matrix.itemsize)
    if layout in ("awq", "gptq"):
        yield 4 * flags.processors  # quantization/utils/marlin_utils.py, marlin_make_workspace_new, with one block for each


def _quantized(inputs: int, outputs: int, layout: str | None, architecture: Architecture, itemsize: int) -> Iterator[int]:
    """Yield the tensors of a matrix in a layout: its elements, then scales and zero points."""
    if layout in ("awq", "gptq"):
        group = min(architecture.group, inputs)
        groups = -(-inputs // group)
        yield inputs * outputs // 2
        yield groups * outputs * 2
        if layout == "awq" or architecture.zero_points:
            yield groups * outputs // 2
    elif layout == "fp8":
        yield inputs * outputs
        yield -(-inputs // FP8_BLOCK) * -(-outputs // FP8_BLOCK) * 4
    elif layout == "w8a8":
        yield inputs * outputs
        yield outputs * 4
    elif layout == "nvfp4":
        yield inputs * outputs // 2
        yield -(-inputs // NVFP4_GROUP) * outputs
    else:
        yield inputs * outputs * itemsize


def _whole(weight: Weight, architecture: Architecture, flags: Flags) -> Iterator[int]:
    """Yield the tensors of a weight that is no linear layer's matrix: vocabulary, experts, biases, norms."""
    parts, size = weight.name.split("."), prod(weight.shape)
    if is_vocabulary(weight, architecture):
        rows = -(-weight.shape[0] // VOCABULARY_PADDING) * VOCABULARY_PADDING
        yield -(-rows // flags.tp) * weight.shape[1] * weight.itemsize
    elif is_of_experts(weight):
        yield from _experts(weight, architecture, flags)
    elif "experts" in parts:
        yield -(-size // flags.tp) * (4 if flags.expert_layout == "mxfp4" else weight.itemsize)
    elif parts[-1] == "bias" and len(parts) > 1 and parts[-2] in COLUMNS and not ENCODER.search(weight.name):
        yield _split_outputs(parts[-2], size, architecture, flags, encoder=False) * weight.itemsize
    elif len(parts) > 1 and parts[-2] in COLUMNS:
        yield -(-size // flags.tp) * weight.itemsize
    else:
        yield size * weight.itemsize


def _experts(weight: Weight, architecture: Architecture, flags: Flags) -> Iterator[int]:
    """Yield the tensors of one matrix of all experts: [experts, outputs, inputs], split by experts or by their width."""
    down, gated = is_down(weight), is_gated(weight)
    here, width, hidden = expert_sizes(weight, architecture, flags)
    if flags.expert_layout == "mxfp4":
        elements = here * hidden * width * (2 if gated else 1)
        yield elements // 2
        yield elements // MXFP4_GROUP
        return
    inputs, outputs = (width, hidden) if down else (hidden, (2 if gated else 1) * width)
    for size in _quantized(inputs, outputs, flags.expert_layout, architecture, weight.itemsize):
        yield here * size


def is_of_experts(weight: Weight) -> bool:
    """Return True for the matrix of all experts of a layer."""
    return len(weight.shape) == 3 and bool({"experts", "block_sparse_moe"} & set(weight.name.split(".")))


def is_down(weight: Weight) -> bool:
    """Return True for the second matrix of all experts, False for the first."""
    return "down" in weight.name or "output_linear" in weight.name


def is_gated(weight: Weight) -> bool:
    """Return True if gate and up projections of all experts are one matrix; experts of Nemotron have no gate."""
    return "gate_up" in weight.name or "input_linear" in weight.name


def expert_sizes(weight: Weight, architecture: Architecture, flags: Flags) -> tuple[int, int, int]:
    """Return the experts of one rank, their width there, and the hidden size, with the kernel's padding.

    Experts of Nemotron 3 Super have a separate hidden size, moe_latent_size.

    Source: vllm/model_executor/layers/quantization/mxfp4.py: Marlin pads the width to 128 and the hidden size to 256. Other
    kernels pad the width to 32.
    """
    ranks = flags.tp * flags.dp
    experts, width = weight.shape[0], architecture.expert_width
    hidden = architecture.hidden
    if hidden not in weight.shape[1:]:
        hidden = next((size for size in weight.shape[1:] if size not in (width, 2 * width)), hidden)
    here = -(-experts // ranks) if flags.ep else experts
    width = architecture.expert_width if flags.ep else -(-architecture.expert_width // ranks)
    if flags.expert_layout != "mxfp4":
        return here, width, hidden
    padding = 128 if flags.marlin else MXFP4_GROUP
    hidden = -(-hidden // 256) * 256 if flags.marlin else hidden
    return here, -(-width // padding) * padding, hidden


def is_vocabulary(weight: Weight, architecture: Architecture) -> bool:
    """Return True for the rows of the vocabulary, padded or not: the embedding and the head, and the embedding of each layer.

    The vocabulary of the latter is smaller in Gemma 3n, and that of the logits of an EAGLE-3 head.
    """
    if weight.name.endswith("embed_tokens_per_layer.weight"):
        return True
    named = weight.name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight", "embed_in.weight", "embed_out.weight"))
    same = len(weight.shape) == 2 and weight.shape[0] == architecture.vocabulary
    return (same and (named or "embed" in weight.name)) or (named and architecture.states_read > 0)


def _matches(pattern: str, name: str) -> bool:
    """Return True if a checkpoint excludes a layer: a name, a part of one, or a regular expression after "re:"."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name.removesuffix(".weight")) is not None
        except re.error:
            return False
    return pattern in name

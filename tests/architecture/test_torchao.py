"""torchao's optimizers: every byte of their states, and what is said of their compiled step; tensors of its quantized weights."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from sizer.architecture.layouts import layout_of
from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError, RequestError
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from tests.tracing.models import LLAMA

CONFIG = LLAMA | {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
QUERY = f"arch=config:{encode_config(json.dumps(CONFIG))}&dtype=bfloat16&batch=1&seq=16"
# Embeddings and head of 1000 × 256, three matrices of 512 × 256, q and o of 256 × 256, k and v of 64 × 256: nine tensors of
# at least 4,096 elements; three norms of 256, whose states are in bfloat16.
LARGE, TENSORS, SMALL = 2 * 1000 * 256 + 3 * 512 * 256 + 2 * 256 * 256 + 2 * 64 * 256, 9, 3 * 256
# Two states: a code of a byte for an element (half a byte), a scale for 256 of them (128), and a map of 256 values (16).
STATES = {
    "adamw-ao-8bit": 2 * (LARGE + LARGE // 256 * 4 + TENSORS * 256 * 4 + SMALL * 2),
    "adamw-ao-4bit": 2 * (LARGE // 2 + LARGE // 128 * 4 + TENSORS * 16 * 4 + SMALL * 2),
    "adamw-ao-fp8": 2 * (LARGE + LARGE // 256 * 4 + SMALL * 2),
}


@pytest.mark.parametrize("optimizer", list(STATES))
def test_every_byte_of_the_states_is_counted(optimizer: str) -> None:
    pytest.importorskip("torchao")
    found = estimate(parse_query(f"{QUERY}&optimizer={optimizer}"))
    assert not found.failures
    assert found.estimates[0].optimizer_bytes == STATES[optimizer]
    assert any("compiled step of torchao's AdamW" in line for line in found.uncounted)


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_a_package_that_is_not_there_is_named_before_anything_is_traced() -> None:
    with pytest.raises(BuildError, match="torchao is not installed: given optimizer=adamw-ao-8bit; pip install torchao"):
        estimate(parse_query(f"{QUERY}&optimizer=adamw-ao-8bit"))
    assert estimate(parse_query(f"{QUERY}&optimizer=adamw-ao-8bit&mode=inference")).estimates


@pytest.mark.parametrize("optimizer", list(STATES))
def test_they_are_for_one_cuda_device(optimizer: str) -> None:
    with pytest.raises(
        RequestError, match=f"optimizer: given '{optimizer}' with gpu=cpu, allowed PyTorch's own; on a CUDA device also those of t"
    ):
        parse_query(f"{QUERY}&optimizer={optimizer}&gpu=cpu")
    with pytest.raises(RequestError, match="allowed PyTorch's own: shards in torchao were not compared"):
        parse_query(f"{QUERY}&optimizer={optimizer}&parallel=ddp")


WEIGHTS = [
    *(("Int8WeightOnlyConfig", {"granularity": one}) for one in (("PerRow",), ("PerTensor",), ("PerGroup", 64))),
    *(("Float8WeightOnlyConfig", {"granularity": one}) for one in (("PerRow",), ("PerTensor",), ("PerGroup", 64))),
    *(("Int8DynamicActivationInt8WeightConfig", {"granularity": one}) for one in (("PerRow",), ("PerTensor",))),
    ("Float8WeightOnlyConfig", {"weight_dtype": torch.float8_e5m2}),
    ("IntxWeightOnlyConfig", {}),
    (
        "IntxWeightOnlyConfig",
        {"weight_dtype": torch.int4, "granularity": ("PerGroup", 32), "scale_dtype": torch.float32},
    ),
    ("Int8DynamicActivationIntxWeightConfig", {"weight_dtype": torch.int4}),
    (
        "Int8DynamicActivationIntxWeightConfig",
        {"weight_granularity": ("PerAxis", 0), "weight_scale_dtype": torch.float16},
    ),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "options"), WEIGHTS)
def test_a_layer_has_the_tensors_that_torchao_saves(name: str, options: dict, dtype: torch.dtype) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    made = {
        key: getattr(quantization, one[0])(*one[1:]) if isinstance(one, tuple) else one for key, one in options.items()
    }
    config = getattr(quantization, name)(**made)
    layer = nn.Sequential(nn.Linear(256, 96, bias=False, dtype=dtype))
    quantization.quantize_(layer, config)
    saved, _ = flatten_tensor_state_dict(layer.state_dict())
    layout = layout_of("torchao", {"quant_type": {"default": config_to_dict(config)}}, 96, 256, dtype)
    theirs = {key.removeprefix("0._weight_"): (tuple(tensor.shape), tensor.dtype) for key, tensor in saved.items()}
    assert layout == theirs


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 2048), (100, 1536)])
def test_tiles_of_4_bits_are_padded_as_for_the_kernel(outputs: int, inputs: int) -> None:
    """The product's own operator says what a packed weight is like; torchao packs it on a GPU alone."""
    config = {"group_size": 64, "int4_packing_format": {"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"}}
    settings = {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": config}}}
    layout = layout_of("torchao", settings, outputs, inputs, torch.bfloat16)
    high, wide = -(-outputs // 8) * 8, -(-inputs // 1024) * 1024
    packed = torch.ops.aten._convert_weight_to_int4pack(
        torch.empty(high, wide // 2, dtype=torch.uint8, device="meta"), 8
    )
    assert layout["qdata"] == (tuple(packed.shape), packed.dtype)
    assert layout["scale_and_zero"] == ((wide // 64, high, 2), torch.bfloat16)

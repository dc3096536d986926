"""AMD Quark's checkpoints: which layers, and every tensor of theirs, as transformers holds them.

quark_layers.json was recorded from amd-quark 0.13 with transformers 5.23 and torch 2.15: a bfloat16 Llama of one layer (width 256,
384 inside, 4 heads, 2 key heads) was quantized by quark, saved by its `export_safetensors` and loaded by `from_pretrained`. A row
has what its config.json says of the quantized tensors, and what two of the layers then hold. The package is no part of the tests:
it brings ONNX and others with it, and compiles where it is imported.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from sizer.architecture import make_blueprint
from sizer.architecture.loading import resolve_weights
from sizer.architecture.packed_layers import PackedExperts, PackedLinear, pack
from sizer.architecture.quantization_settings import Quantization
from sizer.architecture.quark_settings import layer_config
from sizer.base.config_json import encode_config
from sizer.base.errors import ConfigError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.query.text import parse_query
from sizer.tracing.trace import build
from tests.tracing.models import LLAMA, MIXTRAL

ROWS = json.loads(Path(__file__).with_name("quark_layers.json").read_text())
CONFIG = LLAMA | {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "num_key_value_heads": 2}
CONFIG |= {"num_attention_heads": 4, "head_dim": 64, "vocab_size": 128, "tie_word_embeddings": False}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
INT4 = {"dtype": "int4", "qscheme": "per_group", "ch_axis": 1, "group_size": 128}
PLAIN = {"global_quant_config": {"weight": FP8}}


def packed(settings: dict, config: dict = CONFIG) -> nn.Module:
    module = build(make_blueprint(parse_query(f"arch=config:{encode_config(json.dumps(config))}&mode=inference")))
    return pack(module, "bfloat16", Quantization(method="quark", settings=settings, dtype="bfloat16"))


@pytest.mark.parametrize("row", [pytest.param(row, id=row["name"]) for row in ROWS])
def test_a_layer_holds_what_transformers_holds_of_it(row):
    module = packed(row["settings"], CONFIG | {"attention_bias": row["bias"]})
    layers = module.model.layers[0].state_dict()
    found = {
        name: [list(one.shape), str(one.dtype).removeprefix("torch.")]
        for name, one in layers.items()
        if "k_proj" in name or "down_proj" in name
    }
    assert found == row["held"]


def test_a_layers_config_is_that_of_the_first_pattern_of_its_path_and_left_out_it_stays_as_it_was():
    settings = {
        "global_quant_config": {"weight": FP8},
        "layer_type_quant_config": {"Linear": {"weight": FP8 | {"dtype": "fp8_e5m2"}}},
        "layer_quant_config": {"*.mlp.*": {"weight": INT4}, "*.mlp.up_proj": {"weight": FP8}},
        "exclude": ["lm_head", "*.self_attn.?_proj"],
    }
    module = packed(settings)
    kinds = {
        name.rpartition(".")[2]: one.weight.dtype for name, one in module.named_modules() if hasattr(one, "weight")
    }
    assert [kinds[f"{name}_proj"] for name in ("gate", "up", "down")] == 3 * [torch.int32]
    assert [kinds[name] for name in ("q_proj", "o_proj", "lm_head")] == 3 * [torch.bfloat16]
    assert layer_config(settings, "model.vision.fc1")["weight"]["dtype"] == "fp8_e5m2"
    without_types = settings | {"layer_type_quant_config": None}  # as quark wrote it before 1.0
    assert layer_config(without_types, "model.vision.fc1")["weight"] == FP8


def test_experts_are_linear_layers_of_their_own():
    config = MIXTRAL | {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256}
    experts = (
        packed({"global_quant_config": {"weight": INT4}, "exclude": ["lm_head", "*.gate"]}, config)
        .model.layers[0]
        .mlp.experts
    )
    assert isinstance(experts, PackedExperts)
    count = config["num_local_experts"]
    weights = 3 * 128 * 256  # half a byte each, and for 128 of them four bytes and half of one
    assert sum(one.nbytes for one in experts.parameters()) == count * (
        weights // 2 + weights // 128 * 4 + weights // 128 // 2
    )
    left = packed({"global_quant_config": {"weight": FP8}, "exclude": ["*.experts.*"]}, config)
    assert not any(isinstance(one, PackedExperts) for one in left.modules())
    assert any(isinstance(one, PackedLinear) for one in left.modules())


UNKNOWN = {
    "int3": ({"weight": FP8 | {"dtype": "int3"}}, {}, "'int3' weights 'per_tensor'"),
    "fp8 in groups": ({"weight": FP8 | {"qscheme": "per_group"}}, {}, "'fp8_e4m3' weights 'per_group'"),
    "no text": ({"weight": {"dtype": ["int8"]}}, {}, r"\['int8'\] weights None"),
    "stages": ({"weight": [FP8, INT4]}, {}, "weights that are quantized in stages"),
    "when asked for": (
        {"weight": FP8 | {"is_dynamic": True}},
        {},
        "weights that are quantized on use",
    ),
    "zeros": ({"weight": INT4 | {"zero_point_type": "float32"}}, {}, "zero points of 'float32'"),
    "scales": ({"weight": INT4 | {"scale_format": "e5m3"}}, {}, "scales in 'e5m3'"),
    "biases": ({"weight": FP8, "bias": FP8}, {}, "biases that are quantized"),
    "inputs": (
        {"weight": FP8, "input_tensors": FP8 | {"qscheme": "per_channel"}},
        {},
        "input_tensors with separate scales 'per_channel'",
    ),
    "of a layer": ({"weight": FP8}, {"layer_quant_config": {"x": {"weight": [FP8]}}}, "quantized in stages"),
    "a cache": (
        {"weight": FP8},
        {"kv_cache_quant_config": {"x": {"output_tensors": FP8 | {"qscheme": "per_group"}}}},
        "output_tensors with separate scales 'per_group'",
    ),
    "rotation": (
        {"weight": FP8},
        {"algo_config": [{"name": "rotation", "r4": True}]},
        "layers that rotate their inputs",
    ),
    "format": ({"weight": FP8}, {"export": {"weight_format": "fake_quantized"}}, "weight_format 'fake_quantized'"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_has_no_known_layout_is_counted_unquantized_and_named(case):
    everywhere, others, reason = UNKNOWN[case]
    asked = {"quant_method": "quark", "global_quant_config": everywhere, **others}
    encoded = encode_config(json.dumps(CONFIG | {"quantization_config": asked}))
    request = parse_query(f"arch=config:{encoded}&mode=inference&gpu=h100-80gb")
    loaded = resolve_weights(request, find_gpu("h100-80gb"))
    assert loaded.request.weights == "full"
    blueprint = make_blueprint(request, loaded=loaded)
    assert not any("own tensors take" in line for line in blueprint.describe(build(blueprint)))
    assert re.search(rf"Quark; they are counted unquantized: no layout of .*{reason}.* is known", loaded.cautions[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "global_quant_config = None, allowed a config of quark's"),
        (PLAIN | {"exclude": "lm_head"}, "exclude = 'lm_head', allowed a list of names"),
        (PLAIN | {"layer_quant_config": {"x": 4}}, "allowed configs by name"),
        ({"global_quant_config": {"weight": 4}}, "malformed: given 4, allowed how a tensor is quantized"),
        (
            {"global_quant_config": {"weight": INT4 | {"group_size": 96}}},
            "group_size = 96 for 256 inputs, allowed a divisor",
        ),
        ({"global_quant_config": {"weight": FP8 | {"qscheme": "per_channel"}}}, "ch_axis = None, allowed 0, 1, -1"),
    ],
)
def test_what_quark_did_not_write_is_refused(settings, message):
    asked = settings | {"quant_method": "quark"}
    encoded = encode_config(json.dumps(CONFIG | {"quantization_config": asked}))
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(make_blueprint(parse_query(f"arch=config:{encoded}&mode=inference&gpu=h100-80gb")), dtype="bfloat16")

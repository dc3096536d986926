"""Checkpoints whose config has a `quantization_config`: what is loaded, its bytes, and what is said where it is not counted so."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import nn

from sizer.architecture import make_blueprint
from sizer.architecture.compressed_layouts import is_target
from sizer.architecture.layouts import LAYOUTS, layout_of
from sizer.architecture.loading import resolve_weights
from sizer.architecture.module_census import take_census
from sizer.architecture.packed_layers import DequantizedLinear, checkpoint_bytes
from sizer.architecture.quantization_settings import Quantization, checked_pattern, quantization_of
from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError, ConfigError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.weights import METHODS as CHECKPOINT_METHODS
from sizer.estimating.custom import size_module
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from sizer.report.advice import caveats
from sizer.tracing.trace import build
from tests.tracing.models import LLAMA, MIXTRAL

# Two layers of 256: q and o of 256 × 256, k and v of 128 × 256, three of 512 × 256.
SMALL = LLAMA | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_key_value_heads": 2}
SMALL |= {"num_attention_heads": 4, "vocab_size": 1000, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
SHAPES = 2 * [(256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512)]
LINEAR = sum(outputs * inputs for outputs, inputs in SHAPES)
REST = 2 * 1000 * 256 + 5 * 256  # embeddings, the head, norms
GPT_OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 64, "intermediate_size": 96}
GPT_OSS |= {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
}
GPT_OSS |= {"num_local_experts": 4, "num_experts_per_tok": 2}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
INT4 = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"group_size": 128}}
FP4_BY_32 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
BY_ROW = {
    "_type": "Int8WeightOnlyConfig",
    "_version": 2,
    "_data": {"granularity": {"_type": "PerRow", "_data": {"dim": -1}}},
}
METHODS = {
    "awq": {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "bitnet": {},
    "eetq": {},
    "fbgemm_fp8": {"modules_to_not_convert": ["lm_head"]},
    "gemma": {
        "num_bits": 4,
        "module_quant_configs": {r"mlp\.down": {"num_bits": 2}},
        "modules_to_not_convert": ["lm_head"],
    },
    "higgs": {"bits": 4, "group_size": 256},
    "hqq": {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}, "skip_modules": ["lm_head"]},
    "quanto": {"weights": "int8"},
    "aqlm": {"nbits_per_codebook": 8, "in_group_size": 8, "linear_weights_not_to_quantize": ["lm_head.weight"]},
    "compressed-tensors": {
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    },
    "torchao": {"quant_type": {"default": INT4}},
    "quark": {"global_quant_config": {"weight": FP4_BY_32}, "exclude": ["lm_head"]},
    "auto-round": {"bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"},
    "mxfp8": {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
    "vptq": {
        "modules_to_not_convert": ["lm_head"],
        "shared_layer_config": {
            name: {
                "vector_lens": [-1, 8],
                "num_centroids": [-1, 65536],
                "num_res_centroids": [-1, 256],
                "group_num": 1,
                "group_size": 512 if name == "down_proj" else 256,
            }
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        },
    },
    "spqr": {
        "bits": 3,
        "modules_to_not_convert": ["lm_head"],
        "shapes": {
            f"model.layers.{number}.{path}.{tensor}.shape": size
            for number in range(2)
            for path in (
                *(f"self_attn.{one}_proj" for one in "qkvo"),
                *(f"mlp.{one}_proj" for one in ("gate", "up", "down")),
            )
            for tensor, size in {"dense_weights": 100, "row_offsets": 30, "col_vals": 20, "in_perm": 10}.items()
        },
    },
}
INFERENCE = "mode=inference&dtype=bfloat16&batch=1&seq=64&gpu=h100-80gb"


def arch(method: str | None, config: dict = SMALL, **settings: object) -> str:
    asked = (
        {} if method is None else {"quantization_config": METHODS.get(method, {}) | {"quant_method": method} | settings}
    )
    return f"arch=config:{encode_config(json.dumps(config | asked))}"


def made(query: str, dtype: str = "bfloat16") -> nn.Module:
    return build(make_blueprint(parse_query(query)), dtype=dtype)


def settings_of(method: str) -> Quantization:
    return Quantization(method=method, settings=METHODS[method], dtype="bfloat16")


# AWQ: half a byte for a weight, and for 128 of them a zero of half a byte and a scale of two. GPTQ: the same, and the group of each
# input. Twice quantized NF4: see test_quantization. FP8: a byte, and four for a block of 128 × 128. EETQ: a byte, two for an
# output. HQQ: half a byte, and for 64 weights a scale and a zero of two each. BitNet: a quarter, and one scale.
BYTES = {
    "awq": LINEAR // 2 + LINEAR // 128 // 2 + LINEAR // 128 * 2,
    "gptq": LINEAR // 2 + LINEAR // 128 // 2 + LINEAR // 128 * 2 + sum(inputs for _, inputs in SHAPES) * 4,
    "bitsandbytes": LINEAR // 2 + sum(o * i // 64 + -(-(o * i // 64) // 256) * 4 + 16 * 4 + 256 * 4 for o, i in SHAPES),
    "fp8": LINEAR + LINEAR // 128**2 * 4,
    "eetq": LINEAR + sum(outputs for outputs, _ in SHAPES) * 2,
    "hqq": LINEAR // 2 + LINEAR // 64 * 4,
    "bitnet": LINEAR // 4 + 14 * 2,
    "aqlm": LINEAR // 8 + 14 * 256 * 8 * 2 + sum(outputs for outputs, _ in SHAPES) * 2,
    "compressed-tensors": LINEAR // 2 + LINEAR // 128 * 2 + 14 * 2 * 8,
    "torchao": LINEAR // 2 + LINEAR // 128 * 4,  # a scale and a zero of two bytes for 128 weights
    "quark": LINEAR // 2 + LINEAR // 32,
    # half a byte, of down_proj's a quarter, four for an output, and two scales
    "gemma": LINEAR // 2 - 2 * 256 * 512 // 4 + sum(outputs for outputs, _ in SHAPES) * 4 + 14 * 8,
    # GPTQ's without the groups; a byte, and one for 32 weights
    "auto-round": LINEAR // 2 + LINEAR // 128 // 2 + LINEAR // 128 * 2,
    "mxfp8": LINEAR + LINEAR // 32,
    # VPTQ: for 8 weights 16 bits that name a centroid of 65,536 and 8 that name one of 256, of 8 numbers each; for each input a
    # scale, a bias and its place. SpQR: as the config says.
    "vptq": LINEAR // 8 * 3 + 14 * (65536 + 256) * 8 * 2 + sum(inputs for _, inputs in SHAPES) * 6,
    "spqr": 14 * (100 * 8 + 60 * 4),
}


@pytest.mark.parametrize("method", list(BYTES))
def test_the_tensors_of_a_checkpoint_have_the_bytes_of_their_layout(method):
    module = made(f"{arch(None)}&mode=inference")
    assert checkpoint_bytes(module, settings_of(method), torch.bfloat16) == BYTES[method] + 2 * REST


@pytest.mark.parametrize(
    "method",
    [
        "awq",
        "gptq",
        "eetq",
        "hqq",
        "bitnet",
        "aqlm",
        "auto-round",
        "mxfp8",
        "vptq",
        "spqr",
        "torchao",
        "quark",
        "gemma",
    ],
)
def test_an_estimate_holds_a_checkpoints_weights_by_their_layout(method):
    found = estimate(parse_query(f"{arch(method)}&{INFERENCE}"))
    assert found.estimates[0].weights_bytes == BYTES[method] + 2 * REST
    assert found.model.parameters == LINEAR + REST
    assert any("its kernels are not traced" in line for line in caveats(found))


def test_every_method_has_a_layout():
    assert set(CHECKPOINT_METHODS) == set(LAYOUTS)
    assert quantization_of(parse_query(f"{arch('awq')}&mode=inference"), None) == settings_of("awq")


def test_every_method_that_transformers_knows_is_counted_or_named_as_one_that_is_not():
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    known = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING}
    assert known - set(CHECKPOINT_METHODS) == {"fouroversix", "fp_quant", "gguf", "metal", "nvfp4", "sinq"}
    assert set(CHECKPOINT_METHODS) - {"modelopt"} <= known  # NVIDIA's, which servers load


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
MIXED = {
    "attention": {
        "targets": ["re:.*self_attn.*"],
        "format": "float-quantized",
        "weights": FLOAT | {"strategy": "channel"},
    },
    "others": {
        "targets": ["Linear"],
        "format": "mxfp4-pack-quantized",
        "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
    },
}
ATTENTION = sum(outputs * inputs for outputs, inputs in SHAPES if outputs != 512 and inputs != 512)
COMPRESSED = {
    # a scale of two bytes for each block of 128 × 128
    "blocks": (
        {"format": "float-quantized", "weights": FLOAT | {"strategy": "block", "block_structure": [128, 128]}},
        LINEAR + LINEAR // 128**2 * 2,
    ),
    "MXFP8": (
        {"format": "mxfp8-quantized", "weights": FLOAT | {"strategy": "group", "group_size": 32}},
        LINEAR + LINEAR // 32,
    ),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_formats_of_compressed_tensors(name):
    group, size = COMPRESSED[name]
    settings = {"ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], **group}}}
    quantization = Quantization(method="compressed-tensors", settings=settings, dtype="bfloat16")
    assert checkpoint_bytes(made(f"{arch(None)}&mode=inference"), quantization, torch.bfloat16) == size + 2 * REST


def test_groups_of_layers_are_packed_each_in_its_own_way():
    settings = {"ignore": ["lm_head"], "config_groups": MIXED}
    quantization = Quantization(method="compressed-tensors", settings=settings, dtype="bfloat16")
    # attention: a byte, and two for each of q's, k's, v's and o's outputs; the others: half a byte, and one for 32 weights
    attention = ATTENTION + 2 * (256 + 128 + 128 + 256) * 2
    others = (LINEAR - ATTENTION) // 2 + (LINEAR - ATTENTION) // 32
    found = checkpoint_bytes(made(f"{arch(None)}&mode=inference"), quantization, torch.bfloat16)
    assert found == attention + others + 2 * REST


def test_layers_that_torchao_names_have_configs_of_their_own():
    named = {"_default": INT4, r"re:model\.layers\.\d+\.mlp\..*": None, "model.layers.0.mlp.up_proj": BY_ROW}
    settings = {"quant_type": {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": named}}}}
    quantization = Quantization(method="torchao", settings=settings, dtype="bfloat16")
    found = checkpoint_bytes(made(f"{arch(None)}&mode=inference"), quantization, torch.bfloat16)
    up = 512 * 256 + 512 * (4 + 1)  # a byte for a weight, a scale of four and a zero of one for an output
    left = LINEAR - ATTENTION - 512 * 256
    assert found == ATTENTION // 2 + ATTENTION // 128 * 4 + up + 2 * left + 2 * REST


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("int4_weight_only", "quant_type = 'int4_weight_only', allowed {default: a config of torchao's}"),
        ({"default": {"_type": "NVFP4InferenceConfig", "_version": 2, "_data": {}}}, "weights is known: given NVFP4"),
        ({"default": INT4 | {"_version": 1}}, "Int4WeightOnlyConfig of version 1, allowed version 2"),
        ({"default": INT4 | {"_data": {"group_size": 0}}}, "group_size = 0, allowed 1 and more"),
        ({"default": BY_ROW | {"_data": {"granularity": {"_type": "PerBlock", "_data": {}}}}}, "given PerBlock"),
    ],
)
def test_what_torchao_does_with_a_config_is_known_or_refused(config, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        layout_of("torchao", {"quant_type": config}, 256, 256, torch.bfloat16)


def test_layers_of_auto_round_have_settings_of_their_own():
    whole = made(f"{arch(None)}&mode=inference")
    plain = checkpoint_bytes(whole, settings_of("auto-round"), torch.bfloat16)
    settings = METHODS["auto-round"] | {
        "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}, "lm_head": {"bits": 8}}
    }
    found = checkpoint_bytes(
        whole, Quantization(method="auto-round", settings=settings, dtype="bfloat16"), torch.bfloat16
    )
    up, head = 512 * 256, 1000 * 256
    packed = up // 2 + up // 128 // 2 + up // 128 * 2
    assert found - plain == 2 * up - packed + head + head // 128 + head // 128 * 2 - 2 * head


def layer(name: str) -> nn.Module:
    """One of transformers' own layers of 512 × 1024 on meta, in bfloat16."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # BitLinear compiles a function, at which PyTorch 2.11 uses what it deprecates itself
        from transformers.integrations import bitnet, eetq, fbgemm_fp8, finegrained_fp8, gemma_quant, higgs

    sides = {"in_features": 1024, "out_features": 512}
    with torch.device("meta"):
        return {
            "bitnet": lambda: bitnet.BitLinear(**sides, bias=False, dtype=torch.bfloat16),
            "eetq": lambda: eetq.EetqLinear(**sides),
            "fbgemm_fp8": lambda: fbgemm_fp8.FbgemmFp8Linear(**sides, bias=False),
            "fp8": lambda: finegrained_fp8.FP8Linear(**sides, block_size=(128, 128)),
            "mxfp8": lambda: finegrained_fp8.FP8Linear(**sides, block_size=(1, 32), scale_fmt="ue8m0"),
            "gemma": lambda: gemma_quant.QuantizedLinear(**sides, num_bits=4),
            "higgs": lambda: higgs.HiggsLinear(**sides, num_bits=4, bias=False, dtype=torch.bfloat16),
        }[name]()


@pytest.mark.parametrize("method", ["bitnet", "eetq", "fbgemm_fp8", "fp8", "gemma", "higgs", "mxfp8"])
def test_a_layout_is_that_of_transformers_own_layer(method):
    own = {name: (tuple(one.shape), one.dtype) for name, one in layer(method).state_dict().items()}
    assert layout_of(method, METHODS[method], 512, 1024, torch.bfloat16) == own


def test_packed_experts_are_those_of_transformers():
    found = made(f"{arch('mxfp4', GPT_OSS)}&mode=inference&gpu=h100-80gb")
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    with torch.device("meta"):
        own = Mxfp4GptOssExperts(found.config)
    held = sum(one.nbytes for one in found.model.layers[0].mlp.experts.parameters())
    # a scale for each 32 weights of 4 experts: 2 × 96 × 64 and 64 × 96; Mxfp4Deserialize swizzles them out of the parameters
    assert held == sum(one.nbytes for one in own.parameters()) + 4 * 3 * 96 * 64 // 32


def test_a_kernel_of_packed_experts_has_no_activation_beside_it():
    experts = made(f"{arch('mxfp4', GPT_OSS)}&mode=inference&gpu=h100-80gb").model.layers[0].mlp.experts
    inputs = (torch.zeros(512, 64), torch.zeros(512, 2, dtype=torch.int64), torch.zeros(512, 2))
    (found,) = size_module(lambda: experts, inputs, mode="inference", gpu="h100-80gb").estimates
    # of each of 1,024 chosen: 96 inside, 64 that are not summed yet; of each of 512 tokens the sum of 64
    beside = 4 * (1024 * 96 + 1024 * 64 + 512 * 64)
    assert found.at_peak["activation"] + found.at_peak["temporary"] == beside


def test_experts_are_packed_one_by_one():
    config = MIXTRAL | {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256, "torch_dtype": "bfloat16"}
    whole, packed = made(f"{arch(None, config)}&mode=inference"), made(f"{arch('awq', config)}&mode=inference")
    experts = whole.model.layers[0].mlp.experts
    weights = sum(one.numel() for one in experts.parameters())
    held = sum(one.nbytes for one in packed.model.layers[0].mlp.experts.parameters())
    assert held == weights // 2 + weights // 128 // 2 + weights // 128 * 2
    assert estimate(parse_query(f"{arch('awq', config)}&{INFERENCE}")).estimates[0].peak_allocated_bytes > 0


def test_weights_that_arrive_quantized_are_those_that_are_quantized_as_they_arrive():
    pytest.importorskip("bitsandbytes")
    loaded = made(f"{arch('bitsandbytes', llm_int8_skip_modules=['lm_head'])}&mode=inference")
    quantized = made(f"{arch(None)}&mode=inference&weights=nf4-dq")
    census = take_census(loaded, name="small")
    assert census == take_census(quantized, name="small")
    assert (
        census.parameter_bytes == BYTES["bitsandbytes"] + 14 * 4 + 2 * REST
    )  # the offset comes from among the numbers


REASONS = {
    "dtype=bfloat16": ("awq", "quantized weights are not trained"),
    "train=head": ("fp8", "quantized weights are not trained"),
    "train=adapter": ("awq", "adapters on such weights cannot be traced"),
    "train=adapter&adapter=dora": ("gptq", "on such weights only adapter=lora and rslora are traced"),
    "train=adapter&dtype=bfloat16&batch=1&compile=default": ("gptq", "compiled training with such weights is not traced"),
    "mode=inference&gpu=t4": ("fp8", "the Tesla T4 (16 GB) does not compute with them, and transformers makes them"),
    "mode=inference&gpu=m2-ultra-64gb": ("awq", "their kernels are only known for CUDA devices"),
    "mode=inference": ("compressed-tensors", "transformers makes them 16 bits in the first forward pass"),
    "mode=inference&batch=1": ("fp_quant", "no layout of this method is known"),
}
# As microsoft/bitnet-b1.58-2B-4T and older checkpoints of torchao write them.
VARIANTS = {
    "bitnet": ({"linear_class": "autobitlinear", "quantization_mode": "offline"}, "transformers makes them 16 bits as it loads"),
    "torchao": ({"quant_type": "int4_weight_only"}, "transformers no longer loads torchao's 'int4_weight_only'"),
}


@pytest.mark.parametrize("query", list(REASONS))
def test_weights_that_are_not_counted_as_they_are_say_why(query):
    method, reason = REASONS[query]
    request = parse_query(f"{arch(method)}&{query}")
    loaded = resolve_weights(request, find_gpu(request.gpu))
    assert loaded.request.weights == "full"
    (told,) = loaded.cautions
    assert f"they are counted unquantized: {reason}" in told


@pytest.mark.parametrize("method", list(VARIANTS))
def test_a_variant_that_transformers_does_not_hold_quantized_says_why(method):
    settings, reason = VARIANTS[method]
    request = parse_query(f"{arch(method, **settings)}&mode=inference")
    loaded = resolve_weights(request, find_gpu(request.gpu))
    assert loaded.request.weights == "full"
    assert f"they are counted unquantized: {reason}" in loaded.cautions[0]


def test_layers_of_gptq_have_settings_of_their_own():
    whole = made(f"{arch(None)}&mode=inference")
    plain = checkpoint_bytes(whole, settings_of("gptq"), torch.bfloat16)
    dynamic = {"-:.*down_proj": {}, "+:.*0.self_attn.o_proj": {"bits": 8}}
    settings = Quantization(method="gptq", settings=METHODS["gptq"] | {"dynamic": dynamic}, dtype="bfloat16")
    down, out = 2 * 256 * 512, 256 * 256  # two layers' down_proj stay in 16 bits, an o_proj has 8 for 4
    packed = down // 2 + down // 128 // 2 + down // 128 * 2 + 2 * 512 * 4
    more = out // 2 + out // 128 // 2
    assert checkpoint_bytes(whole, settings, torch.bfloat16) - plain == 2 * down - packed + more


def test_auto_rounds_older_name_and_key_are_read():
    now, before = (
        quantization_of(parse_query(f"{arch(name, **words)}&mode=inference"), None)
        for name, words in (("auto-round", {}), ("intel/auto-round", {"backend": "auto_round:awq"}))
    )
    assert now.method == before.method == "auto-round"
    whole = made(f"{arch(None)}&mode=inference")
    awq = LINEAR // 2 + LINEAR // 128 // 2 + LINEAR // 128 * 2
    settings = Quantization(method="auto-round", settings={**METHODS["auto-round"], "backend": "auto_round:awq"}, dtype="bfloat16")
    assert checkpoint_bytes(whole, settings, torch.bfloat16) == awq + 2 * REST


@pytest.mark.parametrize(
    ("query", "told"),
    [
        (
            "mode=generate&gpu=rtx-4090",
            "the weights have the checkpoint's format, MXFP4, and its kernels are not traced",
        ),
        ("gpu=rtx-4090", "they are counted unquantized: quantized weights are not trained"),
        ("mode=inference&gpu=v100-32gb", "(32 GB) does not compute with them, and transformers makes them 16 bits"),
        (
            "train=adapter&weights=nf4",
            "this checkpoint is MXFP4, and transformers does not requantize it: the figures",
        ),
        ("mode=inference&weights=full", None),
    ],
)
def test_what_is_loaded_of_a_preset_whose_checkpoint_is_quantized_is_said(query, told):
    request = parse_query(f"arch=hf:gpt-oss-20b&{query}")
    cautions = resolve_weights(request, find_gpu(request.gpu)).cautions
    assert [told in caution for caution in cautions] == ([] if told is None else [True])


def test_an_adapter_trains_beside_weights_in_gptq():
    pytest.importorskip("peft")
    training = "dtype=bfloat16&batch=1&seq=64&train=adapter&optimizer=sgd"
    found, full = (estimate(parse_query(f"{arch('gptq')}&{training}{more}")) for more in ("", "&weights=full"))
    (held,), (whole,) = found.estimates, full.estimates
    assert whole.weights_bytes - held.weights_bytes == 2 * LINEAR - BYTES["gptq"]
    assert held.gradients_bytes == whole.gradients_bytes > 0  # all-linear adapts the same layers
    # Without checkpointing the weights of all layers wait in 16 bits for the backward pass, as autograd keeps what multiplies; not
    # those of q, k and v in the first layer, whose input needs no gradient.
    assert held.activations_bytes - whole.activations_bytes == 2 * (LINEAR - (256 + 2 * 128) * 256)
    assert any("as gptqmodel's code does" in told for told in found.cautions)


def test_a_dequantized_layer_multiplies_in_training_alone():
    layer = DequantizedLinear(32, 16, {"scales": ((1, 32), torch.float16)}, nn.Parameter(torch.empty(32, device="meta")))
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.shape) or one, lambda one: one):
        result = layer(torch.empty(2, 8, 16, device="meta", requires_grad=True))
    assert (result.shape, result.requires_grad) == ((2, 8, 32), True)
    assert torch.Size((32, 16)) in kept or torch.Size((16, 32)) in kept
    assert not layer.eval()(torch.empty(2, 8, 16, device="meta", requires_grad=True)).requires_grad


def test_experts_in_gptq_do_not_train():
    pytest.importorskip("peft")
    with pytest.raises(BuildError, match=r"quantized experts is not traced: given 'train=adapter with MixtralFor.*weights=full"):
        made(f"{arch('gptq', MIXTRAL)}&train=adapter")


def test_what_is_not_counted_so_is_still_said():
    found = estimate(parse_query(f"{arch('compressed-tensors')}&{INFERENCE}"))
    full = estimate(parse_query(f"{arch('compressed-tensors')}&{INFERENCE}&weights=full"))
    assert found.estimates == full.estimates
    assert "The checkpoint's own tensors take 1.64 MB (1.56 MiB): compressed-tensors, the rest in bfloat16." in found.notes
    assert not full.cautions


def test_quantization_is_found_where_transformers_looks_for_it():
    settings = {"quant_method": "awq", "bits": 4}
    inside = {"model_type": "llava", "text_config": {"torch_dtype": "float16", "quantization_config": settings}}
    found = Quantization(method="awq", settings={"bits": 4}, dtype="float16")
    assert quantization_of(parse_query("arch=hub:a/b"), inside) == found
    assert quantization_of(parse_query("arch=hub:a/b"), {"model_type": "llama", "quantization_config": None}) is None
    assert quantization_of(parse_query("arch=hf:gpt2"), None) is None


MALFORMED = {
    "no object": ([4], "quantization_config is malformed"),
    "too deep": ({"quant_method": "awq", "x": [[[[[[[[[[[1]]]]]]]]]]]}, "10 levels"),
    "bits": ({"quant_method": "gptq", "bits": "4"}, "bits = '4', allowed 2, 3, 4, 8"),
    "group": ({"quant_method": "awq", "group_size": 0}, "group_size = 0"),
    "pattern": ({"quant_method": "awq", "modules_to_not_convert": ["("]}, r"modules_to_not_convert: '\('"),
    "sides": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size = \[0, 128\]"),
    "pattern of FP8": ({"quant_method": "fp8", "modules_to_not_convert": ["("]}, r"modules_to_not_convert: '\('"),
    "a dtype": (
        {"load_in_4bit": True, "bnb_4bit_compute_dtype": "load"},
        "transformers refuses this quantization_config",
    ),
    "blocks": ({"quant_method": "quanto", "weights": "int3"}, "weights = 'int3'"),
    "packing": (
        {"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"},
        "data_type = 'mx_fp', allowed gptq or awq",
    ),
    "a layer's own": ({"quant_method": "auto-round", "bits": 4, "extra_config": {"x": 4}}, "allowed settings by layer"),
    "shapes": ({"quant_method": "spqr"}, "dense_weights.shape = None, allowed a whole number"),
    "embeddings": ({"quant_method": "gemma", "quantize_embeddings": True}, "quantize_embeddings = true, allowed false"),
    "a pattern of Gemma's": (
        {"quant_method": "gemma", "module_quant_configs": {"(": {"num_bits": 2}}},
        r"module_quant_configs: '\('",
    ),
    "no layer": ({"quant_method": "vptq"}, "nothing of 'model.layers.0.self_attn.q_proj'"),
    "centroids": (
        {"quant_method": "vptq", "shared_layer_config": {"q_proj": {"vector_lens": [8]}}},
        r"vector_lens = \[8\], allowed two numbers",
    ),
}


@pytest.mark.parametrize("case", list(MALFORMED))
def test_what_no_quantizer_wrote_is_refused(case):
    settings, reason = MALFORMED[case]
    if "load_in_4bit" in settings:
        pytest.importorskip("bitsandbytes")
    query = f"arch=config:{encode_config(json.dumps(SMALL | {'quantization_config': settings}))}&mode=inference&gpu=h100-80gb"
    with pytest.raises(ConfigError, match=reason):
        made(query)


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(BuildError, match="no layer that its checkpoint quantizes: given 'mxfp4' with LlamaForCausalLM"):
        made(f"{arch('mxfp4')}&mode=inference")


def test_packed_layers_compute_nothing_on_a_device():
    blueprint = make_blueprint(parse_query(f"{arch('awq')}&mode=inference"))
    with pytest.raises(BuildError, match="given a checkpoint's weights on cuda"):
        blueprint.load(nn.Module(), "cuda")


@pytest.mark.parametrize("settings", [{"bits": 4, "group_size": 64}, {"quant_algo": "FP8"}, {"quant_method": "of_tomorrow"}])
def test_what_no_known_method_wrote_is_counted_unquantized_with_a_warning(settings):
    cell = "mode=inference&dtype=bfloat16&batch=1&gpu=h100-80gb"
    report, plain = (
        estimate(parse_query(f"arch=config:{encode_config(json.dumps(config))}&{cell}"))
        for config in (SMALL | {"quantization_config": settings}, SMALL)
    )
    assert report.estimates[0].weights_bytes == plain.estimates[0].weights_bytes
    assert any("they are counted unquantized" in text for text in report.cautions)


def test_what_mlx_wrote_under_its_own_key_is_counted_unquantized_with_a_warning():
    request = parse_query(f"arch=config:{encode_config(json.dumps(SMALL | {'quantization': {'bits': 4, 'group_size': 64}}))}")
    (told,) = resolve_weights(request, find_gpu(request.gpu)).cautions
    assert "they are counted unquantized" in told


# Per weight: FP4 in bytes and an FP8 scale for 16 of them, or one byte; two float32 scales of a layer.
@pytest.mark.parametrize(("algorithm", "eighths"), [("NVFP4", 4.5), ("FP8", 8)])
@pytest.mark.parametrize("named", [{"quant_method": "modelopt"}, {"producer": {"name": "modelopt", "version": "0.29"}}])
def test_modelopts_checkpoints_have_their_bytes(algorithm, eighths, named):
    settings = named | {"quant_algo": algorithm, "ignore": ["lm_head"], "exclude_modules": ["model.layers.0.*"]}
    module = build(
        make_blueprint(
            parse_query(
                f"arch=config:{encode_config(json.dumps(SMALL | {'quantization_config': settings}))}&mode=inference&gpu=b200"
            )
        ),
        dtype="bfloat16",
    )
    for path, layer in module.named_modules():
        packed = [p for p in layer._parameters.values() if hasattr(p, "elements")]
        assert bool(packed) == (path.startswith("model.layers.1.") and path.endswith("_proj")), path
        if packed:
            tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
            size = sum(t.numel() * t.element_size() for t in tensors)
            assert size == sum(p.elements for p in packed) * eighths / 8 + 8


# Eighths of a byte per weight, float32 scales for each output, float32 numbers of a layer, and AWQ's factor of two bytes an input.
MODELOPT = {
    "FP8": (8, 0, 2, 0),
    "FP8_PER_CHANNEL_PER_TOKEN": (8, 1, 0, 0),
    "MXFP8": (8.25, 0, 0, 0),
    "NVFP4": (4.5, 0, 2, 0),
    "NVFP4_AWQ": (4.5, 0, 2, 1),
    "W4A16_NVFP4": (4.5, 0, 1, 0),
    "W4A8_NVFP4_FP8": (4.5, 0, 2, 0),
    "W4A8_MXFP4_FP8": (4.25, 0, 1, 0),
    "W4A16_AWQ": (4.25, 0, 0, 1),
    "W4A8_AWQ": (4.25, 0, 2, 1),
    "W8A16": (8, 1, 0, 0),
    "W8A8_SQ_PER_CHANNEL": (8, 1, 1, 0),
}


@pytest.mark.parametrize("algorithm", MODELOPT)
def test_modelopts_algorithms_have_their_bytes(algorithm: str):
    eighths, columns, numbers, factors = MODELOPT[algorithm]
    outputs, inputs = 512, 256
    settings = {"quant_algo": algorithm} | ({"group_size": 128} if algorithm.endswith("_AWQ") and algorithm != "NVFP4_AWQ" else {})
    tensors = layout_of("modelopt", settings, outputs, inputs, torch.bfloat16).values()
    expected = outputs * inputs * eighths / 8 + 4 * (columns * outputs + numbers) + 2 * factors * inputs
    assert sum(prod(shape) * dtype.itemsize for shape, dtype in tensors) == expected


def test_modelopts_layers_have_algorithms_of_their_own():
    named = {"model.layers.0.mlp.down_proj": {"quant_algo": "FP8"}, "model.layers.1.mlp.up_proj": {"quant_algo": "NVFP4"}}
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": named}
    module = made(f"{arch(None)}&mode=inference")
    found = checkpoint_bytes(module, Quantization(method="modelopt", settings=settings, dtype="bfloat16"), torch.bfloat16)
    whole = sum(one.numel() for one in module.parameters()) * 2
    weights = module.get_submodule("model.layers.0.mlp.down_proj").weight.numel()
    assert found == whole - weights * (2 - 1) + 8 - weights * 2 + weights * 4.5 / 8 + 8


def test_a_config_that_names_no_layer_of_the_model_is_refused():
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"decoder.0": {"quant_algo": "FP8"}}}
    quantization = Quantization(method="modelopt", settings=settings, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"names no layer of this model: given quantized_layers = \S*decoder.0"):
        checkpoint_bytes(made(f"{arch(None)}&mode=inference"), quantization, torch.bfloat16)


HOSTILE_PATTERN = "(a+)+$"
PATTERNS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": [HOSTILE_PATTERN]},
    "fp8": {"quant_method": "fp8", "modules_to_not_convert": [HOSTILE_PATTERN]},
    "auto-round": {"quant_method": "auto-round", "bits": 4, "group_size": 128, "modules_to_not_convert": [HOSTILE_PATTERN]},
}  # fmt: skip


@pytest.mark.parametrize("method", list(PATTERNS))
def test_patterns_that_match_for_ever_are_refused(method):
    config = encode_config(json.dumps(SMALL | {"quantization_config": PATTERNS[method]}))
    with pytest.raises(ConfigError, match="may match for ever"):
        blueprint = make_blueprint(parse_query(f"arch=config:{config}&mode=inference&gpu=h100-80gb"))
        blueprint.describe(build(blueprint, dtype="bfloat16"))


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a*)*b", "((ab){2,})+", ".*.*.*.*.*.*.*x", "(?:x*y?)+?z"])
def test_a_repetition_inside_another_is_refused(pattern):
    with pytest.raises(ConfigError, match="may match for ever"):
        checked_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", [".*self_attn.*", r"model\.layers\.\d+\.mlp\..*", "lm_head", "(gate|up)_proj", r".*mlp\.(gate|up)_proj$"]
)
def test_patterns_of_published_checkpoints_stand(pattern):
    assert checked_pattern(pattern) == pattern


def test_names_of_compressed_tensors_are_no_endless_patterns():
    settings = {"config_groups": {"a": {"targets": ["Linear"]}}, "ignore": [f"re:{HOSTILE_PATTERN}"]}
    with pytest.raises(ConfigError, match="may match for ever"):
        is_target(settings, "model.layers.0.mlp.up_proj", "Linear")


def test_fp4_experts_beside_fp8_layers_have_their_bytes():
    from transformers import FineGrainedFP8Config

    if not hasattr(FineGrainedFP8Config(), "expert_dtype"):
        pytest.skip("this transformers has no experts in FP4")
    config = {
        "model_type": "deepseek_v4", "hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 1,
        "num_hidden_layers": 1, "num_hash_layers": 0, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "index_head_dim": 64, "index_n_heads": 2, "index_topk": 8, "o_groups": 2,
        "o_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 64, "vocab_size": 256, "compress_ratios": [4],
        "expert_dtype": "fp4",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    }  # fmt: skip
    query = f"arch=config:{encode_config(json.dumps(config))}&mode=inference&dtype=bfloat16&batch=1&gpu=b200"
    report, plain = (estimate(parse_query(query + more)) for more in ("", "&weights=full"))
    # two numbers in a byte are two parameters
    assert report.model.parameters == plain.model.parameters
    # 3 matrices of 4 experts of 256 × 256 weights: half a byte each and one byte for 32 of them, instead of two bytes
    experts = 4 * 3 * 256 * 256
    # in one byte, with one byte for each 128 × 128: q_a, q_b, kv, the groups of o_a, o_b, the shared expert, the indexer's q_b
    dense = 128 * 256 + 512 * 128 + 128 * 256 + 2 * 128 * 256 + 256 * 256 + 3 * 256 * 256 + 2 * 64 * 128
    saved = experts * 2 - experts * 17 // 32 + dense - dense // 128**2
    assert plain.estimates[0].weights_bytes - report.estimates[0].weights_bytes == saved
    # of the checkpoint as a whole: without the key, experts have one byte and one more for 128 × 128
    module = build(make_blueprint(parse_query(f"{query}&weights=full")))
    held = quantization_of(parse_query(query), None)
    settings = {key: value for key, value in held.settings.items() if key != "expert_dtype"}
    in_fp8 = checkpoint_bytes(module, replace(held, settings=settings), torch.bfloat16)
    assert in_fp8 - checkpoint_bytes(module, held, torch.bfloat16) == experts + experts // 128**2 - experts * 17 // 32

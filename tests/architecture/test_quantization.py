"""Weights that are quantized while they are loaded: bytes per tensor, what is left as it was, and how they come to the device."""

from __future__ import annotations

import json
import operator
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from sizer.architecture import make_blueprint
from sizer.architecture.compile_later import compiled_when_called
from sizer.architecture.module_census import take_census, unregistered_tensors
from sizer.architecture.packed_layers import checkpoint_bytes, pack
from sizer.architecture.quantization import elements_of, quantization_states, unquantized_part
from sizer.architecture.quantization_settings import Quantization
from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from sizer.report.advice import caveats
from sizer.tape.tape import EMPTY_CACHE
from sizer.tracing.device import Device
from sizer.tracing.trace import build, build_loaded
from tests.tracing.models import LLAMA, MIXTRAL

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

# Two layers of 512: q and o of 512 × 512, k and v of 128 × 512, three of 1536 × 512.
SMALL = LLAMA | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_key_value_heads": 2}
SMALL |= {"num_attention_heads": 8, "vocab_size": 1000, "tie_word_embeddings": False}
LINEAR = 2 * (2 * 512 * 512 + 2 * 128 * 512 + 3 * 1536 * 512)
LAYERS = 2 * 7
REST = 2 * 1000 * 512 + 5 * 512  # embeddings, the head, norms


def arch(config: dict) -> str:
    return f"arch=config:{encode_config(json.dumps(config))}"


def made(query: str, dtype: str = "bfloat16", config: dict = SMALL) -> nn.Module:
    return build(make_blueprint(parse_query(f"{arch(config)}&{query}")), dtype=dtype)


# Per layer: half a byte for a weight; a scale (float32) for 64 weights, and 16 codes of 4 bytes. Quantized twice, a scale is one
# byte, with a scale (float32) for 256 of them, 256 codes and an offset. LLM.int8(): one byte, and a scale for each output.
STATES = {
    "nf4": LINEAR // 64 * 4 + LAYERS * 64,
    "fp4": LINEAR // 64 * 4 + LAYERS * 64,
    "nf4-dq": LINEAR // 64 + LINEAR // 64 // 256 * 4 + LAYERS * (64 + 1024 + 4),
    "int8": 2 * (2 * 512 + 2 * 128 + 2 * 1536 + 512) * 4,
}
SIZES = {"nf4": LINEAR // 2, "fp4": LINEAR // 2, "nf4-dq": LINEAR // 2, "int8": LINEAR}


@pytest.mark.parametrize("weights", list(STATES))
def test_every_byte_of_quantized_weights_is_counted(weights):
    module = made(f"mode=inference&weights={weights}")
    states = [state for layer in module.modules() for _, state in quantization_states(layer)]
    assert sum(state.nbytes for state in states) == STATES[weights]
    census = take_census(module, name="small")
    assert census.parameters == LINEAR + REST
    assert census.parameter_bytes == SIZES[weights] + STATES[weights] + 2 * REST
    assert sum(row.bytes for row in census.by_dtype) == census.parameter_bytes + census.buffer_bytes
    assert sum(row.parameter_bytes for row in census.modules) == census.parameter_bytes
    assert unregistered_tensors(module) == []


def test_fp8_has_a_scale_for_each_block():
    blocks = LINEAR // 128**2
    arrived = SMALL | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for config, weights in ((SMALL, "fp8"), (arrived, "checkpoint")):
        census = take_census(made(f"mode=inference&weights={weights}&gpu=h100-80gb", config=config), name="small")
        assert census.parameter_bytes == LINEAR + blocks * 4 + 2 * REST
        assert census.parameters == LINEAR + REST


def test_the_estimate_holds_what_the_census_counts():
    found = estimate(parse_query(f"{arch(SMALL)}&mode=inference&weights=nf4-dq&dtype=bfloat16&batch=1&seq=64"))
    assert found.estimates[0].weights_bytes == SIZES["nf4-dq"] + STATES["nf4-dq"] + 2 * REST
    assert "nf4-dq" in found.query


def test_what_is_prepared_for_adapters_is_float32_but_for_the_weights():
    module = made("train=adapter&weights=nf4")
    dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "base_layer" in name} == {torch.uint8}
    assert {dtype for name, dtype in dtypes.items() if "base_layer" not in name} == {torch.float32}
    assert {name for name, parameter in module.named_parameters() if parameter.requires_grad} == {
        name for name in dtypes if "lora" in name
    }


def test_what_is_no_linear_layer_is_named_with_its_bytes():
    mixture = MIXTRAL | {"num_hidden_layers": 1}
    left = {name: size for name, _, size in unquantized_part(made("mode=inference&weights=nf4", config=mixture))}
    assert {"experts", "embed_tokens", "lm_head"} <= left.keys()
    assert max(left, key=left.get) == "experts"
    query = f"{arch(mixture)}&mode=inference&weights=nf4&dtype=bfloat16&batch=1&seq=64"
    assert any(line.startswith("not quantized: experts (") for line in caveats(estimate(parse_query(query))))


def test_a_model_without_linear_layers_is_refused():
    convolutions = {"model_type": "resnet", "architectures": ["ResNetModel"], "depths": [1, 1, 1, 1]}
    with pytest.raises(BuildError, match="no layer that can be quantized: given 'weights=nf4 with ResNetModel'"):
        made("mode=inference&weights=nf4", config=convolutions)


def test_an_adapter_that_takes_whole_weights_alone_is_refused():
    pytest.importorskip("peft")
    with pytest.raises(BuildError, match=r"HRA cannot be traced on quantized weights: .*, allowed lora, dora, "):
        made("train=adapter&adapter=hra&weights=nf4")


def test_a_gpu_without_fp8_loads_the_weights_as_they_are():
    query = f"{arch(SMALL)}&mode=inference&dtype=bfloat16&batch=1&seq=64"
    full = estimate(parse_query(f"{query}&weights=full&gpu=t4")).estimates
    found = estimate(parse_query(f"{query}&weights=fp8&gpu=t4"))
    assert found.estimates == full
    assert "the Tesla T4 (16 GB) does not multiply weights in FP8: they are loaded unquantized." in caveats(found)
    assert estimate(parse_query(f"{query}&weights=fp8&gpu=l40s")).estimates != full


def test_weights_pass_the_device_one_by_one_and_the_cache_is_emptied():
    blueprint = make_blueprint(parse_query(f"{arch(SMALL)}&train=adapter&weights=nf4"))
    device = Device("cuda", (8, 0))
    module, loading = build_loaded(blueprint, checkpointing=False, dtype="bfloat16", device=device, tell_frozen=True)
    log = loading.log
    # transformers takes and frees half a byte for each weight that will be quantized, two for the others
    assert log.sizes[0] == LINEAR // 2 + 2 * REST
    names = {place: name for name, place in log._op_names.items()}
    emptied = next(at for at, block in enumerate(log.order) if block >= 0 and names[log.ops[block]] == EMPTY_CACHE)
    alive = set(log.alive())
    assert {loading.blocks[path] for path in loading.blocks if "lora" in path} <= {
        b for b in log.order[emptied:] if b >= 0
    }
    assert set(loading.blocks.values()) <= alive
    assert sum(map(elements_of, module.parameters())) > LINEAR


def test_traces_leave_a_quantized_module_as_it_was():
    query = parse_query(f"{arch(SMALL)}&train=adapter&weights=int8&dtype=float16&seq=64&batch=1,2,3,4")
    whole = estimate(query)
    alone = estimate(parse_query(f"{arch(SMALL)}&train=adapter&weights=int8&dtype=float16&seq=64&batch=3"))
    assert not whole.failures
    assert whole.estimates[2] == alone.estimates[0]


def test_what_a_package_would_compile_as_it_is_imported_is_compiled_as_it_is_called(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append((model, options)) or model)
    with compiled_when_called():
        add = torch.compile(operator.add)
        multiply = torch.compile(dynamic=False)(operator.mul)
    assert compiled == []
    assert (add(2, 3), multiply(2, 3), multiply(3, 4)) == (5, 6, 12)
    assert compiled == [(operator.add, {}), (operator.mul, {"dynamic": False})]


@pytest.mark.exhaustive
def test_bitsandbytes_is_imported_without_a_compiler():
    """The compiler that its own import brings takes a second."""
    query = f"{arch(SMALL)}&dtype=bfloat16&batch=1&seq=16&train=adapter&weights=nf4-dq"
    code = f"import sys; import sizer; sizer.estimate({query!r}); print('torch._inductor.compile_fx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


def test_four_bit_products_are_computed_in_the_dtype_that_is_asked_for():
    cell = f"{arch(SMALL)}&mode=inference&weights=fp4&dtype=bfloat16&batch=1&seq=16&gpu=t4"
    own, wide = (estimate(parse_query(f"{cell}{compute}")) for compute in ("", "&compute=float32"))
    for report, dtype in ((own, "bfloat16"), (wide, "float32")):
        (said,) = (note for note in report.notes if note.startswith("FP4:"))
        assert said.endswith(f"Their products are computed in {dtype}.")
    # the largest layer, 1536 x 512, is restored for its product: in float32 it takes 1536 * 512 * 2 bytes more
    more = wide.estimates[0].peak_allocated_bytes - own.estimates[0].peak_allocated_bytes
    assert 1536 * 512 * 2 <= more < 1.1 * 1536 * 512 * 2


def test_a_checkpoint_that_names_no_compute_dtype_has_that_of_transformers():
    checkpoint = SMALL | {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    module = made("mode=inference", config=checkpoint)
    assert {layer.compute_dtype for layer in module.modules() if hasattr(layer, "compute_dtype")} == {torch.float32}


def test_weights_may_stay_unprepared():
    prepared, plain = (made(f"train=adapter&weights=nf4{more}") for more in ("", "&prepare=0"))
    left = [
        sum(p.numel() * p.element_size() for p in module.parameters() if not p.requires_grad and p.dtype.is_floating_point)
        for module in (prepared, plain)
    ]
    assert left == [REST * 4, REST * 2]  # embeddings, head and norms, in float32 or as they were loaded


def test_ranks_of_tensor_parallel_split_fp8_weights_and_their_scales():
    # LINEAR weights of one byte and a float32 scale for each block of 128 x 128, all split in two; what is left is 16 bits: the
    # embeddings and the head are split by the vocabulary, the norms are whole on each rank
    asked = f"{arch(SMALL)}&mode=inference&weights=fp8&dtype=bfloat16&batch=1&seq=16&gpu=h100-80gb"
    whole, half = (estimate(parse_query(f"{asked}{more}")).estimates[0].weights_bytes for more in ("", "&tp=2"))
    scales = 2 * (2 * 4 * 4 + 2 * 1 * 4 + 3 * 12 * 4) * 4
    assert whole == LINEAR + scales + REST * 2
    tables, norms = 2 * 1000 * 512 * 2, 5 * 512 * 2
    split = (LINEAR + tables) // 2 + norms
    # k and v have one block of 128 outputs, which each rank holds a half of, with a scale of its own
    assert split < half <= split + scales


def test_fp8_checkpoints_are_split_too():
    config = SMALL | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    asked = f"{arch(config)}&mode=generate&new=3&dtype=bfloat16&batch=1&seq=16&gpu=h100-80gb"
    whole, half = (estimate(parse_query(f"{asked}{more}")) for more in ("", "&tp=2"))
    assert not [text for text in half.cautions if "unquantized" in text]
    assert half.estimates[0].weights_bytes < 0.52 * whole.estimates[0].weights_bytes


# GLM-5-FP8 leaves out 712 names; `re` keeps 512 patterns, and then compiled each of them anew for each layer: 70 s.
@pytest.mark.parametrize("count", [checkpoint_bytes, pack])
def test_more_names_than_re_keeps_are_compiled_once(monkeypatch, count):
    names = [f"model.layers.{number}.mlp.gate" for number in range(712)]
    settings = {"weight_block_size": [128, 128], "activation_scheme": "dynamic", "modules_to_not_convert": names}
    quantization = Quantization(method="fp8", settings=settings, dtype="bfloat16")
    config = encode_config(json.dumps({**LLAMA, "num_hidden_layers": 3}))
    module = build(make_blueprint(parse_query(f"arch=config:{config}&mode=inference")))
    compiled = []
    compile_pattern = re._compiler.compile
    monkeypatch.setattr(re._compiler, "compile", lambda *told: compiled.append(told) or compile_pattern(*told))
    re.purge()
    if count is pack:
        pack(module, "bfloat16", quantization)
    else:
        checkpoint_bytes(module, quantization, torch.bfloat16)
    assert len(names) <= len(compiled) < 2 * len(names)

"""Every preset, built under meta, has the parameters that were published for it, and every key of its config counts."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import warnings
from math import ceil, prod
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from sizer.base.errors import RequestError
from sizer.catalogue.presets import DATA, PRESETS, Preset, find_preset, list_presets
from sizer.catalogue.weights import METHODS

# transformers 5.17 scripts a function of DeBERTa at import, which recent PyTorch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")

MODALITIES = {"text", "seq2seq", "image", "multimodal", "audio", "series"}
WANTED = """
    llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3.1-8b llama-3.1-70b llama-3.1-405b llama-3.2-1b
    llama-3.2-3b llama-3.3-70b mistral-7b-v0.1 mistral-7b-v0.3 mixtral-8x7b mixtral-8x22b qwen2.5-0.5b qwen2.5-7b
    qwen2.5-72b qwen3-0.6b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b gemma-2-2b gemma-2-27b gemma-3-1b gemma-3-27b
    phi-3-mini-4k phi-3.5-mini phi-4 deepseek-v3 gpt-oss-20b gpt-oss-120b gpt2 gpt2-xl opt-125m opt-6.7b pythia-160m
    pythia-6.9b falcon-7b bloom-560m bloom-7b1 t5-small t5-large flan-t5-xl bert-base-uncased bert-large-uncased
    roberta-base roberta-large distilbert-base-uncased deberta-v3-base deberta-v3-large modernbert-base
    modernbert-large vit-base-patch16-224 vit-large-patch16-224 swin-tiny-patch4-window7-224 convnext-tiny-224
    dinov2-base clip-vit-base-patch32 clip-vit-large-patch14 siglip-base-patch16-224 whisper-tiny whisper-large-v3
    wav2vec2-base-960h hubert-base-ls960 segformer-b0-ade detr-resnet-50 llava-1.5-7b tinyllama-1.1b smollm2-135m
    qwen2-vl-7b qwen2.5-vl-7b starcoder2-3b mamba-130m all-minilm-l6-v2
"""

every_preset = pytest.mark.parametrize("key", PRESETS)


def architecture_of(key: str) -> dict[str, Any]:
    """The config of a preset without how its checkpoint is quantized."""
    return {name: value for name, value in find_preset(key).config.items() if name != "quantization_config"}


def parse(config: dict[str, Any]) -> PreTrainedConfig:
    model_type = config.pop("model_type")
    return AutoConfig.for_model(model_type, **config)


def count_parameters(config: PreTrainedConfig, head: str) -> int:
    """The parameters of the class under meta; `parameters()` gives tied ones once."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeBERTa's file scripts functions as it is imported, which is deprecated
        model = getattr(transformers, head)._from_config(config, dtype=torch.float32)
    return sum(parameter.numel() for parameter in model.parameters())


def agrees(preset: Preset, parameters: int) -> bool:
    """Whether a count of the head, tied weights once, is the published one to the precision in which it was published."""
    return 2 * abs(parameters - preset.expected_parameters) <= preset.published_precision


@every_preset
def test_count_is_the_published_one(key: str):
    preset = find_preset(key)
    counted = count_parameters(parse(architecture_of(key)), preset.head)
    assert agrees(preset, counted), f"{counted:,} counted, {preset.expected_parameters:,} by {preset.published_as}"


@every_preset
def test_keys_take_effect(key: str):
    preset = find_preset(key)
    given = architecture_of(key)
    undeclared = unread_keys(parse(architecture_of(key)), given)
    if given["model_type"] == "t5":
        # transformers ties every T5; the key now says whether the decoder's output is scaled.
        assert parse(architecture_of(key)).scale_decoder_outputs is given.get("tie_word_embeddings", True)
        undeclared.pop("tie_word_embeddings", None)
    # read for servers (sizer.estimating.server_model), by no class of transformers
    undeclared = {path: value for path, value in undeclared.items() if not path.endswith("num_nextn_predict_layers")}
    for path in undeclared:
        without = architecture_of(key)
        remove(without, path)
        assert count_parameters(parse(without), preset.head) != preset.expected_parameters, f"{path} changes nothing"


def unread_keys(config: PreTrainedConfig, given: dict[str, Any], prefix: str = "") -> dict[str, object]:
    """The keys of `given` that the config class does not declare, by dotted path; a declared key must hold its value."""
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's layers differ, and its config holds the common values, too
    properties = {name for name in given if isinstance(getattr(type(config), name, None), property)} - {"num_labels"}
    declared = {field.name for field in dataclasses.fields(config)} | set(type(config).attribute_map) | properties
    undeclared = {}
    for name, value in given.items():
        if name not in declared and name != "model_type":
            undeclared[prefix + name] = value
            continue
        got = getattr(config, name)
        if isinstance(got, PreTrainedConfig):
            undeclared |= unread_keys(got, value, f"{prefix}{name}.")
        else:
            assert holds(got, value), f"{prefix}{name} is {got!r}, not {value!r}"
    return undeclared


def holds(got: object, value: object) -> bool:
    """Whether `got` is `value`, where dicts may have gained keys and lists become tuples."""
    if isinstance(value, dict):
        return all(holds(got[name], inner) for name, inner in value.items())
    return list(got) == value if isinstance(value, list) else got == value


def remove(config: dict[str, Any], path: str) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        config = config[parent]
    del config[name]


def test_a_key_that_changes_nothing_is_found():
    config = find_preset("bert-base-uncased").config
    config["rope_theta"] = 500000.0
    assert unread_keys(parse(dict(config)), config) == {"rope_theta": 500000.0}


@every_preset
def test_row_is_sound(key: str):
    preset = find_preset(key)
    config = preset.config
    assert preset.key == key
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", key)
    assert re.fullmatch(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", preset.hub_id)
    assert config["architectures"] == [preset.head]
    assert preset.modality in MODALITIES
    assert preset.title and preset.family and preset.published_as
    assert preset.published_parameters % preset.published_precision == 0
    assert preset.exact != ("rounded" in preset.published_as)
    assert (preset.difference != 0) == (preset.difference_reason is not None)
    assert config.get("quantization_config", {"quant_method": "fp8"})["quant_method"] in METHODS
    assert not [
        name for name in config if name == "auto_map" or name.startswith("_") or name.endswith("implementation")
    ]


def test_families_people_ask_for_are_there():
    assert [key for key in WANTED.split() if key not in PRESETS] == []
    assert len(PRESETS) >= 75


def test_gpt2_checkpoint_holds_its_masks():
    # 12 layers, each with a mask of 1,024 x 1,024: 137,022,720 - 12,582,912 = 124,439,808.
    preset = find_preset("gpt2")
    assert preset.published_parameters == 137_022_720
    assert preset.difference == -12 * 1024 * 1024
    assert preset.expected_parameters == 124_439_808


def test_deepseek_checkpoint_holds_a_prediction_module_and_scales():
    # Linear layers of a block (out x in), all FP8 with one scale per 128 x 128; d = 7,168.
    #   attention  q_a 1,536 x d   q_b 24,576 x 1,536   kv_a 576 x d   kv_b 32,768 x 512   o d x 16,384
    #   an expert  gate 2,048 x d  up 2,048 x d  down d x 2,048        dense MLP: the same with 18,432
    d = 7168
    attention = [(1536, d), (24576, 1536), (576, d), (32768, 512), (d, 16384)]
    expert = [(2048, d), (2048, d), (d, 2048)]
    dense = [(18432, d), (18432, d), (d, 18432)]

    def weights(layers: list[tuple[int, int]]) -> int:
        return sum(map(prod, layers))

    def scales(layers: list[tuple[int, int]]) -> int:
        return sum(ceil(rows / 128) * ceil(columns / 128) for rows, columns in layers)

    # The prediction module is one more block of experts (256 and a shared one; its norms of d, d, 1,536 and 512; a router
    # of 256 x d with 256 biases), its own embedding and output layer (129,280 x d), a projection d x 2d and three norms.
    module = weights(attention) + 257 * weights(expert) + 2 * d + 1536 + 512 + 256 * d + 256
    module += 2 * 129280 * d + 2 * d * d + 3 * d
    fp8_scales = 62 * scales(attention) + 3 * scales(dense) + 59 * 257 * scales(expert)
    routing_biases = 58 * 256
    assert (module, fp8_scales) == (13_463_426_304, 41_540_496)
    assert find_preset("deepseek-v3").difference == -(module + fp8_scales + routing_biases)


def test_a_rounded_count_is_compared_at_its_own_precision():
    # 6.7B means 6.65B to 6.75B.
    preset = find_preset("opt-6.7b")
    assert not preset.exact
    assert agrees(preset, 6_650_000_000)
    assert agrees(preset, 6_750_000_000)
    assert not agrees(preset, 6_649_999_999)
    assert not agrees(preset, 6_750_000_001)


def test_an_exact_count_allows_no_error():
    preset = find_preset("bert-base-uncased")
    # 110,106,428 with a pooler of 768 x 768 + 768 and a next-sentence head of 2 x 768 + 2 that BertForMaskedLM lacks.
    assert preset.expected_parameters == 110_106_428 - 590_592 - 1_538 == 109_514_298
    assert agrees(preset, 109_514_298)
    assert not agrees(preset, 109_514_299)


def test_list_is_the_presets_in_display_order():
    assert [preset.key for preset in list_presets()] == list(PRESETS)
    assert next(iter(PRESETS)) == "llama-3.1-8b"


def test_unknown_preset_names_close_ones():
    with pytest.raises(RequestError, match=r"unknown preset: given 'Llama-3.1-9b', .*; did you mean llama-3.2-1b, llama-3.1-8b, "):
        find_preset("Llama-3.1-9b")
    with pytest.raises(RequestError, match=r"any other model is hub:<org/name> or config:"):
        find_preset("???")


def test_a_config_is_a_new_one_each_time():
    preset = find_preset("llama-3.1-8b")
    preset.config["rope_parameters"]["factor"] = 1.0
    assert preset.config["rope_parameters"]["factor"] == 8.0


def test_presets_cannot_be_changed():
    with pytest.raises(TypeError, match="does not support item assignment"):
        PRESETS["mine"] = find_preset("gpt2")
    with pytest.raises(dataclasses.FrozenInstanceError, match="published_parameters"):
        find_preset("gpt2").published_parameters = 1


def test_import_reads_nothing_and_needs_no_torch():
    code = """
import sys
from sizer.catalogue import presets
assert presets._load.cache_info().currsize == 0
assert len(presets.PRESETS) == len(presets.list_presets()) > 0
assert presets._load.cache_info().currsize == 1
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_data_stays_small():
    assert DATA.stat().st_size < 300_000

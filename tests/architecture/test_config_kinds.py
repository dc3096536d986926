"""Kinds of configs that people have: types that transformers renames, sizes under other names."""

from __future__ import annotations

import json

import pytest

from sizer.architecture import make_blueprint
from sizer.base.config_json import encode_config
from sizer.base.errors import ConfigError
from sizer.catalogue.presets import PRESETS
from sizer.query.text import parse_query
from sizer.tracing.trace import build

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
DEEPSEEK = SIZES | {"q_lora_rank": 16, "kv_lora_rank": 16, "n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 1}
DEEPSEEK |= {"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}


def blueprint_of(config: dict, more: str = "mode=inference"):
    return make_blueprint(parse_query(f"arch=config:{encode_config(json.dumps(config))}&{more}"))


def test_a_mistral_with_layer_types_is_a_ministral():
    config = {"model_type": "mistral", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, **SIZES}
    blueprint = blueprint_of(config)
    assert blueprint.class_name == "MinistralForCausalLM"
    assert any("read as ministral" in note for note in blueprint.notes)
    assert build(blueprint).config.head_dim == 16  # 64 / 4, as MistralConfig computes it


def test_a_type_of_the_hub_is_read_by_the_class_that_its_architectures_name():
    blueprint = blueprint_of({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], **DEEPSEEK})
    assert blueprint.class_name == "DeepseekV3ForCausalLM"
    assert any("does not know the type kimi_k2" in note for note in blueprint.notes)


def test_a_config_without_a_type_is_read_by_the_class_that_its_architectures_name():
    config = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    blueprint = blueprint_of({"architectures": ["BertForMaskedLM"], **config})
    assert blueprint.class_name == "BertForMaskedLM"
    assert "The config names no model_type; it is read as bert, the type of its BertForMaskedLM." in blueprint.notes


# Release 4 read `tie_word_embeddings` of the text part; Mistral's and Qwen2's classes do not tie by default, Gemma's does.
@pytest.mark.parametrize(
    ("part", "more", "tied"),
    [
        ({"model_type": "mistral"}, {"transformers_version": "4.50.0.dev0"}, False),
        ({"model_type": "mistral", "tie_word_embeddings": True}, {"transformers_version": "4.50.0"}, True),
        ({"model_type": "mistral", "tie_word_embeddings": False}, {}, False),
        ({"model_type": "mistral"}, {"transformers_version": "5.0.0"}, True),
        ({"model_type": "mistral"}, {}, True),
        ({"model_type": "mistral"}, {"transformers_version": "4.50.0", "tie_word_embeddings": True}, True),
        ({"model_type": "gemma2", "head_dim": 16}, {"transformers_version": "4.50.0"}, True),
    ],
)
def test_a_model_of_several_parts_ties_its_output_layer_as_the_release_that_wrote_it_did(part, more, tied):
    config = {"model_type": "mistral3", "text_config": part | SIZES, **more}
    blueprint = blueprint_of(config)
    assert build(blueprint).config.tie_word_embeddings is tied
    assert any("output layer is not tied" in note for note in blueprint.notes) is not tied


# Its config on the hub, which names `tie_word_embeddings` nowhere; the count is that of the next release's weights.
def test_mistral_small_3_1_has_its_output_layer():
    text = {"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "head_dim": 128}
    text |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 131072, "sliding_window": None}
    vision = {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "head_dim": 64}
    vision |= {"num_attention_heads": 16, "image_size": 1540, "patch_size": 14}
    config = {"model_type": "mistral3", "transformers_version": "4.50.0.dev0", "multimodal_projector_bias": False}
    module = build(blueprint_of(config | {"text_config": text, "vision_config": vision, "spatial_merge_size": 2}))
    published = PRESETS["mistral-small-3.2-24b-instruct-2506"].expected_parameters
    assert sum(parameter.numel() for parameter in module.parameters()) == published


@pytest.mark.parametrize("name", [["NoSuchModelForCausalLM"], [], None, "DeepseekV3ForCausalLM", [{}]])
def test_a_type_that_nothing_names_is_refused(name):
    with pytest.raises(ConfigError, match="model_type is not known"):
        blueprint_of({"model_type": "kimi_k9", "architectures": name, **DEEPSEEK})


@pytest.mark.parametrize(
    ("whole", "part", "read_as"), [("kimi_k25", "kimi_k2", "deepseek_v3"), ("exaone4_5", "exaone4_5_text", "exaone4")]
)
def test_a_part_is_read_as_its_class_renames_it(whole, part, read_as):
    pytest.importorskip(f"transformers.models.{whole}")
    config = {"model_type": whole, "text_config": {"model_type": part, **(DEEPSEEK if part == "kimi_k2" else SIZES)}}
    module = build(blueprint_of(config))
    assert module.config.text_config.model_type == read_as
    assert module.config.text_config.hidden_size == 64


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama", "dim": 8192, "n_layers": 80, "n_heads": 64}, "hidden_size"),  # Meta's params.json
        ({"model_type": "llama", "dim": 8192, "n_layers": 80, "vocab_size": 32000}, "num_hidden_layers"),
        ({"model_type": "whisper", "n_audio_state": 1280, "n_audio_layer": 32, "n_text_layer": 4}, "d_model"),  # MLX
        ({"model_type": "gpt2", "hidden": 768, "num_layer": 12}, "n_embd"),
    ],
)
def test_sizes_under_other_names_are_refused_with_those_that_are_read(config, expected):
    with pytest.raises(ConfigError, match="none of the sizes") as refused:
        blueprint_of(config)
    assert expected in refused.value.allowed
    assert "dim" in refused.value.given or "n_audio" in refused.value.given or "hidden" in refused.value.given


# The parameters are those of the presets, or of the papers, with Meta's own output layer.
WHISPER = {"n_mels": 128, "n_audio_ctx": 1500, "n_audio_state": 1280, "n_audio_head": 20, "n_audio_layer": 32, "n_vocab": 51866}
WHISPER |= {"n_text_ctx": 448, "n_text_state": 1280, "n_text_head": 20, "n_text_layer": 4}
MISTRAL = {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8, "norm_eps": 1e-05}
META = {"dim": 8192, "multiple_of": 256, "n_heads": 64, "n_layers": 80, "norm_eps": 1e-05, "vocab_size": -1}
META_70B = META | {"multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_kv_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0}


@pytest.mark.parametrize(
    ("config", "name", "parameters"),
    [
        (META, "LlamaForCausalLM", 65_285_660_672),
        ({**META, "model_type": "llama"}, "LlamaForCausalLM", 65_285_660_672),
        (META_70B, "LlamaForCausalLM", PRESETS["llama-3-70b"].expected_parameters),
        (META_70B | {"use_scaled_rope": True}, "LlamaForCausalLM", PRESETS["llama-3.1-70b"].expected_parameters),
        ({**MISTRAL, "vocab_size": 32768, "rope_theta": 1e6}, "MistralForCausalLM", PRESETS["mistral-7b-v0.3"].expected_parameters),
        (
            {**MISTRAL, "vocab_size": 32000, "moe": {"num_experts_per_tok": 2, "num_experts": 8}},
            "MixtralForCausalLM",
            PRESETS["mixtral-8x7b"].expected_parameters,
        ),
        ({**WHISPER, "model_type": "whisper"}, "WhisperForConditionalGeneration", 808_878_080),  # large-v3-turbo, as MLX writes it
    ],
)
def test_other_formats_are_read_if_they_determine_the_model(config, name, parameters):
    blueprint = blueprint_of(config)
    assert blueprint.class_name == name
    assert any(note.startswith("This is ") and "it was read as" in note for note in blueprint.notes)
    assert sum(parameter.numel() for parameter in build(blueprint).parameters()) == parameters


@pytest.mark.parametrize(
    "config",
    [
        {key: value for key, value in META.items() if key != "multiple_of"},  # the inner width is not determined
        {**META, "model_type": "bert"},
        {**META, "q_lora_rank": 512},
        {**MISTRAL, "vocab_size": 32000, "moe": {"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1}},
        {**MISTRAL, "vocab_size": 131072, "vision_encoder": {"hidden_size": 1024}},
        {**WHISPER, "n_text_state": 768},
        {**META, "dim": "8192"},
    ],
)
def test_other_formats_that_do_not_are_refused(config):
    with pytest.raises(ConfigError, match=r"model_type|none of the sizes|out of range"):
        blueprint_of(config)


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "llama", "_pad": 1}, {"model_type": "bert", "eos": 7}])
def test_a_type_alone_stays_its_usual_model(config):
    assert blueprint_of(config).class_name

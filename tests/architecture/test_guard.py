from __future__ import annotations

import copy
import json
import random
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from transformers import CONFIG_MAPPING

from sizer.architecture.guard import clean_config
from sizer.architecture.schema import known_keys
from sizer.base.config_json import read_config
from sizer.base.errors import ConfigError
from sizer.catalogue.presets import PRESETS

# Text, vision, audio, several parts, experts, state space, no attention, a timm backbone, infinities, legacy keys.
SAMPLE = (
    "llama",
    "gpt2",
    "bert",
    "t5",
    "mixtral",
    "mamba2",
    "vit",
    "swin",
    "clip",
    "llava",
    "qwen2_vl",
    "gemma3n",
    "whisper",
    "wav2vec2",
    "detr",
    "fast_vlm",
)
NOT_ARCHITECTURE = {"transformers_version", "dtype", "torch_dtype", "use_pretrained_backbone"}


@pytest.fixture(autouse=True)
def no_network(monkeypatch) -> Iterator[None]:
    """Nothing in this file may look up a name or open a connection."""
    attempts = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: attempts.append(args))
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: attempts.append(address))
    yield
    assert attempts == []


@contextmanager
def quiet():
    """transformers warns about values that old files hold; that is not what is tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def architecture(config: object) -> object:
    """What a config says about its architecture, recursively, as comparable values."""
    if isinstance(config, dict):
        return {str(key): architecture(value) for key, value in config.items() if key not in NOT_ARCHITECTURE}
    if isinstance(config, (list, tuple)):
        return [architecture(item) for item in config]
    return repr(config)


def built(config: dict) -> object:
    fields = copy.deepcopy(config)
    with quiet():
        return architecture(CONFIG_MAPPING[fields.pop("model_type")](**fields).to_dict())


@pytest.mark.parametrize("model_type", SAMPLE)
def test_default_configs_come_through_unchanged(model_type: str):
    with quiet():
        default = CONFIG_MAPPING[model_type]()
    written = read_config(default.to_json_string(use_diff=False))
    untouched = copy.deepcopy(written)
    clean = clean_config(written)
    assert written == untouched
    assert built(clean.config) == architecture(default.to_dict())
    for path in clean.dropped:
        name = path.rpartition(".")[2]
        assert name.startswith("_") or name in {"dtype", "return_dict", "output_attentions", "use_pretrained_backbone"}


@pytest.mark.parametrize("key", PRESETS)
def test_presets_come_through_unchanged(key: str):
    config = PRESETS[key].config
    clean = clean_config(config)
    assert set(clean.dropped) <= {"quantization_config"}
    assert clean.config == {name: value for name, value in config.items() if name != "quantization_config"}


OLD_FILES = {
    # Keys as hub files of several years have them; cleaned or not, they make the same config.
    "llama with rope_scaling": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "bloom with n_embed": {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16},
    "gpt_neox with rotary_pct": {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 1000},
    "qwen2_vl, flat": {
        "model_type": "qwen2_vl",
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "tie_word_embeddings": True,
        "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "model_type": "qwen2_vl"},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "clip with text_config_dict": {
        "model_type": "clip",
        "projection_dim": 768,
        "text_config_dict": {"hidden_size": 768, "num_attention_heads": 12, "projection_dim": 768},
        "vision_config_dict": None,
    },
    "bert with labels": {"model_type": "bert", "id2label": {"0": "no", "1": "maybe", "2": "yes"}, "num_labels": 3},
    "gpt2 under other names": {"model_type": "gpt2", "hidden_size": 1024, "num_hidden_layers": 3, "n_inner": None},
    "llava with a part by type": {
        "model_type": "llava",
        "text_config": {"model_type": "mistral", "hidden_size": 4096, "num_key_value_heads": 8},
        "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
    },
    "detr with a timm backbone": {
        "model_type": "detr",
        "backbone": "resnet101",
        "use_timm_backbone": True,
        "backbone_config": None,
    },
    "qwen3_moe with a head_dim that only its model reads": {"model_type": "qwen3_moe", "head_dim": 128},
    "deberta with keys that only its model reads": {
        "model_type": "deberta-v2",
        "conv_kernel_size": 3,
        "position_buckets": 256,
        "share_att_key": True,
    },
    "gemma4 with layers of its own": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "global_head_dim": 256,
    },
}


@pytest.mark.parametrize("name", OLD_FILES)
def test_keys_of_older_files_are_kept(name: str):
    raw = OLD_FILES[name]
    clean = clean_config(raw)
    assert built(clean.config) == built(raw)
    assert clean.dropped == ()


def test_parts_keep_what_their_whole_gives_them():
    # FastVLM's vision part is a timm wrapper with a hidden size that only FastVLM knows of.
    clean = clean_config({"model_type": "fast_vlm", "vision_config": {"model_type": "timm_wrapper", "hidden_size": 64}})
    assert clean.config["vision_config"]["hidden_size"] == 64
    alone = clean_config({"model_type": "timm_wrapper", "architecture": "resnet50", "hidden_size": 64})
    assert alone.dropped == ("hidden_size",)


def test_a_backbone_by_name_is_not_looked_up():
    raw = {
        "model_type": "detr",
        "backbone": "resnet50",
        "backbone_config": None,
        "backbone_kwargs": {"in_chans": 3, "out_indices": [1, 2, 3, 4]},
        "use_timm_backbone": True,
    }
    inner = {"model_type": "timm_backbone", "backbone": "resnet50", "in_chans": 3, "out_indices": [1, 2, 3, 4]}
    assert clean_config(raw).config == {"model_type": "detr", "backbone_config": inner}
    by_name = {"model_type": "rt_detr", "backbone": "resnet50"}
    inner = {"model_type": "timm_backbone", "backbone": "resnet50"}
    assert clean_config(by_name).config == {"model_type": "rt_detr", "backbone_config": inner}
    with pytest.raises(ConfigError, match="names a backbone of the hub: given backbone = 'resnet50'; give its config"):
        clean_config({**by_name, "use_timm_backbone": False})


def test_tagged_floats_are_read():
    clean = clean_config({"model_type": "mamba2", "time_step_limit": [0.0, {"__float__": "Infinity"}]})
    assert clean.config["time_step_limit"] == [0.0, float("inf")]


# --------------------------------------------------------------------------------------------------------- what is dropped


def test_what_reaches_for_code_or_files_is_dropped_and_named():
    raw = {
        "model_type": "llava",
        "auto_map": {"AutoModel": "org/repo--modeling.Evil"},
        "attribute_map": {"anything": "_attn_implementation"},
        "anything": "org/kernels",
        "attn_implementation": "org/kernels",
        "_attn_implementation": "org/kernels",
        "_attn_implementation_internal": "org/kernels",
        "experts_implementation": "org/kernels",
        "trust_remote_code": True,
        "_name_or_path": "/etc/passwd",
        "name_or_path": "/etc/passwd",
        "torch_dtype": "float16",
        "to_dict": 1,
        "__class__": "x",
        "base_model_tp_plan": {"layers": "x"},
        "text_config": {"model_type": "llama", "auto_map": {"AutoConfig": "x.y"}, "dtype": "int8", "_commit_hash": "0"},
        "vision_config": {"model_type": "clip_vision_model", "attn_implementation": "org/kernels"},
    }
    clean = clean_config(raw)
    assert clean.config == {
        "model_type": "llava",
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model"},
    }
    inside = (
        "text_config.auto_map",
        "text_config.dtype",
        "text_config._commit_hash",
        "vision_config.attn_implementation",
    )
    assert clean.dropped == (*[key for key in raw if key not in clean.config], *inside)
    assert clean.notes == ("The config names remote code; transformers' class for its model type is used instead.",)


def test_undeclared_dicts_are_cleaned_too():
    raw = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "auto_map": {"x": "y"}, "_x": 1}}
    clean = clean_config(raw)
    assert clean.config["rope_parameters"] == {"rope_type": "default"}
    assert clean.dropped == ("rope_parameters.auto_map", "rope_parameters._x")


def test_what_a_config_says_of_quantized_weights_is_no_part_of_the_architecture():
    raw = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    clean = clean_config(raw)
    assert clean.config == {"model_type": "llama"}
    assert clean.dropped == ("quantization_config",)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_no_class_takes_a_dangerous_key(model_type: str):
    hostile = {
        "auto_map": {"a": "b"},
        "attribute_map": {"a": "_attn_implementation"},
        "trust_remote_code": True,
        "attn_implementation": "org/x",
        "_attn_implementation": "org/x",
        "experts_implementation": "org/x",
        "torch_dtype": "float64",
        "name_or_path": "/x",
        "__init__": 1,
        "__dict__": {},
        "to_dict": 1,
        "from_dict": 1,
    }
    clean = clean_config({"model_type": model_type, **hostile})
    assert clean.config == {"model_type": model_type}
    assert set(clean.dropped) == set(hostile)


def test_known_keys_are_no_methods():
    keys = known_keys(CONFIG_MAPPING["llama"])
    assert {"hidden_size", "rope_scaling", "rope_theta", "num_labels", "per_layer_config", "id2label"} <= keys
    assert not {"to_dict", "validate", "__init__", "push_to_hub"} & keys


# --------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ({}, "config has no model_type: given nothing, allowed a model type of transformers"),
        ({"model_type": None}, "config has no model_type: given nothing"),
        ({"model_type": 3}, "config has no model_type: given 3"),
        ({"model_type": ["llama"]}, "config has no model_type"),
        ({"model_type": "lama"}, r"model_type is not known: given 'lama', .*; did you mean .*llama"),
        ({"model_type": "zzzzzz"}, "code of a repository never runs here: estimate your own script"),
        ({"model_type": "../../etc"}, "model_type is not known"),
        ({"model_type": "rwkv"}, "model_type is refused: given 'rwkv'; it compiles its own code"),
        ({"model_type": "llava", "text_config": {"model_type": "rwkv"}}, "text_config.model_type is refused"),
        ({"model_type": "llava", "text_config": {"model_type": "lama"}}, "text_config.model_type is not known"),
        ({"model_type": "clip", "text_config": {"model_type": "rwkv"}}, "text_config.model_type is refused"),
        ({"model_type": "clip", "text_config": {"model_type": "../x"}}, "text_config.model_type is malformed"),
        ({"model_type": "clip", "text_config": "openai/clip"}, "part of the wrong kind: given text_config = 'openai"),
        ({"model_type": "clip", "text_config_dict": [1]}, "part of the wrong kind"),
        (
            {"model_type": "llama", "rope_parameters": {"x": {"model_type": "rwkv"}}},
            "rope_parameters.x.model_type is ref",
        ),
        ({"model_type": "qwen2", "layer_types": [{"model_type": "rwkv"}]}, "layer_types.model_type is refused"),
        ({"model_type": "llama", "num_hidden_layers": -1}, "num_hidden_layers = -1, allowed whole numbers from 1"),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "allowed whole numbers from 1 to 1,024"),
        ({"model_type": "llama", "hidden_size": True}, "hidden_size = true, allowed numbers"),
        ({"model_type": "llama", "hidden_size": "4096"}, "hidden_size = '4096', allowed numbers"),
        ({"model_type": "gpt2", "hidden_size": 2**40}, "hidden_size = 1099511627776"),
        ({"model_type": "qwen2_vl", "num_hidden_layers": True}, "num_hidden_layers = true, allowed numbers"),
        ({"model_type": "clip", "vision_config": {"image_size": 8000}}, "vision_config.image_size = 8000"),
        (
            {"model_type": "clip", "text_config_dict": {"num_hidden_layers": 0}},
            "text_config_dict.num_hidden_layers = 0",
        ),
        ({"model_type": "swin", "depths": [10**6]}, "depths = 1000000"),
        (
            {"model_type": "bert", "num_labels": 10**8},
            "num_labels = 100000000, allowed whole numbers from 1 to 100,000",
        ),
        ({"model_type": "bert", "id2label": {"a": "b"}}, "id2label = something else"),
        (
            {"model_type": "gemma4_text", "per_layer_config": 7},
            "per_layer_config = 7",
        ),
        (
            {"model_type": "gemma4_text", "per_layer_config": {"0": {"head_dim": -1}}},
            "per_layer_config.0.head_dim = -1",
        ),
        (
            {"model_type": "detr", "backbone": "org/name"},
            "config points elsewhere: given backbone = 'org/name', allowed a t",
        ),
        ({"model_type": "detr", "backbone": "hf-hub:org/name"}, "config points elsewhere"),
        ({"model_type": "detr", "backbone": "local-dir:/etc"}, "config points elsewhere"),
        ({"model_type": "detr", "backbone": "../resnet"}, "config points elsewhere"),
        (
            {"model_type": "bert", "hidden_act": " HF_HUB:org/name"},
            "given hidden_act = ' HF_HUB:org/name'; put the value",
        ),
        ({"model_type": "bert", "hidden_act": "https://x"}, "config points elsewhere"),
        ({"model_type": "timm_backbone", "backbone": "hf-hub:org/name"}, "name of a timm model is malformed"),
        ({"model_type": "timm_backbone", "backbone": "timm/resnet50"}, "name of a timm model is malformed"),
        ({"model_type": "timm_wrapper", "architecture": "local-dir:/etc"}, "given architecture = 'local-dir:/etc'"),
        ({"model_type": "timm_wrapper", "architecture": ["x"]}, "name of a timm model is malformed"),
        (
            {
                "model_type": "timm_wrapper",
                "architecture": "resnet50",
                "model_args": {"checkpoint_path": "/etc/passwd"},
            },
            "arguments for timm are refused: given model_args: 'checkpoint_path', allowed features_only, in_chans",
        ),
        ({"model_type": "timm_wrapper", "model_args": {"device": "cpu", "in_chans": 3}}, "given model_args: 'device'"),
        ({"model_type": "timm_wrapper", "model_args": "x"}, "arguments for timm are refused"),
        (
            {"model_type": "gemma3n", "vision_config": {"model_args": {"checkpoint_path": "/etc/passwd"}}},
            "given vision_config.model_args: 'checkpoint_path'",
        ),
        (
            {"model_type": "detr", "backbone_kwargs": {"checkpoint_path": "/x"}},
            "given backbone_kwargs: 'checkpoint_path'",
        ),
        ({"architecture": "hf-hub:x", "pretrained_cfg": {}}, "given architecture = 'hf-hub:x'"),
        (
            {"model_type": "llama", "rms_norm_eps": {"__float__": [1]}},
            r"given rms_norm_eps.__float__ = \[1\], allowed Inf",
        ),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": {"__float__": {}}}}, "rope_theta.__float__ = {}"),
        ({"model_type": "llama", "rms_norm_eps": {"__float__": "x"}}, "given rms_norm_eps.__float__ = 'x'"),
        ({"model_type": "llama", "architectures": 5}, "given architectures = 5, allowed a list of class names"),
    ],
)
def test_refusals_say_what_was_given(raw: dict, why: str):
    with pytest.raises(ConfigError, match=why) as caught:
        clean_config(raw)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 320


@pytest.mark.parametrize(
    ("model_type", "part"),
    [("clip_text_model", "text_config"), ("qwen2_vl_text", "text_config"), ("trocr", "decoder")],
)
def test_the_text_part_of_a_larger_model_does_not_reach_a_part_of_it(model_type: str, part: str):
    # The code beside the class reads config.text_config; get_text_config would take it for the whole.
    for value in ({}, {"model_type": "llama"}, 5):
        clean = clean_config({"model_type": model_type, part: value})
        assert (clean.config, clean.dropped) == ({"model_type": model_type}, (part,))
    assert part in known_keys(CONFIG_MAPPING["clip" if part == "text_config" else "encoder-decoder"])


def test_timm_files_are_named_by_their_architecture():
    raw = {"architecture": "resnet50", "num_classes": 12, "pretrained_cfg": {"url": "https://example.com/x.bin"}}
    clean = clean_config(raw)
    assert clean.config == {"model_type": "timm_wrapper", "architecture": "resnet50", "num_labels": 12}
    assert "pretrained_cfg" in clean.dropped


def test_a_large_hostile_config_is_cleaned_quickly():
    raw = {"model_type": "llama", **{f"key_{i}": {"auto_map": {"a": i}} for i in range(6_000)}}
    clean = clean_config(read_config(json.dumps(raw)))
    assert clean.config == {"model_type": "llama"}
    assert len(clean.dropped) == 6_000


@pytest.mark.parametrize("model_type", SAMPLE)
def test_damaged_configs_raise_nothing_but_a_config_error(model_type: str):
    rng = random.Random(model_type)
    with quiet():
        written = read_config(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    hostile = (None, True, -1, 0, 2**53, 1.5, "", "x", "hf-hub:x", [], [None], [[]], {}, {"": 1}, {"model_type": []})
    refused = 0
    for _ in range(60):
        raw = copy.deepcopy(written)
        for _ in range(rng.randint(1, 3)):
            places = [raw, *(value for value in raw.values() if isinstance(value, dict) and value)]
            place = rng.choice(places)
            place[rng.choice(list(place))] = rng.choice(hostile)
        try:
            clean = clean_config(raw)
        except ConfigError as error:
            refused += 1
            assert str(error).isprintable()
        else:
            assert json.dumps(clean.config)
    assert refused > 0

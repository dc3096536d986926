"""Read configs as people paste them: JSON, Python or Markdown. Other files are refused by name."""

from __future__ import annotations

import ast
import json
import time

import pytest
import torch
import yaml

from sizer.architecture import make_blueprint
from sizer.base.config_json import canonical_config, encode_config, read_config, read_object
from sizer.base.errors import ConfigError
from sizer.base.pasted_text import OTHER_FILES, adapter_query
from sizer.catalogue.presets import PRESETS
from sizer.query.text import parse_query
from sizer.tracing.trace import build

MINILM = PRESETS["all-minilm-l6-v2"].config
CONFIG = {"model_type": "llama", "hidden_size": 64, "tie": True, "pad": None, "eps": 1e-06, "ids": [1, 2], "name": "it's \"a\""}
JSON = json.dumps(CONFIG, indent=1)
YAML = yaml.safe_dump(CONFIG)


def numbered(text: str) -> list[str]:
    """Return a text with numbers at its lines, as `cat -n`, grep -n, editors and web pages show and copy them."""
    lines = [*enumerate(text.splitlines(), start=9)]
    return [
        "".join(f"{number:6d}\t{line}\n" for number, line in lines),
        *("\n".join(f"{number:4d}{mark}{line}" for number, line in lines) for mark in (" ", ": ", " | ", "  ")),
        "\n".join(f"{number}:{line}" for number, line in lines),
        "\n".join(f"{number}\n{line}" for number, line in lines),
        "\n".join([*(str(number) for number, _ in lines), text]),
    ]


@pytest.mark.parametrize(
    "pasted",
    [
        f"\ufeff{JSON}",
        f"```json\n{JSON}\n```",
        f"Here it is:\n\n```\n{JSON}\n```\nand more {{}}",
        repr(CONFIG),
        f"config = {CONFIG!r}",
        f"LlamaConfig {JSON}\n",
        JSON.replace("{", "{ // the model\n", 1).replace('"tie"', '# tied\n /* both "{" */ "tie"'),
        JSON.replace("\n}", ",\n}").replace("2\n ]", "2,\n ]"),
        f"~~~json\n{JSON}\n~~~",
        f"Hi! I am fine-tuning this model (it's a Llama), what does it need?\n\n{JSON}\n\nThanks!",
        f">>> print(config)\nLlamaConfig {JSON}",
        f"In [3]: model.config\nOut[3]: LlamaConfig {JSON}",
        f"export const config = {JSON};",
        "\n".join(f"> {line}" for line in JSON.splitlines()),
        "\n".join(f"+{line}" for line in JSON.splitlines()),
        JSON.replace('"tie"', "“tie”").replace('"llama"', "“llama”"),
        JSON.replace("64", "6_4"),
        JSON[1:-1],
        json.dumps(JSON),
        f"[{JSON}]",
        "config = dict(model_type='llama', hidden_size=64, tie=True, pad=None, eps=1e-06, ids=(1, 2), name='it\\'s \"a\"')",
        repr(CONFIG).replace("[1, 2]", "(1, 2)"),
        *numbered(JSON),
        YAML,
        f"```yaml\n{YAML}```",
        f"---\n# of a small model\n{YAML}",
        YAML.replace("ids:\n- 1\n- 2", "ids: [1, 2]"),
        "\n".join(f"> {line}" for line in YAML.splitlines()),
        "\n".join(f"    {line}" for line in YAML.splitlines()),
        *numbered(YAML),
    ],
)
def test_what_is_pasted_is_read(pasted: str):
    assert read_config(pasted) == CONFIG
    assert canonical_config(pasted) == canonical_config(JSON)


def test_a_python_dict_is_what_python_reads():
    text = "{'model_type': \"bert\", 'a': {'b': [True, False, None], 'c': -1.5e-3, 'd': 'x\\ny'},}"
    assert read_config(text) == ast.literal_eval(text)


def test_a_dtype_of_torch_is_its_name():
    assert read_config("{'model_type': 'bert', 'dtype': torch.bfloat16}")["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "text",
    [
        "LlamaConfig(hidden_size=64, num_hidden_layers=2, rope_scaling=dict(rope_type='linear', factor=2.0))",
        "from transformers import LlamaConfig\n\n# small\nconfig = LlamaConfig(\n    hidden_size=64,  # width\n"
        "    num_hidden_layers=2,\n    rope_scaling={'rope_type': 'linear', 'factor': 2.0},\n)",
        "transformers.LlamaConfig(hidden_size=64, num_hidden_layers=2, rope_scaling={'rope_type': 'linear', 'factor': 2.0})\n",
    ],
)
def test_a_constructor_names_the_type(text: str):
    blueprint = make_blueprint(parse_query(f"arch=config:{encode_config(text)}"))
    config = build(blueprint).config
    assert (blueprint.class_name, config.hidden_size, config.num_hidden_layers) == ("LlamaForCausalLM", 64, 2)
    assert config.rope_parameters["factor"] == 2.0


@pytest.mark.parametrize(
    "text",
    [
        f"{JSON}, 'more': 1",
        f"{JSON}\n{JSON}",
        f"'more': 1, {JSON}",
        "LlamaConfig(64)",
        "LlamaConfig(hidden_size=f(1))",
        "LlamaConfig(hidden_size=64); import os",
        "LlamaConfig(hidden_size=64",
    ],
)
def test_what_goes_on_around_an_object_is_refused(text: str):
    with pytest.raises(ConfigError, match="config"):
        read_config(text)


@pytest.mark.parametrize("name", ["LoraConfig", "BitsAndBytesConfig", "SFTConfig"])
def test_the_constructor_of_another_config_is_named(name: str):
    with pytest.raises(ConfigError, match=f"this is a {name}, not a model's config"):
        read_config(f"{name}(r=16, lora_alpha=32)")


@pytest.mark.parametrize(
    "text",
    ["{'a': b}", "{'a': f(1)}", "{'a' 1}", "{'a': __import__('os')}", "{'a': 1", "text", "'" * 100, "```"],
)
def test_what_is_no_object_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"JSON|config"):
        read_config(text)


@pytest.mark.parametrize(
    "text",
    ["{" + "'a':[" * 400_000, "/*" * 900_000, "{'" + "\\'" * 900_000, "```\n" * 400_000, "#" * 2_000_000],
)
def test_hostile_text_is_refused_in_linear_time(text: str):
    start = time.process_time()
    with pytest.raises(ConfigError, match=r"JSON|config"):
        read_config(text)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"metadata": {"total_size": 1}, "weight_map": {}}', "safetensors.index.json"),
        ('{"tokenizer_class": "LlamaTokenizer", "model_max_length": 1}', "tokenizer_config.json"),
        ('{"version": "1.0", "added_tokens": [], "pre_tokenizer": null, "model": {}}', "tokenizer.json"),
        ('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}', "special_tokens_map.json"),
        ('{"_from_model_config": true, "bos_token_id": 1}', "generation_config.json"),
        ('{"do_sample": true, "eos_token_id": [1], "transformers_version": "4.51.0"}', "generation_config.json"),
        ('{"image_processor_type": "SiglipImageProcessor"}', "preprocessor_config.json"),
        ('{"_class_name": "FluxPipeline", "_diffusers_version": "0.30.0"}', "without the configs of its parts"),
        ('{"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"]}', "without the configs of its parts"),
        ('{"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.30.0"}', "one part of a pipeline"),
        ('{"model_cfg": {"embed_dim": 512}, "preprocess_cfg": {}}', "open_clip_config.json"),
        ('{"word_embedding_dimension": 384, "pooling_mode_mean_tokens": true}', "1_Pooling"),
        ('{"__version__": {"sentence_transformers": "2.0.0"}}', "config_sentence_transformers.json"),
        ('[{"idx": 0, "type": "sentence_transformers.models.Transformer"}]', "modules.json"),
        (b"GGUF\x03\x00\x00\x00\xff\xfe", "GGUF"),
        ('{"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 512}', "generation_config.json"),
        ('{"video_processor_type": "Qwen3VLVideoProcessor"}', "video_preprocessor_config.json"),
        ('{"chat_template": "{{ messages }}"}', "chat_template.json"),
        ('{"global_step": 100, "log_history": []}', "trainer_state.json"),
        ('{"<think>": 151667, "</think>": 151668}', "a list of tokens"),
        (json.dumps({f"word{number}": number for number in range(100)}), "a list of tokens"),
        ('{"zero_optimization": {"stage": 3}}', "a config of DeepSpeed"),
        ('{"per_device_train_batch_size": 2}', "a file of trainer arguments"),
        ('{"model": "mlx", "lora_parameters": {"rank": 8}}', "an adapter's config of MLX"),
        ('{"bits": 4, "group_size": 128, "desc_act": true}', "quantize_config.json"),
        ('{"n_layer": 32, "n_embd": 4096, "padded_vocab_size": 32000}', "a config of LitGPT"),
    ],
)
def test_another_file_is_named_with_the_one_that_is_needed(text: str | bytes, name: str):
    with pytest.raises(ConfigError) as refused:
        read_config(text)
    assert name in refused.value.what and "config.json" in refused.value.todo
    assert len({one.name for one in OTHER_FILES}) >= 12


def test_an_adapters_config_asks_for_its_base_model():
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-8B", "r": 32, "lora_alpha": 64, "lora_dropout": 0.05}
    query = "arch=hub:Qwen/Qwen3-8B&train=adapter&adapter=lora&r=32&alpha=64&targets=q_proj,v_proj&adapter_dropout=0.05"
    adapter["target_modules"] = ["q_proj", "v_proj"]
    assert adapter_query(adapter) == query
    assert adapter_query(read_object(JSON)) is None
    saved = query.replace("&adapter_dropout", "&modules_to_save=lm_head&adapter_dropout")
    assert adapter_query(adapter | {"modules_to_save": ["lm_head"]}) == saved
    with pytest.raises(ConfigError, match=r"adapter_config\.json") as refused:
        read_config(json.dumps(adapter))
    assert query in refused.value.todo


QUANTIZED = {"producer": {"name": "modelopt", "version": "0.42"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["{"]}}


@pytest.mark.parametrize(
    "text",
    [
        f"{JSON}\n{json.dumps(QUANTIZED)}",
        f"{json.dumps(QUANTIZED)} {JSON}",
        f"config.json\n```json\n{JSON}\n```\nhf_quant_config.json:\n```json\n{json.dumps(QUANTIZED, indent=1)}\n```\n",
    ],
)
def test_a_config_and_its_hf_quant_config_are_read_together(text: str):
    settings = {"quant_method": "modelopt", "producer": QUANTIZED["producer"], "quant_algo": "NVFP4", "exclude_modules": ["{"]}
    assert read_config(text) == {**CONFIG, "quantization_config": settings}
    assert read_config(canonical_config(text)) == read_config(text)


def test_a_hf_quant_config_alone_says_which_file_to_add():
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json") as refused:
        read_config(json.dumps(QUANTIZED))
    assert "config.json of the same folder" in refused.value.todo


@pytest.mark.parametrize("text", [f"{JSON}\n{JSON}", f"{JSON}{json.dumps(QUANTIZED)}{JSON}", f"{JSON} }}" + json.dumps(QUANTIZED)])
def test_other_texts_of_several_objects_are_refused(text: str):
    with pytest.raises(ConfigError, match="config is not valid JSON"):
        read_config(text)


TIMM = """{"architecture": "resnet18", "num_classes": 10, "num_features": 512, "pretrained_cfg": {"tag": "a1_in1k",
 "custom_load": false, "input_size": [3, 224, 224], "classifier": "fc", "first_conv": "conv1", "license": "apache-2.0"}}"""
SENTENCES = {  # the files of a sentence-transformers folder; all but the first say which one to paste
    "config.json": json.dumps({"_name_or_path": "nreimers/MiniLM-L6-H384-uncased", **MINILM}),
    "modules.json": '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]',
    "config_sentence_transformers.json": '{"__version__": {"sentence_transformers": "2.0.0", "transformers": "4.6.1"}}',
    "sentence_bert_config.json": '{"max_seq_length": 256, "do_lower_case": false}',
    "1_Pooling/config.json": '{"word_embedding_dimension": 384, "pooling_mode_cls_token": false}',
    "tokenizer_config.json": '{"do_lower_case": true, "tokenizer_class": "BertTokenizer"}',
    "special_tokens_map.json": '{"unk_token": "[UNK]", "sep_token": "[SEP]"}',
}


def parameters_of(text: str) -> int:
    module = build(make_blueprint(parse_query(f"arch=config:{encode_config(text)}&mode=inference")))
    return sum(parameter.numel() for parameter in module.parameters())


def test_timms_config_of_the_hub_is_read():
    # ResNet-18 has 11,689,512 parameters with 1,000 classes; 990 of 513 each are left out
    pytest.importorskip("timm")
    assert parameters_of(TIMM) == 11_689_512 - 990 * 513


# As GigaPath, H-optimus-0, DINOv2 and SigLIP write it.
@pytest.mark.parametrize(
    ("name", "arguments", "pixels"),
    [
        (
            "vit_giant_patch14_dinov2",
            {"img_size": 224, "in_chans": 3, "patch_size": 16, "embed_dim": 1536, "depth": 40, "num_heads": 24}
            | {"init_values": 1e-05, "mlp_ratio": 5.33334, "num_classes": 0},
            224,
        ),
        ("vit_giant_patch14_reg4_dinov2", {"img_size": 224, "init_values": 1e-05, "dynamic_img_size": False}, 224),
        ("vit_small_patch14_dinov2", {}, 518),
        ("vit_base_patch16_siglip_256", {}, 256),
    ],
)
def test_a_model_of_timm_without_classes_is_that_of_its_config(name, arguments, pixels):
    timm = pytest.importorskip("timm")
    held = {"input_size": [3, pixels, pixels]}
    config = {"architecture": name, "num_classes": 0, "model_args": arguments, "pretrained_cfg": held}
    blueprint = make_blueprint(parse_query(f"arch=config:{encode_config(json.dumps(config))}&mode=inference"))
    assert (blueprint.class_name, blueprint.image_size) == ("TimmWrapperModel", (pixels, pixels))
    with torch.device("meta"):
        truth = timm.create_model(name, **{"num_classes": 0, **arguments})
    counts = [sum(parameter.numel() for parameter in module.parameters()) for module in (build(blueprint), truth)]
    assert counts[0] == counts[1]


def test_of_a_sentence_transformers_folder_the_config_is_read():
    assert parameters_of(SENTENCES["config.json"]) == PRESETS["all-minilm-l6-v2"].expected_parameters


@pytest.mark.parametrize("file", [name for name in SENTENCES if name != "config.json"])
def test_of_a_sentence_transformers_folder_other_files_name_the_config(file: str):
    with pytest.raises(ConfigError) as refused:
        read_config(SENTENCES[file])
    assert "config.json" in refused.value.todo
    assert file.rpartition("/")[2] in refused.value.what or "1_Pooling" in refused.value.what

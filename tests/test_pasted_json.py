"""Read configs as people paste them: JSON, Python or Markdown. Other files are refused by name."""

from __future__ import annotations

import ast
import json
import time

import pytest

from sizer.config_json import canonical_config, read_config, read_object
from sizer.errors import ConfigError
from sizer.pasted_json import OTHER_FILES, adapter_query

CONFIG = {"model_type": "llama", "hidden_size": 64, "tie": True, "pad": None, "eps": 1e-06, "ids": [1, 2], "name": "it's \"a\""}
JSON = json.dumps(CONFIG, indent=1)


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
        repr(CONFIG).replace("[1, 2]", "(1, 2)"),
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
        ('{"_class_name": "FluxPipeline", "_diffusers_version": "0.30.0"}', "diffusers"),
        ('{"model_cfg": {"embed_dim": 512}, "preprocess_cfg": {}}', "open_clip_config.json"),
        ('{"word_embedding_dimension": 384, "pooling_mode_mean_tokens": true}', "1_Pooling"),
        ('{"__version__": {"sentence_transformers": "2.0.0"}}', "config_sentence_transformers.json"),
        ('[{"idx": 0, "type": "sentence_transformers.models.Transformer"}]', "modules.json"),
        (b"GGUF\x03\x00\x00\x00\xff\xfe", "GGUF"),
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
    with pytest.raises(ConfigError, match=r"adapter_config\.json") as refused:
        read_config(json.dumps(adapter))
    assert query in refused.value.todo

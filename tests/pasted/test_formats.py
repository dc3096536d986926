"""Training configs become questions: each example's keys were read by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from sizer.base.errors import ConfigError
from sizer.catalogue.presets import PRESETS
from sizer.pasted.formats import FORMATS, read_config
from sizer.pasted.model import read_model
from sizer.pasted.plain_text import MAX_BYTES
from sizer.pasted.reading import read_question
from sizer.query.text import parse_query
from tests.pasted.examples import EXAMPLES

NEEDED = {"trl", "liger_kernel", "cut_cross_entropy", "torchao", "triton"}  # packages of recipes


@pytest.fixture(autouse=True)
def all_are_installed(monkeypatch):
    monkeypatch.setattr("sizer.pasted.recipes.find_spec", lambda name: name in NEEDED or None)


HUB_IDS = {preset.hub_id: preset.key for preset in PRESETS.values()}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.format}: {example.name}")
def test_a_config_means_what_was_read_by_hand(example):
    found = read_config(example.text)
    assert found.title == next(row.title for row in FORMATS if row.key == example.format)
    given = {key: value for key, value in found.items.items() if key != "arch"}
    assert given == {key: value for key, value in example.items.items() if key != "arch"}
    if "arch" in example.items:
        assert found.items["arch"] == example.items["arch"]
    for words in example.unmatched:
        assert any(words in line for line in found.unmatched), found.unmatched
    assert len(found.unmatched) == len(example.unmatched), found.unmatched


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.format}: {example.name}")
def test_every_question_can_be_asked(example):
    items = {"arch": "hf:gpt2"} | read_config(example.text).items
    request = parse_query("&".join(f"{key}={value}" for key, value in items.items()))
    assert request.batches and len(request.dtypes) == 1


def test_there_are_thirty_in_more_than_five_formats():
    counts = Counter(example.format for example in EXAMPLES)
    assert sum(counts.values()) >= 30
    assert set(counts) == {row.key for row in FORMATS} and min(counts.values()) >= 3


def test_what_is_not_installed_is_left_out_and_said(monkeypatch):
    monkeypatch.setattr("sizer.pasted.recipes.find_spec", lambda name: None)
    for example in EXAMPLES:
        found = read_config(example.text)
        assert found.items.keys().isdisjoint({"compile", "activations", "liger"})
        assert found.items.get("loss", "").partition(":")[0] in ("", "chunked")
        parse_query("&".join(f"{key}={value}" for key, value in ({"arch": "hf:gpt2"} | found.items).items()))
        for key in ("compile", "activations", "liger"):
            if key in example.items:
                assert any(line.startswith(f"{key}={example.items[key]}: ") for line in found.unmatched), example.name
    (objective,) = [one for one in EXAMPLES if one.name == "DPO"]
    assert read_config(objective.text).items["objective"] == "dpo"  # another question otherwise: the answer says what to install


@pytest.mark.parametrize("gpu", ["cpu", "m4-max-64gb"])
def test_what_a_device_does_not_take_is_left_out_and_said(gpu):
    text = "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --per_device_train_batch_size 4 --use_liger_kernel"
    found = read_config(text, gpu)
    assert found.items.keys().isdisjoint({"loss", "liger"})
    assert {line.partition("=")[0] for line in found.unmatched} == {"loss", "liger"}
    parse_query("&".join(f"{key}={value}" for key, value in {**found.items, "gpu": gpu}.items()))


def test_every_item_has_a_line_or_a_reason():
    for example in EXAMPLES:
        found = read_config(example.text)
        explained = {part.partition("=")[0] for line in found.read for part in line.means.split("&")}
        explained |= {part.partition("=")[0] for text in found.assumed for part in text.partition(":")[0].split("&")}
        assert set(found.items) - {"mode"} <= explained, example.name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [1]\nb: *x", "anchors are not read"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
        ("[" * 5_000, "not YAML"),
        ("just words", "not understood"),
        ("python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 2", "not read"),  # a server's command
        ("vllm serve Qwen/Qwen3-8B", "not understood"),
        ("model = AutoModel.from_pretrained('Qwen/Qwen3-8B')", "not understood"),
        ("- a\n- b", "not understood"),
        ("name: value\nother: 1", "no format that is read here"),
        ("{}", "no format"),
        ("a: " + "x" * MAX_BYTES, "too long"),
        ("base_model: [", "not YAML"),
        ('{"a": 1', "not valid JSON"),
    ],
)
def test_what_is_no_config_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(text)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_repository():
    found = read_config("base_model: /models/my-llama\nmicro_batch_size: 1\nbf16: true")
    assert "arch" not in found.items
    assert "base_model: /models/my-llama" in found.unmatched
    assert any("the model of the form is kept" in text for text in found.assumed)


# ------------------------------------------------------------------------------------------------------------ a model alone


@pytest.mark.parametrize(
    "text",
    [
        '{"model_type": "gpt2", "n_embd": 64, "_name_or_path": "my-company/secret"}',
        '```json\n{"model_type": "gpt2", "n_embd": 64}\n```',
        "GPT2Config {'model_type': 'gpt2', 'n_embd': 64,}  # printed",
        "model_type: gpt2\nn_embd: 64\n",
        '1  {\n2    "model_type": "gpt2",\n3    "n_embd": 64\n4  }',
    ],
)
def test_a_models_config_is_its_architecture(text):
    found = read_model(text)
    assert found is not None and found.kind == "model"
    assert parse_query(f"arch={found.items['arch']}").config == '{"model_type":"gpt2","n_embd":64}'


def test_a_models_name_and_an_adapter_are_questions():
    assert read_model(" Qwen/Qwen3-8B\n").items == {"arch": "hf:qwen3-8b"}
    assert read_model("https://huggingface.co/meta-llama/Llama-3.1-8B").items == {"arch": "hf:llama-3.1-8b"}
    adapter = read_model('{"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-8B", "r": 8}')
    assert adapter.items == {"arch": "hub:Qwen/Qwen3-8B", "mode": "training", "train": "adapter", "adapter": "lora", "r": "8"}


@pytest.mark.parametrize("text", ["just words", "word", '{"a": 1}', "[1]", "{", "a: b", "a: b\nc: d", "a: &b 1\nc: d"])
def test_what_is_no_model_is_none(text):
    assert read_model(text) is None


def test_another_file_of_a_models_folder_is_named():
    with pytest.raises(ConfigError, match=r"this is tokenizer_config\.json"):
        read_model('{"tokenizer_class": "X", "bos_token": "a"}')


def test_a_config_in_a_fence_is_read():
    assert read_config("```yaml\nbase_model: Qwen/Qwen3-8B\nmicro_batch_size: 3\n```").items["batch"] == "3"


@pytest.mark.parametrize(
    "text",
    [
        *("A=1\n" * 15_000, "A=1 " * 15_000, "#" * 60_000, "\n" * 60_000, "\t\n" * 30_000, "A=\\\n" * 15_000),
        "a=b\n" * 8_000 + "x=$a python y",
        "v=" + "x" * 199 + "\npython t.py " + "$v " * 20_000,
    ],
    ids=["assignments", "words", "signs", "lines", "tabs", "continued", "names", "values"],
)
def test_long_texts_take_no_time(text):
    with pytest.raises(ConfigError, match=r"this text is not understood|flags of this script"):
        read_question(text, None)

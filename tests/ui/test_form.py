"""The form: its order, numbers as people write them, errors beside fields, devices, tasks, repositories with a preset."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sizer.base.errors import HubError, PipelineError
from sizer.catalogue.gpu_keys import CUSTOM, find_gpu
from sizer.catalogue.gpus import GPUS, RANGED
from sizer.catalogue.modes import MODES, TASKS, task_of
from sizer.query.text import parse_query
from sizer.query.values import read_count, read_tokens
from sizer.ui import focus
from sizer.ui.fields import OPTIONS, device_title
from sizer.ui.focus import title_formatter
from tests.ui.clients import ScriptedJob
from tests.ui.conftest import markup, texts


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8k", "8192"), ("32K", "32768"), ("8,192", "8192"), ("8 192", "8192"), ("131_072", "131072"), ("1.5k", "1536"),
        ("2048", "2048"), (" 128k ", "131072"), ("8,19", "8,19"), ("k", "k"), ("", ""), ("eight", "eight"), ("1,024,0", "1,024,0"),
    ],
)  # fmt: skip
def test_tokens_are_read_as_people_write_them(text, number):
    assert read_tokens(text) == number


def test_counts_have_separators_and_no_letters():
    assert (read_count("1,024"), read_count("8k"), read_count("8")) == ("1024", "8k", "8")


def test_a_field_takes_8k(client, open_page):
    page = open_page(arch="hf:gpt2", dtype="bfloat16", batch="1")
    page.text_input(key="seq").set_value("1k").run()
    assert client.requests[-1].sequence_length == 1024
    page.text_input(key="accumulate").set_value("1,000").run()
    assert client.requests[-1].accumulate == 1000


def test_an_error_stands_below_its_field(client, open_page):
    page = open_page(arch="hf:gpt2", dtype="bfloat16", batch="1")
    page.text_input(key="seq").set_value("many").run()
    assert any(text.startswith("'many' is not understood. Allowed: ") for text in texts(page.sidebar))
    assert "Sequence length: not understood" in markup(page)
    page.text_input(key="seq").set_value("64").run()
    assert not any(" is not understood" in text for text in texts(page.sidebar))


def test_the_form_is_in_the_order_of_a_question(client, open_page):
    page = open_page(arch="hf:gpt2", dtype="bfloat16", batch="1")
    labels = [element.label for element in walk(page.sidebar) if getattr(element, "label", "")]
    wanted = ["Model source", "Model", "Device", "GPUs", "Task", "Dtypes", "Batch sizes", "Sequence length", "Optimizer"]
    assert [label for label in labels if label in wanted] == wanted


def walk(block):
    for child in block.children.values():
        yield from walk(child) if hasattr(child, "children") else [child]


def test_fine_tuning_is_a_task(client, open_page):
    page = open_page(arch="hf:gpt2", dtype="bfloat16", batch="1")
    page.segmented_control(key="mode").set_value("fine-tuning").run()
    assert (client.requests[-1].mode, client.requests[-1].train) == ("training", "adapter")
    page.segmented_control(key="mode").set_value("training").run()
    assert client.requests[-1].train == "all"
    page = open_page(arch="torchvision:resnet18", batch="2", train="head")
    assert page.segmented_control(key="mode").value == "fine-tuning"
    assert client.requests[-1].train == "head"


@pytest.mark.parametrize(
    "keys",
    [
        {"weights": "transformer:nf4,text_encoder_2:nf4", "offload": "model", "vae": "tiling"},
        {"offload": "group-block:3", "stream": "1", "guidance": "0", "output": "latent", "frames": "9"},
        {"without": "text_encoder_3", "image": "512x768"},
        {"mode": "training", "train": "adapter", "weights": "nf4", "targets": "to_q", "frames": "9"},
        {"mode": "training", "dtype": "amp-bfloat16", "checkpointing": "1", "batch": "1,2"},
    ],
)
def test_the_form_keeps_what_is_asked_of_a_pipeline(client, open_page, keys):
    link = {"arch": "diffusers:sd1.5", **keys}
    page = open_page(**link)
    wanted = parse_query("&".join(f"{key}={value}" for key, value in link.items()))
    assert client.requests[-1] == wanted
    page.text_input(key="batch").set_value("3").run()
    assert client.requests[-1] == replace(wanted, batches=(3,), focus=client.requests[-1].focus)


def test_a_field_of_a_pipeline_changes_its_question(client, open_page):
    page = open_page(arch="diffusers:sd1.5")
    page.selectbox(key="pipe_offload").set_value("sequential").run()
    assert client.requests[-1].offloading == "sequential"
    page.text_input(key="pipe_weights").set_value("fp8-cast").run()
    assert client.requests[-1].part_weights == (("", "fp8-cast"),)
    page.segmented_control(key="mode").set_value("fine-tuning").run()
    request = client.requests[-1]
    assert (request.mode, request.train, request.offloading) == ("training", "adapter", "none")
    assert request.adapter_targets == ("script",)


@pytest.mark.parametrize(("name", "offered"), [("flux.1-dev", False), ("wan2.1-t2v-14b", True), ("latte", True)])
def test_frames_are_asked_of_videos_alone(client, open_page, name, offered):
    page = open_page(arch=f"diffusers:{name}")
    assert ("pipe_frames" in {field.key for field in page.text_input}) == offered


def test_another_model_forgets_the_frames_that_it_does_not_take(client, open_page):
    page = open_page(arch="diffusers:wan2.1-t2v-14b", frames="49")
    page.selectbox(key="diffusers_name").set_value("hunyuan-video").run()
    assert client.requests[-1].frames == 49
    page.selectbox(key="diffusers_name").set_value("sd1.5").run()
    assert client.requests[-1].frames is None
    assert "pipe_frames" not in {field.key for field in page.text_input}


def test_every_mode_is_a_task():
    assert {task.mode for task in TASKS.values()} == set(MODES)
    assert [task_of("training", train) for train in ("all", "adapter", "head")] == ["training", "fine-tuning", "fine-tuning"]
    assert task_of("inference", "all") == "inference"


def test_laptops_are_listed_and_move_no_range():
    laptops = [gpu for gpu in GPUS.values() if "Laptop" in gpu.name]
    chips = {gpu.name.split()[1] for gpu in GPUS.values() if gpu.maker == "Apple"}
    assert len(laptops) >= 20 and chips == {"M1", "M2", "M3", "M4", "M5"}
    assert {f"rtx-{model}-laptop" for model in ("5080", "5060", "5050", "4060", "4050", "3070")} <= set(GPUS)
    alike = sorted(gpu.context_bytes for gpu in RANGED if gpu.capability == (8, 9))
    assert find_gpu("custom:24GiB@8.9").context_bytes == alike[(len(alike) - 1) // 2]
    assert GPUS["rtx-4050-laptop"] not in RANGED


def test_a_device_of_ones_own_is_the_first_entry():
    assert OPTIONS[0] == CUSTOM
    assert all(word in device_title(CUSTOM).lower() for word in ("other", "my", "custom", "memory", "compute capability"))
    assert device_title("rtx-4060-8gb") == "GeForce RTX 4060 · 8 GB"
    assert device_title("cpu").endswith("· 64 GiB")


@pytest.mark.parametrize(("name", "preset"), [("openai-community/gpt2", "gpt2"), ("somebody/else", None)])
def test_a_repository_with_a_preset_is_answered_without_the_hub(client, open_page, monkeypatch, name, preset):
    plain = client.submit

    def submit(query: str, *, stops: bool):
        if "arch=hub:" not in query:
            return plain(query, stops=stops)

        def refuse() -> None:
            raise HubError("the hub cannot be reached")

        return ScriptedJob(refuse)

    monkeypatch.setattr(client, "submit", submit)
    page = open_page(arch=f"hub:{name}", dtype="bfloat16", batch="1")
    if preset is None:
        assert page.error[0].value == "The config could not be fetched from the hub."
        return
    assert not page.error
    assert (client.requests[-1].source, client.requests[-1].name) == ("hf", preset)
    assert "The answer is that of the preset GPT-2" in page.info[0].value


def test_a_repository_of_a_pipeline_is_answered_by_its_call(client, open_page, monkeypatch):
    plain = client.submit

    def submit(query: str, *, stops: bool):
        if "arch=hub:" in query:

            def refuse() -> None:
                raise PipelineError("org/name holds a diffusion pipeline")

            return ScriptedJob(refuse)
        return plain(query, stops=stops)

    monkeypatch.setattr(client, "submit", submit)
    page = open_page(arch="hub:org/name")
    assert not page.error
    assert (client.requests[-1].source, client.requests[-1].mode) == ("diffusers", "inference")
    assert page.info[0].value.startswith("org/name holds a diffusion pipeline. The answer is that")


def test_a_choice_of_the_run_before_has_a_text_among_other_options():
    """Streamlit ends a run in which an option's title is None: serving, as a model becomes one of torchvision."""
    of_torchvision = title_formatter({key: task.title for key, task in TASKS.items() if key != "serve"})
    assert (of_torchvision("training"), of_torchvision("serve")) == (TASKS["training"].title, "serve")
    for path in Path(focus.__file__).parent.glob("*.py"):
        assert not re.search(r"format_func\W+[\w.]+\.get\b", path.read_text(encoding="utf-8")), path.name

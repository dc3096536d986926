"""The main page, from the address to the answer."""

from __future__ import annotations

import json
from dataclasses import replace
from urllib.parse import parse_qsl, urlsplit

import pytest
from streamlit.testing.v1 import AppTest

from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError, ConfigError, HubError, JobError, SizerError, TraceError
from sizer.base.units import format_bytes
from sizer.query.request import Request
from sizer.query.text import parse_query
from sizer.service.job_memory import CONFINEMENT
from sizer.ui import service
from tests.ui.clients import ScriptedClient
from tests.ui.conftest import install, markup, open_tab, texts
from tests.ui.reports import PARAMETERS, census, report_for

RESNET = Request(source="torchvision", name="resnet50")


def link_on(page: AppTest) -> str:
    """The query of the link to copy."""
    open_tab(page, "Link and command")
    return urlsplit(next(code.value for code in page.code if "http" in code.value or code.value.startswith("/?"))).query


def look_at(page: AppTest, dtype: str, batch: int) -> AppTest:
    """The page after a cell of its table was chosen; AppTest does not select cells, tests/browser does."""
    page.session_state["focus"] = (dtype, batch)
    return page.run()


def cell(page: AppTest, dtype: str, batch: int) -> str:
    """A cell of the dtype × batch table."""
    return page.dataframe[0].value.loc[dtype, str(batch)]


def gib(size_bytes: int) -> str:
    """A size as the table has it."""
    return f"{size_bytes / 2**30:.2f}"


def address_of(page: AppTest) -> dict[str, str]:
    """The address bar's keys and values."""
    values = {key: page.query_params[key] for key in page.query_params}
    return {key: value if isinstance(value, str) else value[0] for key, value in values.items()}  # a list before 1.67


# ------------------------------------------------------------------------------------------------------ no input at all


def test_opens_with_an_answer(client, open_page):
    page = open_page()
    assert client.requests == [replace(RESNET, dtypes=("float32", "amp-bfloat16"), batches=(1, 8, 32, 128))]
    estimate = report_for(RESNET).find("float32", 128)  # the largest of those asked for, which all fit
    assert page.main.title[0].value.startswith(
        f"Training resnet50 at batch 128 in float32 needs {format_bytes(estimate.process_bytes)} as nvidia-smi shows it "
        f"({format_bytes(estimate.peak_allocated_bytes)} allocated); it fits one A100 (80 GB); the largest batch is "
    )
    assert cell(page, "float32", 128) == f"✓\N{NO-BREAK SPACE}{gib(estimate.process_bytes)}"
    assert page.dataframe[0].value.shape == (2, 5)  # two dtypes; four batch sizes and the largest one
    assert [metric.label for metric in page.metric] == [
        "Process",
        "Allocated",
        "Reserved",
        "Parameters",
    ]
    assert page.metric[3].delta == f"{PARAMETERS:,}; 102.23 MB (97.49 MiB) to download"
    assert not address_of(page), "the address of the default page stays clean"


def test_charts_are_drawn(client, open_page):
    page = open_page()
    charts = [json.loads(chart.proto.spec) for chart in page.get("vega_lite_chart")]
    assert [chart["description"] for chart in charts] == [
        "The process against the memory of A100 (80 GB), in GiB",
        "Memory at the peak per batch size, in GiB",
        "Memory through one step by category, in GiB",
    ]


def test_looking_from_another_side_asks_nobody(client, open_page):
    page = open_page(arch="torchvision:resnet50")
    next(control for control in page.segmented_control if control.label == "Memory").set_value("process")
    look_at(page, "bfloat16", 64)
    assert len(client.requests) == 1
    estimate = report_for(RESNET).find("bfloat16", 64)
    assert "at batch 64 in bfloat16 needs" in page.main.title[0].value
    assert cell(page, "bfloat16", 64).endswith(gib(estimate.process_bytes))
    assert address_of(page) == {"arch": "torchvision:resnet50", "focus": "bfloat16:64"}


def test_a_link_says_what_is_looked_at(client, open_page):
    page = open_page(arch="torchvision:resnet50", focus="float16:4")
    assert "at batch 4 in float16 needs" in page.main.title[0].value
    assert parse_query(link_on(page)).focus == ("float16", 4)
    page.text_input(key="batch").set_value("1, 2").run()
    assert "at batch 2 in float32 needs" in page.main.title[0].value, "a cell that is not asked for any more"
    assert "focus" not in address_of(page)
    page.text_input(key="batch").set_value("1, 4").run()
    assert address_of(page)["focus"] == "float16:4"
    page.selectbox(key="torchvision_name").set_value("resnet18").run()
    assert "focus" not in address_of(page), "another model is looked at anew"


# ------------------------------------------------------------------------------------------------------------- the link


def test_link_opens_its_question(client, open_page):
    page = open_page(arch="torchvision:resnet18", mode="inference", batch="2,3", image="96x128", gpu="t4")
    expected = Request(
        source="torchvision", name="resnet18", mode="inference", batches=(2, 3), image_size=(96, 128), gpu="t4"
    )
    assert client.requests == [expected]
    assert parse_query(link_on(page)) == replace(expected, focus=("float32", 3))
    assert page.text_input(key="batch").value == "2, 3"
    assert address_of(page)["batch"] == "2,3"


def test_the_fields_of_several_gpus_are_there_where_they_apply(client, open_page):
    page = open_page(arch="torchvision:resnet18", parallel="hsdp", ranks="4", replicate="2")
    asked = Request(source="torchvision", name="resnet18", parallel="hsdp", ranks=4, replicate=2)
    assert client.requests == [asked]
    assert parse_query(link_on(page)) == replace(asked, focus=("float32", 128))
    page.text_input(key="reshard").set_value("2").run()
    assert client.requests[-1] == replace(asked, reshard=2)
    page.toggle(key="offload").set_value(True).run()
    assert client.requests[-1] == replace(asked, reshard=2, offload=True)
    page.selectbox(key="parallel").set_value("ddp").run()
    assert client.requests[-1] == Request(source="torchvision", name="resnet18", parallel="ddp", ranks=4)
    assert not {"replicate", "reshard", "offload"} & {element.key for element in (*page.text_input, *page.toggle)}
    page.button_group(key="mode").set_value("inference").run()
    assert page.selectbox(key="parallel").options == ["One GPU", "FSDP2", "HSDP", "Tensor parallel"]
    assert client.requests[-1] == Request(source="torchvision", name="resnet18", mode="inference")
    page.selectbox(key="gpu").set_value("cpu").run()
    assert client.requests[-1] == Request(source="torchvision", name="resnet18", mode="inference", gpu="cpu")
    assert "parallel" not in {element.key for element in page.selectbox}


def test_what_is_split_beside_matrices_is_asked_where_they_are(client, open_page):
    page = open_page(arch="hf:llama-3.1-8b", dtype="bfloat16", batch="1", parallel="fsdp", tp="2", cp="2")
    page.toggle(key="lp").set_value(True).run()
    asked = client.requests[-1]
    assert (asked.tp, asked.sp, asked.lp, asked.cp) == (2, False, True, 2)
    page.text_input(key="tp").set_value("1").run()
    assert client.requests[-1] == replace(asked, tp=1, lp=False)
    assert not {"sp", "lp"} & {element.key for element in page.toggle}
    page.button_group(key="mode").set_value("inference").run()
    assert "cp" not in {element.key for element in page.text_input}
    page.button_group(key="mode").set_value("generate").run()
    assert page.selectbox(key="parallel").options == ["One GPU", "Tensor parallel"]
    page.selectbox(key="parallel").set_value("tp").run()
    page.text_input(key="tp").set_value("4").run()
    assert (client.requests[-1].mode, client.requests[-1].tp) == ("generate", 4)
    assert "sp" not in {element.key for element in page.toggle}


def test_a_pipeline_has_fields_of_its_own(client, open_page):
    page = open_page(arch="hf:llama-3.1-8b", parallel="fsdp", pp="2", batch="4")
    asked = Request(source="hf", name="llama-3.1-8b", batches=(4,), parallel="fsdp", pp=2)
    assert client.requests == [asked]
    page.text_input(key="microbatch").set_value("2").run()
    page.segmented_control(key="schedule").set_value("gpipe").run()
    assert client.requests[-1] == replace(asked, microbatch=2, schedule="gpipe")
    page.text_input(key="pp").set_value("").run()
    assert client.requests[-1] == replace(asked, pp=1)
    assert not {"schedule", "microbatch"} & {one.key for one in (*page.text_input, *page.segmented_control)}


def test_an_adapters_fields_are_there_where_they_apply(client, open_page):
    page = open_page(arch="torchvision:resnet18", train="adapter", r="8", targets="conv1,conv2")
    asked = Request(
        source="torchvision", name="resnet18", train="adapter", adapter_rank=8, adapter_targets=("conv1", "conv2")
    )
    assert client.requests == [asked]
    assert parse_query(link_on(page)) == replace(asked, focus=("float32", 128))
    page.text_input(key="alpha").set_value("8").run()
    assert client.requests[-1] == replace(asked, adapter_alpha=8)
    page.selectbox(key="adapter").set_value("ia3").run()
    assert client.requests[-1] == Request(source="torchvision", name="resnet18", train="adapter", adapter="ia3")
    assert not {"r", "alpha", "targets", "adapter_dropout"} & {element.key for element in page.text_input}
    page.button_group(key="train").set_value("head").run()
    assert client.requests[-1] == Request(source="torchvision", name="resnet18", train="head")
    assert "adapter" not in {element.key for element in page.selectbox}
    page.button_group(key="mode").set_value("inference").run()
    assert client.requests[-1] == Request(source="torchvision", name="resnet18", mode="inference")


def test_a_version_of_pytorch_is_asked_for_and_said_with_the_headline(client, open_page):
    page = open_page(arch="torchvision:resnet18", torch="2.11")
    assert client.requests == [Request(source="torchvision", name="resnet18", torch="2.11")]
    assert page.text_input(key="torch").value == "2.11"
    assert "Note: the rules are those of PyTorch 2.11." in [element.value for element in page.text]
    page.text_input(key="torch").set_value("2.13").run()
    assert client.requests[-1].torch == "2.13"
    assert address_of(page)["torch"] == "2.13"
    page.text_input(key="torch").set_value("").run()
    assert client.requests[-1].torch is None
    assert not any(element.value.startswith("Note: ") for element in page.text)


def test_a_version_without_known_rules_is_refused_on_the_page(client, open_page):
    page = open_page(arch="torchvision:resnet18")
    page.text_input(key="torch").set_value("2.5").run()
    shown = [element.value for element in page.text]
    assert "torch" in shown
    assert "Given: '2.5'" in shown
    assert len(client.requests) == 1


def test_link_to_copy_says_everything(client, open_page):
    page = open_page(arch="torchvision:resnet18")
    query = link_on(page)
    for part in (
        "v=1",
        "mode=training",
        "optimizer=adamw",
        "checkpointing=0",
        "gpu=a100-80gb",
        "batch=1,2,4,8,16,32,64,128",
    ):
        assert part in query.split("&")


def test_a_panel_says_how_it_was_computed(client, open_page):
    page = open_tab(open_page(arch="torchvision:resnet18"), "How this was computed")
    (panel,) = (tab for tab in page.tabs if tab.label == "How this was computed")
    titles = [element.value for element in panel.markdown]
    assert titles == [
        "**Kernels, by the rules of CUDA capability 8.0 in PyTorch 2.15**",
        "**Internal memory of kernels, at batch 1**",
        "**Exact**",
        "**Modelled or left out**",
        "**Allocator**",
        "**The range of the process, and its parts**",
    ]
    assert "batch norm: cuDNN (float32, training), 53 modules; float32" in [element.value for element in panel.text]


def test_refused_keys_are_named_and_the_rest_survives(client, open_page):
    page = open_page(arch="torchvision:resnet18", batch="-5", gpu="a100-80", optimizer="sgd", colour="red")
    assert client.requests == [Request(source="torchvision", name="resnet18", optimizer="sgd")]
    assert "Parts of this link were refused" in page.warning[0].value
    shown = "\n".join(texts(page))
    assert "batch: given '-5', allowed whole numbers from 1" in shown
    assert "gpu: given 'a100-80'" in shown and "a100-80gb" in shown
    assert "'colour': given 'colour=red', allowed a key" in shown
    page.selectbox(key="gpu").set_value("t4").run()
    assert not page.warning, "a changed question has an address of its own"
    assert address_of(page) == {"arch": "torchvision:resnet18", "optimizer": "sgd", "gpu": "t4"}


def test_refusals_are_shown_though_the_form_drops_a_key(client, open_page):
    page = open_page(arch="torchvision:resnet18", mode="inference", optimizer="sgd", gpu="nonsense")
    assert client.requests == [Request(source="torchvision", name="resnet18", mode="inference")]
    assert any("gpu: given 'nonsense'" in line for line in texts(page))
    assert address_of(page) == {"arch": "torchvision:resnet18", "mode": "inference"}
    next(control for control in page.segmented_control if control.label == "Memory").set_value("process").run()
    assert page.warning, "still the question that was opened"


@pytest.mark.parametrize("arch", ["", "no sense", "torchvision:../etc", "config:%%%", "hub:a--b/c"])
def test_refused_architecture_leaves_the_default(client, open_page, arch):
    page = open_page(arch=arch, gpu="t4")
    assert client.requests == [Request(source="torchvision", name="resnet50", gpu="t4")]
    assert page.warning


def test_a_new_address_fills_the_form_again(client, open_page):
    page = open_page(arch="torchvision:resnet18")
    page.query_params["arch"] = "torchvision:alexnet"
    page.run()
    assert page.selectbox(key="torchvision_name").value == "alexnet"
    assert client.requests[-1].name == "alexnet"


def test_repeated_key_is_refused(client, open_page):
    page = open_page(arch="torchvision:resnet18")
    page.query_params["batch"] = ["1", "2"]
    page.run()
    assert any("batch: given the key more than once" in line for line in texts(page))


# ------------------------------------------------------------------------------------------------------------- the form


def test_form_writes_the_address(client, open_page):
    page = open_page(arch="torchvision:resnet50")
    page.text_input(key="batch").set_value("4, 12").run()
    page.segmented_control(key="mode").set_value("inference").run()
    assert client.requests[-1] == Request(source="torchvision", name="resnet50", mode="inference", batches=(4, 12))
    assert address_of(page) == {"arch": "torchvision:resnet50", "mode": "inference", "batch": "4,12"}
    assert page.text_input(key="batch").value == "4, 12"


def test_bad_entry_is_refused_by_name(client, open_page):
    page = open_page()
    page.text_input(key="batch").set_value("4, many").run()
    assert len(client.requests) == 1
    assert page.error[0].value == "This query was refused."
    below_the_field = (
        "'4, many' is not understood. Allowed: whole numbers from 1 to 65,536, at most 32 sizes, separated by commas. "
        "Write for example 1,2,4."
    )
    assert below_the_field in texts(page.sidebar)
    assert [text for text in texts(page) if text != below_the_field] == [
        "batch",
        "Given: '4, many'",
        "Allowed: whole numbers from 1 to 65,536, at most 32 sizes, separated by commas",
        "What to do: write for example batch=1,2,4",
        *(text for text in texts(page) if text.startswith("The last answer, on another question: resnet50")),
    ]
    assert len(texts(page)) == 6  # the last answer stays, grey
    page.text_input(key="batch").set_value("4").run()
    assert client.requests[-1].batches == (4,)
    assert not page.error


@pytest.mark.parametrize(
    "query",
    [
        "arch=torchvision:resnet18&classes=10&cudnn_benchmark=1",
        "arch=torchvision:fasterrcnn_resnet50_fpn&dtype=float32&batch=2&trainable_layers=3",
        "arch=hf:gpt2&dtype=bfloat16&train=adapter&weights=nf4&compute=float32&prepare=0",
        "arch=hf:gpt2&compile=default&compile_scope=model&budget=0.5",
    ],
)
def test_the_form_keeps_keys_that_have_plain_fields(client, open_page, query):
    page = open_page(**dict(parse_qsl(query)))
    assert not page.exception
    assert client.requests[-1] == parse_query(query)


def test_expandable_segments_are_a_switch_of_cuda_devices(client, open_page):
    page = open_page()
    page.toggle(key="expandable").set_value(True).run()
    assert client.requests[-1].expandable_segments is True
    assert address_of(page)["expandable"] == "1"
    page.selectbox(key="gpu").set_value("m2-ultra-64gb").run()
    assert client.requests[-1].expandable_segments is False
    assert not page.error
    assert not [toggle for toggle in page.toggle if toggle.key == "expandable"]


def test_a_device_of_ones_own_has_two_fields_and_a_link(client, open_page):
    page = open_page()
    assert not [field for field in page.text_input if field.key == "gpu_memory"]
    page.selectbox(key="gpu").set_value("custom").run()
    assert client.requests[-1].gpu == "custom:24GiB@8.9"  # the example that the fields begin with
    page.text_input(key="gpu_memory").set_value(" 22.5 gib ")
    page.selectbox(key="gpu_capability").set_value("8.6").run()
    assert client.requests[-1].gpu == "custom:22.5GiB@8.6"
    assert address_of(page)["gpu"] == "custom:22.5GiB@8.6"
    assert "fits one CUDA device of capability 8.6 (22.5 GiB)" in page.main.title[0].value
    page.toggle(key="expandable").set_value(True).run()
    assert client.requests[-1].expandable_segments is True


def test_a_link_to_a_device_of_ones_own_fills_its_fields(client, open_page):
    page = open_page(arch="torchvision:resnet18", gpu="custom:20000MiB@12.1")
    assert client.requests == [Request(source="torchvision", name="resnet18", gpu="custom:20000MiB@12.1")]
    assert page.selectbox(key="gpu").value == "custom"
    assert page.text_input(key="gpu_memory").value == "20000MiB"
    assert page.selectbox(key="gpu_capability").value == "12.1"
    assert address_of(page) == {"arch": "torchvision:resnet18", "gpu": "custom:20000MiB@12.1"}
    page.selectbox(key="gpu").set_value("t4").run()
    assert client.requests[-1].gpu == "t4"


def test_memory_that_cannot_be_read_is_refused_with_an_example(client, open_page):
    page = open_page(gpu="custom:24GiB@8.9")
    page.text_input(key="gpu_memory").set_value("much").run()
    assert len(client.requests) == 1
    what, given, allowed, todo = texts(page)[:4]
    assert (what, given) == ("gpu", "Given: 'custom:much@8.9'")
    assert allowed.startswith("Allowed: custom:<memory>@<capability>, memory from 2 GiB")
    assert todo == "What to do: write for example gpu=custom:24GiB@8.9"
    page.text_input(key="gpu_memory").set_value("24GB").run()
    assert client.requests[-1].gpu == "custom:24GB@8.9"


def test_no_program_of_nvidias_is_named_for_another_makers_device(client, open_page):
    page = open_page(arch="torchvision:resnet18", gpu="mi300x")
    assert client.requests[-1].gpu == "mi300x"
    assert "for the whole process" in page.main.title[0].value and "nvidia-smi" not in page.main.title[0].value


@pytest.mark.parametrize("given", ["1 2 4", "1; 2", "1, 2 4"])
def test_batch_sizes_without_commas_are_refused_not_joined(client, open_page, given):
    page = open_page()
    page.text_input(key="batch").set_value(given).run()
    assert len(client.requests) == 1  # the page's first question: none of batch 124
    assert texts(page)[:3] == [
        "batch",
        f"Given: {given!r}",
        "Allowed: whole numbers from 1 to 65,536, at most 32 sizes, separated by commas",
    ]


def test_no_dtype_is_refused(client, open_page):
    page = open_page()
    page.pills(key="dtype").set_value([]).run()
    assert len(client.requests) == 1
    assert "dtype" in texts(page)


def test_a_model_of_timm(client, open_page):
    page = open_page(arch="torchvision:resnet50")
    page.selectbox(key="source").set_value("timm").run()
    assert client.requests[-1] == Request(source="timm", name="resnet50")
    assert page.selectbox(key="timm_name").options == ["alexnet", "convnext_tiny", "resnet18", "resnet50", "vit_b_16"]
    assert {"image"} == {field.key for field in page.text_input} & {"image", "seq", "head"}
    page.selectbox(key="timm_name").set_value("convnext_tiny").run()
    assert address_of(page)["arch"] == "timm:convnext_tiny"


def test_a_tag_of_timm_in_a_link_is_kept(client, open_page):
    page = open_page(arch="timm:resnet50.a1_in1k")
    assert client.requests[-1] == Request(source="timm", name="resnet50.a1_in1k")
    assert any("resnet50.a1\\_in1k" in title.value for title in page.title)


def test_hidden_choices_come_back(client, open_page):
    page = open_page(optimizer="sgd", arch="torchvision:resnet18")
    page.segmented_control(key="mode").set_value("inference").run()
    assert client.requests[-1].optimizer == "adamw", "inference has no optimizer to speak of"
    page.segmented_control(key="mode").set_value("training").run()
    assert client.requests[-1].optimizer == "sgd"


def test_optimizer_without_the_chosen_implementation(client, open_page):
    page = open_page(arch="torchvision:resnet18", optimizer_impl="fused")
    page.selectbox(key="optimizer").set_value("rmsprop").run()
    assert client.requests[-1].optimizer_impl is None


def test_preset(client, open_page):
    page = open_page(arch="torchvision:resnet50")
    page.selectbox(key="source").set_value("hf").run()
    page.selectbox(key="hf_name").set_value("gpt2").run()
    page.text_input(key="seq").set_value("128").run()
    assert client.requests[-1] == Request(source="hf", name="gpt2", sequence_length=128)
    assert page.main.title[0].value.startswith("Training GPT-2 ")


def test_another_architecture_starts_with_its_own_sizes(client, open_page):
    page = open_page(arch="torchvision:resnet18", image="64")
    page.selectbox(key="torchvision_name").set_value("resnet50").run()
    assert client.requests[-1].image_size == (64, 64), "the same kind of model at the same size"
    page.selectbox(key="source").set_value("hf").run()
    page.selectbox(key="hf_name").set_value("clip-vit-base-patch32").run()
    assert client.requests[-1].image_size is None
    page.text_input(key="image").set_value("96").run()
    page.text_input(key="seq").set_value("16").run()
    page.selectbox(key="hf_name").set_value("gpt2").run()
    assert client.requests[-1] == Request(source="hf", name="gpt2", sequence_length=16)


def test_size_that_a_link_sets_is_never_hidden(client, open_page):
    page = open_page(arch="hf:gpt2", image="64")
    assert client.requests[-1] == Request(source="hf", name="gpt2", image_size=(64, 64))
    assert page.text_input(key="image").value == "64"


def test_unnamed_repository_asks_for_its_name(client, open_page):
    page = open_page(arch="torchvision:resnet50")
    page.selectbox(key="source").set_value("hub").run()
    assert "Name a model" in page.info[0].value
    assert len(client.requests) == 1
    page.text_input(key="hub_name").set_value("org/name@v1").run()
    assert client.requests[-1] == Request(source="hub", name="org/name", revision="v1")


# ----------------------------------------------------------------------------------------------------- a stranger's config

HOSTILE = "**bold** [link](http://x.example) ![i](http://x.example/i.png) :red[x] `y`"


def test_pasted_config(client, open_page):
    page = open_page(arch="torchvision:resnet50")
    page.selectbox(key="source").set_value("config").run()
    page.text_area(key="config_name").set_value('{"model_type": "llama", "hidden_size": 64}').run()
    assert client.requests[-1] == Request(source="config", config='{"hidden_size":64,"model_type":"llama"}')
    query = link_on(page)
    assert replace(parse_query(query), focus=None) == client.requests[-1]
    again = AppTest.from_file(page._script_path, default_timeout=30)
    again.query_params["arch"] = address_of(page)["arch"]
    again.run()
    assert client.requests[-1].config == '{"hidden_size":64,"model_type":"llama"}'
    assert json.loads(again.text_area(key="config_name").value) == {"hidden_size": 64, "model_type": "llama"}


def test_a_pasted_adapter_config_asks_for_its_base_model(client, open_page):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-8B", "r": 32, "lora_alpha": 64}
    adapter["target_modules"] = ["q_proj"]
    page = open_page()
    page.selectbox(key="source").set_value("config").run()
    page.text_area(key="config_name").set_value(json.dumps(adapter)).run()
    request = client.requests[-1]
    assert (request.source, request.name, request.train, request.adapter) == ("hub", "Qwen/Qwen3-8B", "adapter", "lora")
    assert (request.adapter_rank, request.adapter_alpha, request.adapter_targets) == (32, 64, ("q_proj",))


def test_uploaded_config(monkeypatch, client, open_page):
    page = open_page(arch="torchvision:resnet50")
    page.selectbox(key="source").set_value("config").run()
    page.file_uploader(key="config_file").upload("config.json", b'\xef\xbb\xbf{"model_type": "bert"}').run()
    assert client.requests[-1] == Request(source="config", config='{"model_type":"bert"}')
    assert page.text_area(key="config_name").value == '{"model_type": "bert"}'


@pytest.mark.parametrize(
    ("content", "given"),
    [(b"\xff\xfe", "Given: bytes that are not UTF-8"), (b" " * (2 * 2**20 + 1), "Given: 2,097,153 bytes")],
)
def test_upload_that_is_refused(client, open_page, content, given):
    page = open_page()
    page.selectbox(key="source").set_value("config").run()
    page.file_uploader(key="config_file").upload("config.json", content).run()
    assert given in texts(page)
    assert len(client.requests) == 1
    page.text_area(key="config_name").set_value('{"model_type": "bert"}').run()
    assert given not in texts(page)
    assert client.requests[-1].config == '{"model_type":"bert"}'


def test_config_that_is_not_json(client, open_page):
    page = open_page()
    page.selectbox(key="source").set_value("config").run()
    page.text_area(key="config_name").set_value('{"hidden_size": 64\n64}').run()
    assert page.error[0].value == "This config cannot be used."
    said = "\n".join(texts(page))
    assert "config is not valid JSON" in said and "line 2, column 1" in said
    assert "base64url" not in said, "the reader has pasted a config, no link"
    assert len(client.requests) == 1


def test_config_too_long_for_an_address(client, open_page):
    # 4,000 different keys do not compress below 8,000 characters of base64
    config = json.dumps(
        {"model_type": "llama", **{f"k{n * 7919 % 100003:05}": n * 104729 % 999983 for n in range(4000)}}
    )
    assert len(encode_config(config)) > 8000
    page = open_page()
    page.selectbox(key="source").set_value("config").run()
    page.text_area(key="config_name").set_value(config).run()
    assert client.requests[-1].source == "config"
    assert not address_of(page)
    assert any("too many for a link" in line for line in texts(open_tab(page, "Link and command")))
    assert any("--config config.json" in code.value for code in page.code)


def test_names_from_strangers_are_never_markup(monkeypatch, open_page):
    def answer(request: Request):
        return report_for(request, model=census(HOSTILE, HOSTILE), failures={"float16": HOSTILE})

    install(monkeypatch, ScriptedClient(answer))
    page = open_page(arch=f"config:{encode_config(json.dumps({'model_type': HOSTILE}))}")
    assert page.main.title[0].value.startswith("Training this model ")
    assert any(HOSTILE in line for line in texts(page)), "the reason of the failure is shown"
    assert HOSTILE not in markup(page)
    assert "x.example" not in markup(page)


# ------------------------------------------------------------------------------------------------- what may go wrong


def test_failed_trace_keeps_the_counts(monkeypatch, open_page):
    why = "aten.nonzero.default has a size that depends on values"
    client = install(monkeypatch, ScriptedClient(lambda r: report_for(r, failures=dict.fromkeys(r.dtypes, why))))
    page = open_page(arch="torchvision:resnet50")
    assert len(client.requests) == 1
    assert "its step could not be traced" in page.warning[0].value
    assert f"float32, bfloat16, float16, amp-bfloat16, amp-float16: {why}" in texts(page)
    assert page.metric[0].delta == f"{PARAMETERS:,}"
    assert len(page.dataframe[0].value) == 3  # the modules that hold tensors


def test_no_batch_size_that_can_be_replayed_is_told_with_the_reason(monkeypatch, open_page):
    why = "float32, batch 65536: its blocks would take 9.2e+18 bytes"
    notes = ("131072 tokens exceed the 2048 positions of this model.", why)
    install(monkeypatch, ScriptedClient(lambda r: replace(report_for(r), estimates=(), focus=None, notes=notes)))
    page = open_page(arch="torchvision:resnet50", dtype="float32")
    assert "no batch size that was asked for could be replayed" in page.warning[0].value
    assert why in texts(page)
    assert page.metric[0].delta == f"{PARAMETERS:,}"


def test_one_failed_dtype_leaves_the_others(monkeypatch, open_page):
    install(monkeypatch, ScriptedClient(lambda r: report_for(r, failures={"float32": "no kernel"})))
    page = open_page(arch="torchvision:resnet50")
    assert "float32: no kernel" in texts(page)
    assert "in bfloat16 needs" in page.main.title[0].value
    assert cell(page, "float32", 128) == "not traced"
    assert cell(page, "bfloat16", 128).startswith("✓")


def test_advice_where_it_does_not_fit(client, open_page):
    page = open_page(arch="torchvision:resnet50", gpu="rtx-4060-8gb", batch="1,256", dtype="float32")
    look_at(page, "float32", 256)
    assert "it does not fit one GeForce RTX 4060 (8 GB); the largest batch is " in page.main.title[0].value
    shown = texts(page)
    assert any(line.startswith("It does not fit: the process needs ") for line in shown)


@pytest.mark.parametrize(
    ("error", "title"),
    [
        (BuildError("no such model", given="'x'", allowed="a", todo="b"), "The architecture could not be built."),
        (ConfigError("no such model", given="'x'", allowed="a", todo="b"), "This config cannot be used."),
        (
            HubError("no such model", given="'x'", allowed="a", todo="b"),
            "The config could not be fetched from the hub.",
        ),
        (JobError("no such model", given="'x'", allowed="a", todo="b"), "The estimate was not finished."),
        (TraceError("no such model", given="'x'", allowed="a", todo="b"), "The step could not be traced."),
        (SizerError("no such model", given="'x'", allowed="a", todo="b"), "Refused."),
    ],
)
def test_errors_say_what_to_do(monkeypatch, open_page, error, title):
    install(monkeypatch, ScriptedClient(error))
    page = open_page()
    assert page.error[0].value == title
    assert texts(page)[1:] == ["no such model", "Given: 'x'", "Allowed: a", "What to do: b"]


# -------------------------------------------------------------------------------------------------------- while it works


def test_progress_is_shown_and_gone(monkeypatch, open_page):
    client = install(monkeypatch, ScriptedClient(report_for, progress=["building", "tracing float32 at batch 2"]))
    page = open_page()
    assert page.main.title[0].value.startswith("Training resnet50")
    assert not page.status
    assert not client.jobs[0].cancelled


def test_progress_says_how_many_and_what_is_left(client, open_page):
    page = open_page(arch="torchvision:resnet50", dtype="float32,bfloat16,float16")
    assert not any(
        "of 24 cells" in text.value for text in [*page.caption, *page.text]
    )  # of what is whole nothing is said
    whole = report_for(client.requests[0])
    there = tuple(row for row in whole.estimates if row.dtype == "float32")
    report = replace(whole, estimates=there, pending=("bfloat16", "float16"))
    query = "arch=torchvision:resnet50&dtype=float32,bfloat16,float16"
    job = client.submit(query)
    answer = service.Answer(query=query, report=report, job=job)
    assert service.how_far(answer, 7.4) == "8 of 24 cells, still to come: bfloat16, float16 · 7 s · starting"
    first = replace(answer, report=replace(report, estimates=there[:1]).focused(("float32", 1)))
    begun = "1 of 24 cells, still to come: bfloat16, float16"
    assert service.how_far(first, 7.4) == f"{begun} · headline so far: float32, batch 1 · 7 s · starting"
    assert service.how_far(replace(first, focus=("float32", 1)), 7.4) == f"{begun} · 7 s · starting"
    page.session_state["answer"] = replace(answer, job=None, missing="it hit the time limit.")
    page.run()
    assert page.warning[0].value == "This answer is not whole, bfloat16, float16 missing: it hit the time limit."
    searching = replace(whole, pending=("bfloat16", "float16"))
    assert service.how_far(replace(answer, report=searching), 7.4) == "24 of 24 cells · 7 s · starting"
    page.session_state["answer"] = replace(answer, report=searching, job=None, missing="it hit the time limit.")
    page.run()
    assert page.warning[0].value.startswith(
        "This answer is not whole, the largest batch in bfloat16, float16 not searched: it hit"
    )


def test_an_error_leaves_no_progress_behind(monkeypatch, open_page):
    install(monkeypatch, ScriptedClient(JobError("too slow"), progress=["building"]))
    page = open_page()
    assert page.error
    assert not page.status


def test_abandoned_job_is_cancelled(monkeypatch, open_page):
    class Abandoned(BaseException):
        """What a rerun or a closed tab does to a page that waits."""

    client = ScriptedClient(report_for)
    job = client.submit("arch=torchvision:resnet50")
    monkeypatch.setattr(job, "result", lambda timeout: (_ for _ in ()).throw(Abandoned()))
    monkeypatch.setattr(client, "submit", lambda query: job)
    install(monkeypatch, client)
    with pytest.raises(Abandoned):
        service.report_on(RESNET)
    assert job.cancelled


def test_stopped_job_waits_for_the_word(client, open_page):
    page = open_page(arch="torchvision:resnet50")
    query = "arch=torchvision:resnet50&gpu=t4"
    report = report_for(parse_query(query))
    page.session_state["answer"] = service.Answer(query=query, report=report, missing="you stopped it.")
    page.selectbox(key="gpu").set_value("t4").run()
    assert len(client.requests) == 1
    assert page.warning[0].value == "This answer is not whole: you stopped it."
    assert page.main.title, "what was known then stays"
    page.button(key="again").click().run()
    assert client.requests[-1].gpu == "t4"
    assert page.main.title


# -------------------------------------------------------------------------------------------------------------- and more


def test_what_is_assumed_and_not_counted_is_said(client, open_page):
    page = open_page()
    assert "1 thing is not counted: see the tab Not counted." in [caption.value for caption in page.caption]
    shown = texts(open_tab(page, "Not counted"))
    for line in (
        "cuDNN may choose a faster convolution with a larger workspace.",
        "cuBLAS takes its default workspace of 8 MiB.",
        "The loss is cross entropy over 1000 classes.",
        "sizer 0.1.0, torch 2.15.0, torchvision 0.29.0, transformers 5.23.0",
    ):
        assert line in shown


def test_tensors_worth_knowing_are_listed(monkeypatch, open_page):
    model = replace(census("x"), tied_parameters=(("a.weight", "b.weight"),))
    install(monkeypatch, ScriptedClient(lambda request: report_for(request, model=model)))
    page = open_tab(open_page(), "Tensors")
    assert any("neither parameters nor buffers" in markdown.value for markdown in page.markdown)
    frames = [frame.value for frame in page.dataframe]
    assert any("Tensor" in frame and frame["Tensor"].tolist() == ["mask"] for frame in frames)
    assert any("Names" in frame and frame["Names"].tolist() == ["a.weight = b.weight"] for frame in frames)


def test_downloads_are_offered(client, open_page):
    page = open_tab(open_page(), "Modules")
    labels = [button.proto.label for button in page.get("download_button")]
    assert labels == ["CSV", "JSON", "Picture", "Script", "Modules (CSV)"]
    assert all(button.proto.ignore_rerun for button in page.get("download_button"))


def test_what_changes_the_answer_stands_beside_the_headline(monkeypatch, open_page):
    def answer(request: Request):
        report = report_for(request)
        return replace(
            report,
            cautions=("the weights of this checkpoint are AWQ",),
            request={**report.request, "sequence_length": 2048},
            explanation=replace(report.explanation, stand_ins=("how many boxes there are",)),
        )

    install(monkeypatch, ScriptedClient(answer))
    page = open_page(arch="hf:gpt2", mode="inference")
    shown = texts(page)
    for line in (
        "Note: the weights of this checkpoint are AWQ.",
        "Note: this is one forward pass over all 2,048 tokens; generating token by token is not counted.",
        "Note: 1 value that the code reads had to be assumed: see Not counted.",
    ):
        assert line in shown[:5]


def test_about_page_and_back(client, open_page):
    page = open_page(arch="torchvision:resnet18", gpu="t4")
    page.switch_page("pages/numbers.py").run()
    assert page.title[0].value == "About the numbers"
    (devices,) = (frame.value for frame in page.dataframe if "Key in links" in frame.value)
    assert "h200" in devices["Key in links"].tolist()
    assert [header.value for header in page.header][-4:] == [
        "What `.to()` moves, and what it leaves behind",
        "Memory counters by backend",
        "CUDA out of memory",
        "Devices",
    ]
    assert "never in place: assign what it returns" in markup(page)
    *layers, told = [text.value for text in page.text]
    assert [text.partition(":")[0] for text in layers] == list(CONFINEMENT)
    assert told.endswith("answers are made with sizer 0.1.0, torch 2.15.0.")
    page.query_params.clear()  # what the browser does on its way to another page
    page.switch_page("pages/estimate.py").run()
    assert page.selectbox(key="gpu").value == "t4"
    assert len(client.requests) == 1
    assert address_of(page)["gpu"] == "t4"

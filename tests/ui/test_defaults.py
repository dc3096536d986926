"""The page's own choice of dtypes, batch sizes and task: by model, device and task, and only in fields that nobody has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import TASKS
from sizer.catalogue.sources import SOURCES
from sizer.query.request import DEFAULT_BATCHES, Request
from sizer.query.values import DTYPES
from sizer.report.report import Report
from sizer.ui.defaults import sizes_for, task_for
from tests.ui.clients import ScriptedClient
from tests.ui.conftest import install, markup
from tests.ui.reports import report_for
from tests.ui.test_page import address_of

LAPTOP = "rtx-4060-laptop"


@pytest.mark.parametrize(
    ("source", "name", "gpu", "task", "dtypes", "batches"),
    [
        ("torchvision", "resnet50", "a100-80gb", "training", ("float32", "amp-bfloat16"), (1, 8, 32, 128)),
        ("torchvision", "resnet50", "t4", "inference", ("float32", "float16"), (1, 8, 32, 128)),  # capability 7.5
        ("torchvision", "fasterrcnn_resnet50_fpn", LAPTOP, "training", ("float32", "amp-bfloat16"), (1, 2, 4)),
        ("torchvision", "ssdlite320_mobilenet_v3_large", "t4", "fine-tuning", ("float32", "amp-float16"), (1, 2, 4)),
        ("hf", "llama-3.2-3b", "h100-80gb", "training", ("bfloat16", "amp-bfloat16"), (1, 2, 4, 8)),  # 16 * 3.21e9 = 51.4 GB
        ("hf", "llama-3.1-8b", "h100-80gb", "training", ("bfloat16",), (1, 2, 4, 8)),  # 16 * 8.03e9 = 128.5 GB
        ("hf", "llama-3.1-8b", "rtx-4090", "fine-tuning", ("bfloat16",), (1, 2, 4, 8)),
        ("hf", "gpt-oss-20b", "a100-80gb", "fine-tuning", ("bfloat16",), (1, 2, 4, 8)),  # its config has a part, the model has not
        ("hf", "qwen3.5-0.8b", "a100-80gb", "training", ("bfloat16",), (1, 2, 4)),  # pictures, too
        ("hf", "rtdetr_v2_r18vd", "a100-80gb", "training", ("amp-bfloat16",), (1, 2, 4)),
        ("hf", "timesfm-2.5-200m-transformers", "a100-80gb", "training", ("bfloat16",), (1, 2, 4)),
        ("hf", "llama-3.1-8b", "v100-16gb", "generate", ("float16",), (1, 8, 32)),
        ("hub", "org/name", "m2-ultra-64gb", "inference", ("bfloat16",), (1, 8, 32)),
    ],
)
def test_sizes_suit_the_question(
    source: str, name: str, gpu: str, task: str, dtypes: tuple[str, ...], batches: tuple[int, ...]
) -> None:
    sizes = sizes_for(SOURCES[source], name, find_gpu(gpu), TASKS[task])
    assert (sizes.dtypes, sizes.batches) == (dtypes, batches)


def test_only_batch_sizes_of_the_page_may_be_left_out(open_page, client) -> None:
    page = open_page()
    assert client.stops[-1]
    page.text_input(key="batch").set_value("1, 8, 32").run()
    assert not client.stops[-1]
    for focus, may_stop in (({}, True), ({"focus": "float32:8"}, False)):
        open_page(arch="torchvision:resnet50", dtype="float32,amp-bfloat16", batch="1,8,32,128", **focus)
        assert client.stops[-1] == may_stop, "a cell that somebody looks at is computed"


def test_a_cell_that_was_left_out_is_computed_once_it_is_looked_at(open_page, monkeypatch) -> None:
    def answer(request: Request) -> Report:
        report = report_for(request)
        rows = [replace(row, fits=False) if row.batch > 1 else row for row in report.estimates]
        return replace(report, estimates=tuple(rows[:-1] if client.stops[-1] else rows))

    client = install(monkeypatch, ScriptedClient(answer))
    page = open_page()
    assert page.dataframe[0].value.loc["amp-bfloat16"]["128"] == "✕\N{NO-BREAK SPACE}not computed"
    assert "two smaller batch sizes do not fit" in markup(page)
    page.session_state["focus"] = ("amp-bfloat16", 128)
    page.run()
    assert "at batch 128 in amp-bfloat16" in page.title[0].value
    assert "not computed" not in page.dataframe[0].value.to_string()
    assert client.stops == [True, False]


def test_every_detection_model_of_torchvision_is_known() -> None:
    models = pytest.importorskip("torchvision.models")
    detection = set(models.list_models(module=models.detection))
    few = {
        name
        for name in models.list_models()
        if sizes_for(SOURCES["torchvision"], name, find_gpu("t4"), TASKS["training"]).batches == (1, 2, 4)
    }
    assert few == detection


@pytest.mark.parametrize(
    ("source", "name", "gpu", "task"),
    [
        ("hf", "llama-3.1-8b", "rtx-4090", "fine-tuning"),  # 8 * 8.03e9 = 64.2 GB on 24 GB
        ("hf", "llama-3.1-8b", "a100-80gb", "training"),  # 64.2 GB on 85.0 GB
        ("hf", "llama-3.1-70b", "a100-80gb", "fine-tuning"),
        ("hf", "gemma-3-27b", "a100-80gb", "fine-tuning"),  # of images, too
        ("hf", "gpt2", "rtx-4090", "training"),
        ("hf", "vit-base-patch16-224", "t4", "training"),
        ("hf", "sam2.1-hiera-tiny", "t4", "inference"),  # its forward pass runs under torch.inference_mode
        ("hub", "org/name", "t4", "training"),
    ],
)
def test_the_task_suits_the_model_and_the_device(
    source: str, name: str, gpu: str, task: str
) -> None:
    assert task_for(SOURCES[source], name, find_gpu(gpu)) == task


def test_fields_follow_the_model_and_the_device(client, open_page) -> None:
    page = open_page()
    assert client.requests[-1] == Request(
        source="torchvision", name="resnet50", dtypes=("float32", "amp-bfloat16"), batches=(1, 8, 32, 128)
    )
    page.selectbox(key="source").set_value("hf").run()
    page.selectbox(key="hf_name").set_value("llama-3.1-8b").run()
    assert client.requests[-1] == Request(
        source="hf", name="llama-3.1-8b", dtypes=("bfloat16",), batches=(1, 2, 4, 8)
    )
    page.selectbox(key="gpu").set_value("rtx-4090").run()
    assert client.requests[-1] == Request(
        source="hf", name="llama-3.1-8b", train="adapter", dtypes=("bfloat16",), batches=(1, 2, 4, 8), gpu="rtx-4090"
    )
    assert address_of(page)["batch"] == "1,2,4,8"
    page.segmented_control(key="mode").set_value("training").run()
    page.selectbox(key="gpu").set_value("t4").run()
    assert client.requests[-1].train == "all", "a task that the reader chose stays"
    assert client.requests[-1].dtypes == ("float16",)


def test_an_adapter_is_around_the_layers_that_peft_adapts(client, open_page) -> None:
    page = open_page()
    page.selectbox(key="source").set_value("hf").run()
    page.selectbox(key="hf_name").set_value("deepseek-v4-flash").run()
    assert (client.requests[-1].train, client.requests[-1].adapter_targets) == ("adapter", ("attention",))
    page.selectbox(key="hf_name").set_value("llama-3.1-70b").run()
    assert client.requests[-1].adapter_targets == ("all-linear",)


def test_what_the_reader_or_a_link_chose_stays(client, open_page) -> None:
    page = open_page()
    page.text_input(key="batch").set_value("3").run()
    page.selectbox(key="source").set_value("hf").run()
    assert client.requests[-1].batches == (3,)
    assert "float32" not in client.requests[-1].dtypes
    linked = open_page(arch="torchvision:resnet50")
    assert (client.requests[-1].dtypes, client.requests[-1].batches) == (DTYPES, DEFAULT_BATCHES)
    linked.selectbox(key="torchvision_name").set_value("resnet18").run()
    assert (client.requests[-1].dtypes, client.requests[-1].batches) == (DTYPES, DEFAULT_BATCHES)


def test_the_grid_is_one_click_away(client, open_page) -> None:
    page = open_page()
    page.button(key="all_cells").click().run()
    assert client.requests[-1] == Request(source="torchvision", name="resnet50")
    assert "all_cells" not in {button.key for button in page.button}
    assert address_of(page) == {"arch": "torchvision:resnet50"}, "the query's own defaults"

"""The headline's words for every verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest
from streamlit.testing.v1 import AppTest

from sizer.catalogue.gpus import GPUS
from sizer.query.request import Request
from sizer.ui.headline import sentence, subject, verdict
from tests.ui.reports import census, report_for

GIB = 2**30
RESNET = Request(source="torchvision", name="resnet50", dtypes=("float32",), batches=(32,))


def worded(fits, *, batch=7, possible=9, tried=False, most=None, returned=0, pending=()):
    """The verdict on an estimate at batch 32 that fits or not, if `batch` is the largest that does."""
    report = report_for(replace(RESNET, gpu="t4"))
    estimate = replace(report.estimates[0], fits=fits, returned_bytes=returned)
    row = replace(report.max_batch[0], batch=batch, possible_batch=possible, tried=tried, most_batch=most)
    report = replace(report, estimates=(estimate,), max_batch=(row,), pending=pending)
    return verdict(RESNET, report, estimate).removeprefix("it ")


def test_verdicts():
    assert worded(True, batch=1725, possible=1725) == "fits one Tesla T4 (16 GB); the largest batch is 1,725"
    assert worded(True, batch=40, possible=42, returned=1) == "only just fits one Tesla T4 (16 GB); the largest batch is 40 to 42"
    assert worded("uncertain", batch=None, possible=40) == "may not fit one Tesla T4 (16 GB); the largest batch is at most 40"
    assert worded(False) == "does not fit one Tesla T4 (16 GB); the largest batch is 7 to 9"
    assert worded(False, batch=None, possible=None) == "does not fit one Tesla T4 (16 GB); no batch fits"
    assert worded(True, batch=1725, pending=("float32",)) == "fits one Tesla T4 (16 GB)"


def test_verdicts_where_not_every_batch_was_tried():
    assert worded(True, batch=32, tried=True) == "fits one Tesla T4 (16 GB); the largest batch is at least 32"
    # nothing below 32 was tried
    assert worded(False, batch=None, tried=True) == "does not fit one Tesla T4 (16 GB); the largest batch is at most 31"
    assert worded(False, batch=8, tried=True, most=15) == "does not fit one Tesla T4 (16 GB); the largest batch is 8 to 15"
    assert worded("uncertain", batch=None, possible=None, tried=True) == "may not fit one Tesla T4 (16 GB)"


@pytest.mark.parametrize(
    ("gpu", "seen"),
    [
        ("t4", "as nvidia-smi shows it"),
        ("dgx-spark", "for the whole process"),
        ("mi300x", "for the whole process"),
        ("cpu", "for the whole process"),
    ],
)
def test_sentence(gpu, seen):
    report = report_for(replace(RESNET, gpu=gpu, mode="inference"))
    # 3.02 GiB = 3242745856 bytes, 4 GiB = 4294967296 bytes
    estimate = replace(report.estimates[0], peak_allocated_bytes=3_242_745_856, process_bytes=4 * GIB)
    assert sentence(replace(RESNET, gpu=gpu, mode="inference"), report, estimate).startswith(
        "Inference with resnet50 at batch 32 in float32 needs "
        f"4.00 GiB {seen} (3.02 GiB allocated); it fits one {GPUS[gpu].name}"
    )


def test_a_rank_of_several_is_told_from_the_whole():
    request = replace(RESNET, gpu="t4", parallel="ddp", ranks=4, replicate=1)
    report = report_for(RESNET)
    report = replace(report, request=report.request | {"parallel": "ddp", "ranks": 4})
    told = sentence(request, report, replace(report.estimates[0], fits=False))
    assert " on each of 4 GPUs; a rank does not fit one " in told


def figures_page(report, estimate):
    from sizer.ui.headline import show_figures

    show_figures(report, estimate)


def test_what_the_host_holds_stands_beside_the_other_figures():
    report = report_for(RESNET)

    def labels(host_bytes):
        estimate = replace(report.estimates[0], host_bytes=host_bytes)
        page = AppTest.from_function(figures_page, args=(report, estimate)).run()
        return [metric.label for metric in page.metric]

    assert "Process" in labels(0) and "Host" not in labels(0)
    assert labels(3 * GIB).index("Host") == labels(3 * GIB).index("Reserved") + 1


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ({"sequence_length": 2048, "image_size": None}, "at batch 32 of 2,048 tokens in"),
        ({"sequence_length": None, "image_size": (224, 320)}, "at batch 32 of 224 × 320 pixels in"),
        ({"sequence_length": None, "image_size": None}, "at batch 32 in"),
    ],
)
def test_sentence_names_the_size_of_a_sample(size, words):
    report = replace(report_for(RESNET), request=size)
    assert words in sentence(RESNET, report, report.estimates[0])


def test_subject_holds_no_stranger():
    report = report_for(RESNET)
    assert subject(replace(RESNET, name="vit_b_16"), report) == r"vit\_b\_16"
    assert subject(Request(source="hf", name="gpt2"), report) == "GPT-2 124M"
    assert subject(Request(source="hub", name="www.x.example/y"), report) == "this ResNet"
    strange = replace(report, model=census("x", "Res[Net](http://x.example)"))
    assert subject(Request(source="config", config="{}"), strange) == "this model"


def test_the_headline_names_what_is_trained():
    for keys, begin in (
        ({"train": "head"}, "Training the head of resnet50 at batch 32"),
        ({"train": "adapter", "adapter_rank": 8}, "Training LoRA (r 8) on resnet50 at batch 32"),
        ({"train": "adapter", "adapter": "ia3"}, "Training IA³ on resnet50 at batch 32"),
        ({"train": "adapter", "adapter": "prompt"}, "Training prompt tuning (16 tokens) on resnet50 at batch 32"),
    ):
        request = replace(RESNET, **keys)
        report = report_for(request)
        assert sentence(request, report, report.estimates[0]).startswith(begin)


def test_a_generation_is_told_by_its_tokens():
    asked = Request(source="hf", name="llama-3.1-8b", mode="generate", dtypes=("bfloat16",), batches=(32,), new=512)
    report = report_for(asked)
    report = replace(report, request=report.request | {"sequence_length": 2048})
    said = sentence(asked, report, report.estimates[0])
    assert said.startswith(
        "Generating 512 tokens after a prompt of 2,048 with Llama 3.1 8B at batch 32 in bfloat16 needs "
    )
    assert sentence(replace(asked, new=1), report, report.estimates[0]).startswith("Generating 1 token after a prompt")

"""The question in words: its line, the tab's title, file names, the examples."""

from __future__ import annotations

import pytest

from sizer.query.request import Request
from sizer.query.text import format_query, parse_query
from sizer.ui.question_words import EXAMPLES, file_stem, summary, tab_title

RESNET = Request(source="torchvision", name="resnet50", dtypes=("float32",), batches=(1, 32), gpu="rtx-4090")


@pytest.mark.parametrize("query", EXAMPLES.values())
def test_examples_are_links_of_this_page(query):
    assert format_query(parse_query(query)) == query


def test_the_question_in_one_line():
    query = "arch=hf:gpt2&dtype=bfloat16&batch=2&seq=2048&optimizer=adam&optimizer_impl=fused&checkpointing=1&gpu=t4"
    assert summary(parse_query(query)) == (
        "GPT-2 124M · Training · bfloat16 · batch 2 · 2,048 tokens · adam fused · activation checkpointing · Tesla T4 (16 GB)"
    )
    inference = "arch=torchvision:resnet50&mode=inference&dtype=float32&batch=1&image=96x128&checkpointing=1"
    assert summary(parse_query(inference)) == (
        "resnet50 · Inference · float32 · batch 1 · 96 × 128 pixels · A100 (80 GB)"
    )
    assert summary(parse_query(inference), for_device=False).endswith(" · 96 × 128 pixels")


@pytest.mark.parametrize(
    ("request_", "title", "stem"),
    [
        (RESNET, "resnet50 on GeForce RTX 4090 (24 GB) · Sizer", "sizer-resnet50-training-rtx-4090"),
        (
            Request(source="hub", name="org/My_Model", mode="inference", gpu="custom:24GiB@8.9"),
            "org/My_Model on CUDA device of capability 8.9 (24 GiB) · Sizer",
            "sizer-my-model-inference-custom-24gib-8.9",
        ),
        (
            Request(source="config", config="{}", gpu="t4"),
            "config.json on Tesla T4 (16 GB) · Sizer",
            "sizer-config-training-t4",
        ),
    ],
)
def test_the_tab_and_the_files_are_named_after_the_question(request_, title, stem):
    assert (tab_title(request_), file_stem(request_)) == (title, stem)


def test_what_is_trained_is_part_of_the_question():
    query = "arch=hf:gpt2&dtype=bfloat16&batch=2&train=adapter&adapter=dora&r=8&accumulate=4&gpu=t4"
    assert summary(parse_query(query)) == (
        "GPT-2 124M · Training · bfloat16 · batch 2 · adamw · DoRA (r 8) · 4 accumulated passes · Tesla T4 (16 GB)"
    )
    assert " · the head · " in summary(parse_query("arch=hf:gpt2&dtype=bfloat16&batch=2&train=head"))


def test_ranks_are_part_of_the_question():
    query = "arch=hf:gpt2&dtype=bfloat16&batch=2&gpu=t4&parallel="
    assert " · FSDP2 over 16 ranks · " in summary(parse_query(f"{query}fsdp&ranks=16"))
    assert " · FSDP2 over 16 × 8 ranks · " in summary(parse_query(f"{query}fsdp&ranks=16&tp=8"))
    assert " · Tensor parallel over 4 ranks · " in summary(parse_query(f"{query}tp&tp=4&optimizer_impl=loop"))
    split = summary(parse_query(f"{query}fsdp&ranks=2&tp=4&sp=1&lp=1"))
    assert " · FSDP2 over 2 × 4 ranks · tensor, sequence and loss parallel · " in split
    assert " · DDP over 2 × 4 ranks · context parallel · " in summary(parse_query(f"{query}ddp&ranks=2&cp=4"))
    assert " · FSDP2 over 16 × 2 ranks · 2 stages, GPipe, microbatch 1 · " in summary(
        parse_query(f"{query}fsdp&ranks=16&pp=2&schedule=gpipe")
    )
    assert " · HSDP over 2 × 8 ranks · " in summary(parse_query(f"{query}hsdp&replicate=2"))


def test_what_is_asked_of_a_pipeline_is_in_the_question():
    offload = "offload=group-leaf&stream=1"
    asked = f"frames=9&weights=transformer:nf4&{offload}&vae=tiling&guidance=0&output=latent&without=text_encoder_3"
    said = summary(parse_query(f"arch=diffusers:sd3-medium&{asked}"), for_device=False)
    assert said == (
        "sd3-medium · Inference · bfloat16 · batch 1 · 9 frames · weights transformer:nf4 · group offload, layer by layer"
        " · separate stream · VAE tiling · guidance off · returns latent · without text_encoder_3"
    )

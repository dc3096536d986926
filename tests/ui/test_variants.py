"""Variants: a question beside itself with one change, named in words."""

from __future__ import annotations

from sizer.query.text import parse_query
from sizer.ui import compare_questions
from sizer.ui.compare import headings
from sizer.ui.compare_questions import VARIANTS, titles, with_variant

LANGUAGE = "arch=hf:llama-3.1-8b&dtype=float32&batch=1&seq=64&gpu=rtx-4090"


def changed_by(query: str) -> dict[str, str]:
    request = parse_query(query)
    return {row.title: changed for row in VARIANTS if (changed := with_variant(request, row)) is not None}


def test_variants_change_what_they_say_and_nothing_else():
    found = changed_by(LANGUAGE)
    request = parse_query(LANGUAGE)
    assert found["+ checkpointing"].checkpointing and not request.checkpointing
    assert (found["QLoRA"].train, found["QLoRA"].weights) == ("adapter", "nf4-dq")
    assert found["bfloat16"].dtypes == ("bfloat16",)
    assert {one.gpu for one in found.values()} == {"rtx-4090"}
    assert {one.batches for one in found.values()} == {(1,)}


def test_what_a_question_has_or_refuses_is_not_offered():
    assert "+ checkpointing" not in changed_by(f"{LANGUAGE}&checkpointing=1")
    vision = changed_by("arch=torchvision:resnet18&dtype=float32&batch=2&focus=float32:2")
    assert "eager attention" not in vision and "bfloat16" in vision
    assert "SGD" not in changed_by(f"{LANGUAGE}&mode=inference")


def test_a_comparison_is_named_in_words():
    request = parse_query(LANGUAGE)
    lora, qlora = changed_by(LANGUAGE)["LoRA"], changed_by(LANGUAGE)["QLoRA"]
    assert titles([request, lora, qlora]) == ["as asked", "LoRA", "QLoRA"]
    assert list(headings({1: request, 2: lora}).values()) == ["1 · as asked", "2 · LoRA"]
    other = parse_query(LANGUAGE.replace("float32", "bfloat16") + "&checkpointing=1")
    assert titles([request, other]) == ["as asked", ""]
    assert "checkpointing" in headings({1: request, 2: other})[2], "two changes are told by their keys"


def test_one_click_compares_with_a_variant(client, open_page):
    page = open_page(arch="hf:gpt2", dtype="float32", batch="1", seq="64")
    assert not any("variant" in str(button.key) for button in page.button), "the menu is closed"
    page.session_state[compare_questions.MENU] = True
    page.run()
    page.button(key="variant + checkpointing").click().run()
    kept = page.session_state[compare_questions.QUESTIONS]
    assert len(kept) == 2 and "checkpointing=1" in kept[1] and "checkpointing=1" not in kept[0]

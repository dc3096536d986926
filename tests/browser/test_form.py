"""The form in a browser: devices by memory, by "laptop" and by "my", 8k, an error beside its field, the hub offline."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.browser.conftest import ANSWER_MS
from tests.browser.test_browser import headline, write
from tests.browser.test_clicks import wait_for

LANGUAGE = "arch=hf:gpt2&dtype=bfloat16&batch=1&seq=64"


def found(page: Page, words: str) -> list[str]:
    """Return the first entries of the device field for what was typed."""
    box = page.get_by_role("combobox", name=re.compile("Device"))
    box.click()
    box.fill(words)
    expect(page.get_by_role("option").first).to_be_visible()
    options = page.get_by_role("option").all_inner_texts()
    box.press("Escape")
    return options


def test_fields_are_found_and_filled_as_people_do(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?{LANGUAGE}")
    headline(page, "Training GPT-2")
    assert all(re.search(r" · 8 GB$", option) for option in found(page, "8 GB")[:10])
    assert all("Laptop" in option for option in found(page, "laptop")[:15])
    for words in ("custom", "other", "my"):
        assert found(page, words)[0].startswith("Other: my custom device")
    write(page, "Sequence length", "many")
    error = page.get_by_test_id("stSidebar").get_by_text("Sequence length: not understood")
    expect(error).to_be_visible(timeout=ANSWER_MS)
    field = page.get_by_label("Sequence length", exact=True)
    assert 0 < error.bounding_box()["y"] - field.bounding_box()["y"] < 80, "right below the field"
    write(page, "Sequence length", "1k")
    wait_for(page, seq="1024")
    expect(error).to_have_count(0)
    page.get_by_test_id("stSidebar").get_by_text("Fine-tuning", exact=True).click()
    wait_for(page, train="adapter")


def test_a_repository_is_answered_by_its_preset_without_the_hub(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?arch=hub:openai-community/gpt2&dtype=bfloat16&batch=1&seq=64&mode=inference")
    headline(page, "Inference with GPT-2")
    expect(page.get_by_text("The answer is that of the preset GPT-2")).to_be_visible(timeout=ANSWER_MS)


def test_a_model_is_found_by_what_people_call_it(page: Page, app_url: str) -> None:
    def type_model(text: str) -> None:
        box = page.get_by_label("Model", exact=True)
        box.click()
        box.fill(text)
        box.press("Enter")

    page.goto(f"{app_url}/?{LANGUAGE}&mode=inference")
    headline(page, "Inference with GPT-2")
    type_model("distilbert/distilgpt2")  # its title is DistilGPT-2
    wait_for(page, arch="hf:distilgpt2")
    type_model("lama-3.1-8b")
    expect(page.get_by_test_id("stSidebar").get_by_text("llama-3.1-8b")).to_be_visible(timeout=ANSWER_MS)
    expect(page.get_by_label("Model", exact=True)).to_have_value("DistilGPT-2")
    page.goto(f"{app_url}/?arch=torchvision:alexnet&dtype=float32&batch=1&image=64&mode=inference")
    headline(page, "Inference with alexnet")
    type_model("ResNet-18")
    wait_for(page, arch="torchvision:resnet18")

"""Five walks from the empty address, as new users go, with the number of their actions. A choice from a list is one action."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import ANSWER_MS
from tests.browser.test_browser import LLAMA, LLAMA_PARAMETERS, headline, wait_for_the_whole
from tests.browser.test_clicks import wait_for


class Walk:
    """A visit that counts its actions. Each waits for what it acts on; the tests wait for answers."""

    def __init__(self, page: Page, app_url: str) -> None:
        self.page, self.actions = page, 0
        page.goto(app_url)
        headline(page, "Training resnet50")

    def click(self, target: Locator) -> None:
        """Click on something, once the run that has begun has ended."""
        wait_for_the_whole(self.page)
        target.click(timeout=ANSWER_MS)
        self.actions += 1

    def choose(self, label: str, option: str, typed: str = "") -> None:
        """Choose an option of a select box, from the open list or by a part of its text."""
        wait_for_the_whole(self.page)
        box = self.page.get_by_role("combobox", name=re.compile(label))
        box.click()
        if typed:
            box.fill(typed)
        self.page.get_by_role("option", name=option, exact=True).click()
        self.actions += 1

    def write(self, target: Locator, text: str, key: str) -> None:
        """Fill a field and confirm it by a key."""
        target.fill(text)
        target.press(key)
        self.actions += 1


def test_detection_on_a_laptop_reaches_a_change_that_fits(page: Page, app_url: str) -> None:
    walk = Walk(page, app_url)
    walk.choose("^Model$", "fasterrcnn_resnet50_fpn", typed="fasterrcnn_resnet50_fpn")
    wait_for(page, arch="torchvision:fasterrcnn_resnet50_fpn", batch="1,2,4")
    walk.choose("Device", "GeForce RTX 4060 Laptop · 8 GB", typed="4060 laptop")
    headline(page, "GeForce RTX 4060 Laptop")
    walk.write(page.get_by_role("textbox", name="Batch sizes"), "4", "Enter")
    wait_for(page, batch="4")
    headline(page, "at batch 4 of 480 × 640 pixels")
    expect(page.get_by_text("To make it fit: ")).to_be_visible(timeout=ANSWER_MS)
    walk.click(page.get_by_role("button", name="Apply all"))
    headline(page, "fits one GeForce RTX 4060 Laptop")
    assert walk.actions <= 4


def test_qlora_of_an_8b_on_24_gb(page: Page, app_url: str) -> None:
    walk = Walk(page, app_url)
    walk.choose("Model source", "Preset (Hugging Face)")
    wait_for(page, arch="hf:llama-3.1-8b")
    walk.choose("Device", "GeForce RTX 4090 · 24 GB", typed="4090")
    wait_for(page, gpu="rtx-4090", train="adapter", dtype="bfloat16")
    headline(page, "Training LoRA (r 16) on Llama 3.1 8B")
    walk.choose("Weights", "NF4, quantized twice", typed="NF4")
    wait_for(page, weights="nf4-dq")
    headline(page, "Training LoRA (r 16) on Llama 3.1 8B")
    walk.click(page.get_by_text("Activation checkpointing", exact=True).first)
    wait_for(page, checkpointing="1")
    headline(page, "it fits one GeForce RTX 4090")
    assert walk.actions <= 4


@pytest.mark.exhaustive  # takes longest, in a browser
def test_a_70b_on_h100s_without_typing(page: Page, app_url: str) -> None:
    walk = Walk(page, app_url)
    walk.click(page.get_by_role("button", name="Train Llama 3.1 70B on H100s"))
    headline(page, "Training Llama 3.1 70B")
    walk.click(page.get_by_text("On how many GPUs?", exact=True))
    expect(page.get_by_text("It fits on 16 GPUs with checkpointing")).to_be_visible(timeout=ANSWER_MS)
    walk.click(page.get_by_role("button", name=re.compile("Ask for FSDP2 with checkpointing on 16 GPUs")))
    wait_for(page, ranks="16", checkpointing="1")
    headline(page, "on each of 16 GPUs; a rank fits one H100")
    assert walk.actions <= 3


def test_serving_32_users(page: Page, app_url: str) -> None:
    walk = Walk(page, app_url)
    walk.click(page.get_by_role("button", name="Serve Qwen3 8B on an H100"))
    headline(page, "requests of 8,192 tokens at once on one H100")
    expect(page.get_by_text("Yes: 32 requests of 8,192 tokens at once.")).to_be_visible()
    expect(page.get_by_text("The last answer, on another question")).to_have_count(0)
    assert walk.actions == 1


def test_an_own_config_is_pasted(page: Page, app_url: str) -> None:
    walk = Walk(page, app_url)
    walk.choose("Model source", "Your config.json")
    walk.write(page.get_by_label("or paste it"), json.dumps(LLAMA), "Control+Enter")
    headline(page, "LlamaForCausalLM")
    expect(page.get_by_text(re.compile(rf"^{LLAMA_PARAMETERS:,}\b"))).to_be_visible()
    assert walk.actions <= 2

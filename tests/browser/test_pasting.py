"""The box for what people have, in a browser: a config, a message, a snapshot that a confined job reads, and one that calls."""

from __future__ import annotations

import os
import pickle

from playwright.sync_api import Page, expect

from tests.browser.conftest import ANSWER_MS
from tests.browser.test_browser import headline
from tests.browser.test_clicks import wait_for
from tests.pasted.test_out_of_memory import OLD
from tests.pasted.test_snapshot import block, event

CONFIG = "base_model: openai-community/gpt2\nadapter: lora\nlora_r: 4\nlora_target_modules: [c_attn]\nsequence_len: 64\n"
CONFIG += "micro_batch_size: 2\noptimizer: adamw_torch\nbf16: true\nsample_packing: true\n"
SNAPSHOT = {
    "device_traces": [[event("alloc", 2**30), event("alloc", 2**29)]],
    "segments": [{"device": 0, "total_size": 2**31, "blocks": [block(2**30), block(2**29)]}],
}


class Call:
    """A pickle of it calls a command."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch called",)


def test_what_people_have_is_read(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?arch=torchvision:resnet18&dtype=float32&batch=1&image=64&gpu=t4")
    headline(page, "Training resnet18")
    page.get_by_text("Paste what you have").click()
    box = page.get_by_label("Question, config, command, code, log or message")
    box.fill(CONFIG)
    box.press("Control+Enter")
    wait_for(page, arch="hf:gpt2", gpu="t4", train="adapter", seq="64", batch="2")
    headline(page, "GPT-2")
    expect(page.get_by_text("Read as a config of Axolotl")).to_be_visible()
    page.reload()
    headline(page, "GPT-2")
    page.get_by_text("Paste what you have").click()
    box.fill(OLD)
    box.press("Control+Enter")
    expect(page.get_by_text("The failed request was for 610.00 MiB")).to_be_visible(timeout=ANSWER_MS)
    files = page.get_by_test_id("stMain").locator("input[type=file]")
    files.set_input_files({"name": "s.pickle", "mimeType": "application/octet-stream", "buffer": pickle.dumps(SNAPSHOT)})
    expect(page.get_by_text("Memory snapshot, device 0, 2 events")).to_be_visible(timeout=ANSWER_MS)
    files.set_input_files({"name": "c.pickle", "mimeType": "application/octet-stream", "buffer": pickle.dumps(Call())})
    expect(page.get_by_text("opcode STACK_GLOBAL at byte")).to_be_visible(timeout=ANSWER_MS)

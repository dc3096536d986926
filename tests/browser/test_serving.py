"""A server in a browser: which GPU holds what is wanted, and how many."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.conftest import ANSWER_MS
from tests.browser.test_browser import wait_for_the_whole
from tests.browser.test_clicks import wait_for

LOG = """\
INFO [core.py:69] Initializing a V1 LLM engine (v0.9.2) with config: model='HuggingFaceTB/SmolLM2-135M', max_seq_len=8192,
INFO [gpu_model_runner.py:1801] Model loading took 0.2524 GiB and 3.2 seconds
INFO [gpu_worker.py:232] Available KV cache memory: 10.10 GiB
INFO [kv_cache_utils.py:716] GPU KV cache size: 471,000 tokens
"""
ATTEMPTS = 5
SMALL = "arch=hf:smollm2-135m&mode=serve&gpu=t4&want=500x4k"


def test_which_gpu_and_how_many_are_answered_for_a_server(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?{SMALL}")
    expect(page.get_by_text("What next?")).to_be_visible(timeout=ANSWER_MS)
    page.get_by_role("radio", name="Which GPU?").click()
    expect(page.get_by_text("156 of 156 tried")).to_be_visible(timeout=ANSWER_MS)
    expect(page.get_by_text("The server can hold 500 requests of 4,096 tokens at once on")).to_be_visible()
    page.get_by_role("radio", name="On how many GPUs?").click()
    # SmolLM2 has 9 heads: no tensor parallel. Of 1 to 64 GPUs 1 to 7 splits into pipeline and data parallel
    expect(page.get_by_text("28 of 28 tried")).to_be_visible(timeout=ANSWER_MS)
    expect(page.get_by_text("The server can hold 500 requests of 4,096 tokens at once on")).to_be_visible()


def test_a_servers_log_is_read_as_its_question(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?arch=torchvision:resnet18&dtype=float32&batch=1&image=64&gpu=t4")
    page.get_by_text("Paste what you have").click()
    box = page.get_by_label("Question, config, command, code, log or message")
    box.fill(LOG)
    box.press("Control+Enter")
    expect(page.get_by_text("Read as a startup log of vLLM 0.9.2")).to_be_visible(timeout=ANSWER_MS)
    wait_for(page, arch="hf:smollm2-135m", gpu="t4", mode="serve", engine_version="0.9.2", max_model_len="8192")
    for line in ("weights: 0.25 GiB in the log", "other than weights and cache: ", "KV tokens: 471,000 in the log"):
        expect(page.get_by_text(line)).to_be_visible(timeout=ANSWER_MS)


def test_a_click_selects_the_command_that_starts_the_server(page: Page, app_url: str) -> None:
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    page.goto(f"{app_url}/?{SMALL}")
    command = page.locator(".st-key-server_command").get_by_test_id("stText")
    expect(command).to_contain_text("vllm serve", timeout=ANSWER_MS)
    wait_for_the_whole(page)
    for _ in range(ATTEMPTS):  # a last run of the page may draw the text again
        command.click()
        if selected := page.evaluate("getSelection().toString().trim()"):
            break
        page.wait_for_timeout(500)
    assert selected == command.inner_text().strip()
    assert not [url for url in loaded if "SyntaxHighlighter" in url]

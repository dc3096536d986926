"""A server in a browser: which GPU holds what is wanted, and how many."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.conftest import ANSWER_MS

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

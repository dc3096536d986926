"""Old figures never stand under a new name: they are greyed out at once, and stay so after an error."""

from __future__ import annotations

from urllib.parse import urlsplit

from playwright.sync_api import Page, expect

from tests.browser.conftest import ANSWER_MS
from tests.browser.test_browser import headline

SMALL = "arch=torchvision:resnet18&dtype=float32&batch=1,2&image=64"
# The new answer may stand before a test has looked: the page itself notes what was grey.
NOTE_GREY = """() => {
    window.grey = "";
    new MutationObserver(() => document.querySelectorAll(".st-key-stale").forEach(one => window.grey += one.textContent))
        .observe(document.body, {childList: true, subtree: true, characterData: true});
}"""


def test_the_last_answer_is_greyed_out_until_the_new_one_and_after_an_error(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?{SMALL}")
    headline(page, "Training resnet18 at batch 2")
    grey = page.locator(".st-key-stale")
    expect(grey).to_have_count(0)
    page.evaluate(NOTE_GREY)
    page.get_by_role("textbox", name="Image size").fill("160")
    page.keyboard.press("Enter")
    headline(page, "160 × 160 pixels")
    assert "The last answer, on another question: resnet18" in page.evaluate("window.grey")
    expect(grey).to_have_count(0)
    page.get_by_role("textbox", name="Image size").fill("abc")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert").first).to_be_visible(timeout=ANSWER_MS)
    expect(grey).to_contain_text("160 × 160 pixels")
    assert float(grey.evaluate("one => getComputedStyle(one).opacity")) < 0.5
    expect(page.get_by_role("textbox", name="Image size")).to_have_value("abc")


NOTE_TEXTS = """() => {
    window.texts = "";
    new MutationObserver(() => document.querySelectorAll("[data-testid=stText]").forEach(one => window.texts += one.textContent))
        .observe(document.body, {childList: true, subtree: true, characterData: true});
}"""


def test_a_growing_answer_says_which_cell_its_headline_is_about(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?arch=torchvision:densenet201&dtype=float32&batch=1,2,3&image=96&gpu=a100-80gb")
    page.evaluate(NOTE_TEXTS)
    headline(page, "at batch 3")
    assert "headline so far: float32, batch 1" in page.evaluate("window.texts")


def test_a_bad_model_in_a_link_keeps_the_rest(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?arch=hf:no-such-model&dtype=float32&batch=3&seq=32&gpu=t4")
    headline(page, "at batch 3 of 32 tokens")
    expect(page.get_by_text("no-such-model").first).to_be_visible()
    assert "seq=32" in urlsplit(page.url).query and "gpu=t4" in urlsplit(page.url).query
    expect(page.get_by_role("textbox", name="Sequence length")).to_have_value("32")

"""What axe finds on every page in both themes, and what a phone shows of the question."""

from __future__ import annotations

import os
from urllib.parse import quote

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.browser.conftest import ANSWER_MS
from tests.browser.test_browser import wait_for_the_whole, write

if not os.environ.get("CI"):
    pytest.importorskip("axe_playwright_python", reason="axe is not installed: see tests/requirements.txt")
from axe_playwright_python.sync_playwright import Axe

SMALL = "arch=torchvision:resnet18&dtype=float32,bfloat16&batch=1,2&image=64"
PAGES = {
    f"?{SMALL}": "Training resnet18",
    f"compare?q={quote(SMALL)}&q={quote(f'{SMALL}&checkpointing=1')}": "Compare questions",
    f"measure?{SMALL}": "Measure it on a real device",
    "ledger": "Every measurement",
    "devices": "What PyTorch can use",
    "numbers": "About the numbers",
}
GRAVE = ("serious", "critical")


def findings(page: Page) -> list[str]:
    """The grave findings of axe, each with the elements that it is about."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{found['id']}: {node['html']}" for found in violations if found["impact"] in GRAVE for node in found["nodes"]
    ]


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.exhaustive if path[0] != "?" else ()) for path in PAGES]
)
def test_axe_finds_nothing_grave_in_either_theme(context: BrowserContext, app_url: str, path: str):
    page = (
        context.new_page()
    )  # no clean console where a page is opened first: Streamlit asks for files that are not there
    page.goto(f"{app_url}/{path}")
    expect(page.get_by_test_id("stHeading").filter(has_text=PAGES[path])).to_be_visible(timeout=ANSWER_MS)
    wait_for_the_whole(page)
    if path[0] == "?":  # what is chosen and pointed at has the strongest tint behind it
        page.get_by_test_id("stSidebar").get_by_text("Training", exact=True).hover()
    app = page.get_by_test_id("stApp")
    for scheme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(17, 22, 28)")):  # .streamlit/config.toml
        page.emulate_media(color_scheme=scheme)
        expect(app).to_have_css("background-color", ground)
        page.wait_for_function("document.getAnimations().every(animation => animation.playState != 'running')")
        assert not findings(page), scheme


def test_axe_finds_what_is_there(page: Page):
    page.set_content(
        '<html lang="en"><title>x</title><main><p style="color:#ccc;background:#fff">pale</p></main></html>'
    )
    assert any(line.startswith("color-contrast: <p") for line in findings(page))


def test_a_phone_shows_the_question_without_the_form(page: Page, app_url: str):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{app_url}/?{SMALL}")
    question = "resnet18 · Training · float32, bfloat16 · batch 1, 2 · 64 × 64 pixels · adamw · A100 (80 GB)"
    expect(page.get_by_text(question)).to_be_in_viewport(timeout=ANSWER_MS)


@pytest.mark.exhaustive
def test_a_phone_opens_the_form_from_the_page(page: Page, app_url: str):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{app_url}/?{SMALL}")
    form = page.get_by_role("heading", name="How much device memory does it need?")
    for batch in ("1", "2"):  # again after it was closed by hand
        page.get_by_role("button", name="Edit the question").click(timeout=ANSWER_MS)
        expect(form).to_be_in_viewport()
        write(page, "Batch sizes", batch)
        expect(page.get_by_text(f"· batch {batch} ·")).to_be_visible()
        page.get_by_test_id("stSidebarCollapseButton").locator("button").click()
        expect(form).not_to_be_in_viewport()
    page.set_viewport_size({"width": 1400, "height": 844})
    expect(page.get_by_role("button", name="Edit the question")).to_be_hidden()

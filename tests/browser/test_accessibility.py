"""Check every page, and what opens there, with axe in both themes and two widths, and what a phone shows of the question."""

from __future__ import annotations

import os
from importlib.util import find_spec
from urllib.parse import quote

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from sizer.ui.report_view import STALE
from tests.browser.conftest import ANSWER_MS
from tests.browser.test_browser import wait_for_the_whole, write
from tests.browser.test_clicks import TIGHT

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
    "?arch=hf:qwen3-8b&mode=serve&gpu=h100-80gb&want=32x8192": "requests of 8,192 tokens at once",
    "?arch=hf:gpt2&mode=generate&dtype=bfloat16&batch=1&seq=64&new=32": "Generating 32 tokens",
}
if find_spec("diffusers"):
    PAGES["?arch=diffusers:flux.1-dev&gpu=rtx-4060-ti-16gb&weights=transformer:nf4,text_encoder_2:nf4&offload=model"] = "flux.1-dev"
GROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 22, 28)"}  # .streamlit/config.toml
LOOKS = ((1440, "light"), (390, "dark"))  # a width changes no colour
OF_STREAMLIT = "stFileUploaderDropzone"  # a presentation with a name: ours to fill, not to build
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.65 GiB of which 1.20 "
    "GiB is free. Including non-PyTorch memory, this process has 10.45 GiB memory in use. Of the allocated memory 9.10 GiB is "
    "allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated."
)


def findings(page: Page) -> list[str]:
    """The findings of axe, each with the elements that it is about. An answer that is greyed out is inactive (WCAG 2.2, 1.4.3)."""
    violations = Axe().run(page, context={"exclude": [f".st-key-{STALE}"]}).response["violations"]
    found = [f"{found['id']}: {node['html']}" for found in violations for node in found["nodes"]]
    return [line for line in found if OF_STREAMLIT not in line]


def check(page: Page) -> None:
    """Let axe look at a page in both themes and widths, once nothing of it moves any more."""
    for width, scheme in LOOKS:
        page.set_viewport_size({"width": width, "height": 1000})
        page.emulate_media(color_scheme=scheme)
        expect(page.get_by_test_id("stApp")).to_have_css("background-color", GROUNDS[scheme])
        wait_for_the_whole(page)
        page.wait_for_function("document.getAnimations().every(animation => animation.playState != 'running')")
        assert not findings(page), (width, scheme)
    page.set_viewport_size({"width": LOOKS[0][0], "height": 1000})


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.exhaustive if path[0] != "?" else ()) for path in PAGES]
)
def test_axe_finds_nothing_on_a_page(context: BrowserContext, app_url: str, path: str):
    page = (
        context.new_page()
    )  # no clean console where a page is opened first: Streamlit asks for files that are not there
    page.goto(f"{app_url}/{path}")
    expect(page.get_by_test_id("stHeading").filter(has_text=PAGES[path])).to_be_visible(timeout=ANSWER_MS)
    wait_for_the_whole(page)
    if path[0] == "?":  # what is chosen and pointed at has the strongest tint behind it
        page.get_by_test_id("stSidebar").get_by_text("Training", exact=True).hover()
    check(page)


@pytest.mark.exhaustive
def test_axe_finds_nothing_in_what_opens(page: Page, app_url: str):
    page.goto(f"{app_url}/?{TIGHT}")
    expect(page.get_by_text("14 of 14 tried")).to_be_visible(timeout=ANSWER_MS)
    for name in ("More options", "Advanced options"):
        page.get_by_test_id("stSidebar").get_by_text(name, exact=True).click()
    page.get_by_role("button", name="Code").first.click()
    expect(page.get_by_text("PYTORCH_ALLOC_CONF").first).to_be_visible()
    check(page)
    page.keyboard.press("Escape")
    page.get_by_role("radio", name="How far it goes").click()
    expect(page.get_by_text("2 of 2 tried")).to_be_visible(timeout=ANSWER_MS)
    check(page)
    page.get_by_text("Paste what you have").click()
    box = page.get_by_test_id("stMain").locator("textarea")
    box.fill(OUT_OF_MEMORY)
    box.press("Control+Enter")
    expect(page.get_by_text("The failed request was for 2.00 GiB")).to_be_visible(timeout=ANSWER_MS)
    check(page)
    write(page, "Batch sizes", "0")
    expect(page.get_by_text("The last answer, on another question")).to_be_visible(timeout=ANSWER_MS)
    check(page)


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

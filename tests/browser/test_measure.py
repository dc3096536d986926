"""A model measured on this machine's CPU from the page, beside its estimate, and what the ledger makes of it."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from sizer.base.config_json import encode_config
from tests.browser.conftest import ANSWER_MS, fit
from tests.browser.test_browser import LLAMA, LLAMA_PARAMETERS, headline, wait_for_the_whole
from tests.ui.comparisons import CUDA, comparison_of, measured_on

RESNET = "arch=torchvision:resnet18&dtype=float32,bfloat16&batch=1,2&image=64"
TINY = f"arch={quote('config:' + encode_config(json.dumps(LLAMA)))}&seq=8&dtype=float32&batch=2"
RESNET_WEIGHTS = 4 * 11_689_512  # torchvision's count for ResNet-18, four bytes each
ROW_HEIGHT = 36  # pixels of a table's row


def go_to_measure(page: Page, app_url: str, query: str) -> Locator:
    """The button that measures, on the page that the estimate of a query leads to."""
    page.goto(f"{app_url}/?{query}")
    headline(page, "needs")
    page.get_by_role("link", name="Measure it on a real device").click()
    button = page.get_by_role("button", name="Measure", exact=True)
    expect(button).to_be_enabled(timeout=ANSWER_MS)
    return button


def result(page: Page) -> str:
    """The headline of a comparison, once it is there."""
    found = page.get_by_test_id("stHeading").filter(has_text="Measured on")
    expect(found).to_be_visible(timeout=ANSWER_MS)
    wait_for_the_whole(page)
    return found.inner_text()


def cells(page: Page, row: str) -> list[str]:
    """The cells of a row of the tables that stand side by side, once it is there."""
    found = page.get_by_test_id("stTable").locator("tr").filter(has=page.get_by_role("rowheader", name=row, exact=True))
    expect(found.first).to_be_visible(timeout=ANSWER_MS)
    return [cell.strip() for cell in found.first.locator("td").all_inner_texts()]


def find_in_ledger(page: Page, name: str) -> None:
    """Go to the ledger and look for an architecture there, of which it has one comparison."""
    page.get_by_role("link", name="Measure", exact=True).click()
    page.get_by_role("radio", name="What was measured").click()
    field = page.get_by_label("Architecture", exact=True)
    field.fill(name)
    field.press("Enter")
    expect(page.get_by_text("1 comparison", exact=True)).to_be_visible()


def measured_elsewhere(name: str) -> dict:
    """A file with the comparison of an architecture on a CUDA device; each name is another measurement."""
    comparison = comparison_of(measured_on(CUDA, more_bytes=len(name)), architecture=name)
    return {
        "name": "measured.json",
        "mimeType": "application/json",
        "buffer": json.dumps(comparison.to_dict()).encode(),
    }


# The figures of real models are held by tests/device/trial/test_measure_models.py.
@pytest.mark.exhaustive
def test_measured_beside_its_estimate_and_kept(page: Page, app_url: str):
    button = go_to_measure(page, app_url, RESNET)
    expect(
        page.get_by_text("Training resnet18 at batch 2 of 64 × 64 pixels in float32, two whole steps on cpu")
    ).to_be_visible()
    button.click()
    sentence = result(page)
    assert re.fullmatch(r"Measured on cpu: peak ([\d.]+ MiB), the estimate said [\d.]+ MiB: .+", sentence)
    weights = f"{RESNET_WEIGHTS / 2**20:.2f} MiB"
    assert cells(page, "weights") == [weights, weights, "0", "✓\N{NO-BREAK SPACE}exact"]
    assert cells(page, "gradients")[:2] == [weights, weights]
    assert cells(page, "backward: allocated at its end")[3] == "✓\N{NO-BREAK SPACE}exact"
    expect(page.get_by_test_id("stTable").filter(has_text="✕")).to_have_count(0)
    expect(page.get_by_test_id("stVegaLiteChart").locator("svg, canvas")).to_have_count(1)
    expect(page.get_by_role("rowheader", name="One step, synchronized", exact=True)).to_be_visible()
    find_in_ledger(page, "resnet18")
    page.get_by_test_id("stDataFrame").first.click(position={"x": 18, "y": 1.5 * ROW_HEIGHT})
    assert result(page) == sentence
    assert re.search(r"/measure\?comparison=\d+$", page.url)
    page.get_by_role("button", name="Back to the ledger").click()
    expect(page.get_by_text("1 comparison", exact=True)).to_be_visible()


@pytest.mark.exhaustive
def test_measured_config_of_ones_own(page: Page, app_url: str):
    go_to_measure(page, app_url, TINY).click()
    assert result(page).startswith("Measured on cpu: peak ")
    weights = f"{4 * LLAMA_PARAMETERS / 2**10:.2f} KiB"
    assert cells(page, "weights") == [weights, weights, "0", "✓\N{NO-BREAK SPACE}exact"]
    page.get_by_role("tab", name="Downloads").click()
    with page.expect_download() as arrival:
        page.get_by_role("button", name="Comparison (JSON)").click()
    comparison = json.loads(arrival.value.path().read_text("utf-8"))
    assert comparison["measurement"]["device"]["device"] == "cpu"
    assert comparison["measurement"]["tensors"]["weights_bytes"] == 4 * LLAMA_PARAMETERS


@pytest.mark.exhaustive
def test_stop_and_measure_again(page: Page, app_url: str):
    button = go_to_measure(page, app_url, TINY.replace("batch=2", "batch=3"))
    button.click()
    page.get_by_role("button", name="Stop", exact=True).click(timeout=ANSWER_MS)
    expect(page.get_by_role("button", name="Stop", exact=True)).to_have_count(0)
    expect(button).to_be_enabled()
    button.click()
    result(page)


@pytest.mark.exhaustive
def test_result_of_another_machine_here_and_on_a_phone(page: Page, app_url: str):
    go_to_measure(page, app_url, RESNET)
    expect(page.get_by_text("PyTorch finds no accelerator on this machine")).to_be_visible()
    command = page.get_by_test_id("stCode").filter(has_text="sizer measure").inner_text()
    assert re.match(r"python -m sizer measure '.*batch=2.*' --device cuda:0 --json > measured.json", command.strip())
    page.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(measured_elsewhere("elsewhere"))
    assert result(page).startswith("Measured on cuda:0: peak ")
    fit(page, 390)
    page.set_viewport_size({"width": 1400, "height": 1000})
    find_in_ledger(page, "elsewhere")
    fit(page, 390)


# Streamlit asks for two files that are not there when a page is opened first: no clean console in these two.


def test_a_link_to_the_page_has_its_frame(context: BrowserContext, app_url: str):
    page = context.new_page()
    page.goto(f"{app_url}/measure?{RESNET}")
    expect(page.get_by_role("link", name="Size a model")).to_be_visible()
    expect(page.get_by_text("Training resnet18 at batch 1 of 64 × 64 pixels in float32")).to_be_visible(
        timeout=ANSWER_MS
    )


def test_the_address_that_the_ledger_had_leads_there(context: BrowserContext, app_url: str):
    page = context.new_page()
    page.goto(f"{app_url}/ledger?comparison=999")
    expect(page.get_by_text("The ledger has no such comparison")).to_be_visible()
    assert page.url == f"{app_url}/measure?comparison=999"
    page.get_by_role("button", name="Back to the ledger").click()
    expect(page.get_by_text("Measured by others on GPUs, and published")).to_be_visible()

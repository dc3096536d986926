"""The devices page in a browser: this machine's list, a demonstration that really runs, a page that fits a phone."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import ANSWER_MS, fit

SMALL = "arch=torchvision:alexnet&dtype=float32&batch=1&image=64"


@pytest.fixture
def devices(page: Page, app_url: str) -> Page:
    """The page, opened from the app's navigation, once it lists this machine's devices."""
    page.goto(f"{app_url}/?{SMALL}")
    page.get_by_role("link", name="Devices", exact=True).click(timeout=ANSWER_MS)
    expect(page.get_by_role("heading", name="What PyTorch can use on this machine")).to_be_visible(timeout=ANSWER_MS)
    expect(page.get_by_test_id("stCode").first).to_contain_text("device = ", timeout=ANSWER_MS)
    expect(page.get_by_role("heading", name="What reserved memory is")).to_be_visible()
    return page


@pytest.mark.exhaustive
def test_shows_for_real_what_memory_does_here_on_every_screen(devices: Page):
    tables = devices.get_by_test_id("stDataFrame").count()
    devices.get_by_role("button", name="Show it on this device").click()
    expect(devices.get_by_text("After each line of code")).to_be_visible(timeout=ANSWER_MS)
    expect(devices.get_by_test_id("stVegaLiteChart").locator("canvas, svg").first).to_be_visible()
    expect(devices.get_by_test_id("stDataFrame")).to_have_count(tables + 1)
    for width in (390, 1400):
        fit(devices, width)

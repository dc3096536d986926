"""One verdict: the headline, the badge, the table and the bar say the same of each cell."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import ANSWER_MS, fit
from tests.browser.test_browser import headline

# On 4 GiB each batch size of ResNet-18 has another verdict.
QUERY = "arch=torchvision:resnet18&dtype=float32&batch=64,120,170,256&gpu=custom:4GiB@8.9"
VERDICTS = {64: "✓ fits", 120: "! tight", 170: "? may not fit", 256: "✕ does not fit"}
SENTENCES = {64: "it fits", 120: "it only just fits", 170: "it may not fit", 256: "it does not fit"}
ADVICE = {
    64: r"It fits: \d+.* to \d+.* stay free",
    120: r"It is tight: it fits only if the allocator returns up to \d+\.\d\d MiB of its cache",
    170: r"It may not fit: the process would take \d+.* to \d+",
    256: r"It does not fit: the process needs \d+.* to \d+",
}


@pytest.mark.parametrize("batch", VERDICTS)
def test_all_parts_of_the_page_agree(page: Page, app_url: str, batch: int) -> None:
    page.set_viewport_size({"width": 1440, "height": 1000})
    page.goto(f"{app_url}/?{QUERY}&focus=float32:{batch}")
    headline(page, f"Training resnet18 at batch {batch}")
    headline(page, SENTENCES[batch])
    expect(
        page.get_by_test_id("stMain").get_by_text(re.compile(rf"^{re.escape(VERDICTS[batch])} · \d+.% of"))
    ).to_be_visible()
    expect(page.get_by_text(re.compile(ADVICE[batch]))).to_be_visible()
    cells = page.get_by_test_id("stDataFrame").first.locator("tr").nth(1)
    for column, verdict in enumerate(VERDICTS.values(), start=2):
        expect(cells.locator(f"[aria-colindex='{column}']")).to_contain_text(verdict[0], timeout=ANSWER_MS)
    for width in (1366, 390):
        fit(page, width)

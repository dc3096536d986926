"""Two questions beside each other: from a model's page, by one thing changed, in a link that travels."""

from __future__ import annotations

import csv
import io
import re
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import BrowserContext, Page, expect

from tests.browser.conftest import ANSWER_MS, fit
from tests.browser.test_browser import cells_of, headline, wait_for_the_whole, write

FOCUSED = "arch=torchvision:resnet18&dtype=float32&batch=1,2&image=64&focus=float32:2"
CHECKPOINTED = "arch=torchvision:resnet18&dtype=float32&batch=1,2&image=64&checkpointing=1&focus=float32:2"


def figures(page: Page) -> list[list[str]]:
    """The cells of the table of figures, once all of them are there."""
    grid = page.get_by_test_id("stDataFrame").nth(1)
    expect(grid.locator("tr").filter(has_text="verdict").filter(has_text="fits").first).to_be_attached(
        timeout=ANSWER_MS
    )
    wait_for_the_whole(page)
    return cells_of(grid)


def test_the_menu_of_variants_opens_and_one_of_them_is_compared(page: Page, app_url: str):
    page.goto(f"{app_url}/?{FOCUSED}")
    headline(page, "at batch 2 of 64 × 64 pixels in float32")
    wait_for_the_whole(page)
    for _ in range(2):
        page.get_by_role("button", name="+ variant").click()
        expect(page.get_by_role("button", name="+ checkpointing")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="+ checkpointing")).to_have_count(0)
    page.get_by_role("button", name="+ variant").click()
    page.get_by_role("button", name="+ checkpointing").click()
    expect(page.get_by_label("Question 1", exact=True)).to_have_value(FOCUSED, timeout=ANSWER_MS)
    expect(page.get_by_label("Question 2", exact=True)).to_have_value(re.compile("checkpointing=1"))


def test_one_thing_changed_beside_it(page: Page, context: BrowserContext, app_url: str):
    page.goto(f"{app_url}/?{FOCUSED}")
    sentence = headline(page, "at batch 2 of 64 × 64 pixels in float32")
    page.get_by_role("button", name="Compare with another question").click()
    expect(page.get_by_label("Question 1", exact=True)).to_have_value(FOCUSED)
    write(page, "New value", "1")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.get_by_label("Question 2", exact=True)).to_have_value(CHECKPOINTED)
    shown = figures(page)
    rows = {row[0]: row[1:] for row in shown}
    gibibytes = re.search(r"\((.+)\)", rows["peak allocated"][0])[1]  # behind the same in powers of ten
    assert f"({gibibytes} allocated)" in sentence
    assert rows["parameters"] == ["11,689,512", "11,689,512", "0"]  # torchvision's count for ResNet-18
    assert re.fullmatch(r"−\d+\.\d\d [KM]iB, −\d+\N{NO-BREAK SPACE}%", rows["activations after forward"][2])
    assert parse_qs(urlsplit(page.url).query)["q"] == [FOCUSED, CHECKPOINTED]
    expect(page.get_by_test_id("stVegaLiteChart").locator("svg, canvas")).to_have_count(2)
    with page.expect_download() as arrival:
        page.get_by_role("button", name="These figures (CSV)").click()
    assert arrival.value.suggested_filename == "sizer-compare-resnet18-by-checkpointing.csv"
    told = list(csv.DictReader(io.StringIO(arrival.value.path().read_text("utf-8-sig"))))
    assert [row["query"] for row in told] == [FOCUSED, CHECKPOINTED]
    page.get_by_text("Link and command", exact=True).click()
    link = page.get_by_test_id("stCode").filter(has_text="http").inner_text().strip()
    page.get_by_role("link", name="Size it").last.click()
    headline(page, "at batch 2 of 64 × 64 pixels in float32")
    page.get_by_role("link", name="Compare", exact=True).click()
    expect(page.get_by_label("Question 2", exact=True)).to_have_value(CHECKPOINTED)
    fit(page, 390)
    with context.browser.new_context() as elsewhere:
        other = elsewhere.new_page()
        other.goto(link)
        assert figures(other) == shown

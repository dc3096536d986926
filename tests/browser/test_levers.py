"""Levers in a browser: no row moves while the answer grows, and what does not fit names the smallest set of changes."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.conftest import ANSWER_MS
from tests.browser.test_browser import headline

TIGHT = "arch=torchvision:resnet18&image=224&dtype=float32&batch=256&gpu=custom:4GiB@8.9"


def test_rows_do_not_move_while_the_answer_grows(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?{TIGHT}")
    headline(page, "does not fit")
    last = page.get_by_text("Inference only")  # the last row, there from the beginning
    expect(last).to_be_visible(timeout=ANSWER_MS)
    place = "node => node.getBoundingClientRect().top + document.querySelector('[data-testid=stMain]').scrollTop"
    places = set()
    while not page.get_by_text("To make it fit").count():
        if last.count():
            places.add(round(last.evaluate(place)))
        page.wait_for_timeout(200)
    assert max(places) - min(places) < 60, "texts of rows may wrap into a second line"

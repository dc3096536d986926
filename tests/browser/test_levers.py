"""Levers in a browser: no row moves while the answer grows, and what does not fit names the smallest set of changes."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.conftest import ANSWER_MS
from tests.browser.test_browser import headline

TIGHT = "arch=torchvision:resnet18&image=224&dtype=float32&batch=256&gpu=custom:4GiB@8.9"


# Written down once it has stood for a quarter of a second: how far the last row is below the question that it answers (what is
# above that is drawn anew when the browser has loaded the code of charts), and how many rows are still to come.
WATCH = """() => {
    window.seen = [];
    let [stands, since] = ["", 0];
    const look = now => {
        const texts = [...document.querySelectorAll("[data-testid=stMain] p")];
        const top = start => texts.find(text => text.textContent.startsWith(start))?.getBoundingClientRect().top;
        if (top("Inference only") && top("What next?")) {
            const place = Math.round(top("Inference only") - top("What next?"));
            const pending = texts.filter(text => text.textContent.endsWith(" …")).length;
            if (stands !== `${place} ${pending}`) [stands, since] = [`${place} ${pending}`, now];
            else if (now - since > 250) window.seen.push([place, pending]);
        }
        requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
}"""


def test_rows_do_not_move_while_the_answer_grows(page: Page, app_url: str) -> None:
    page.add_init_script(f"({WATCH})()")
    page.goto(f"{app_url}/?{TIGHT}")
    headline(page, "does not fit")
    expect(page.get_by_text("To make it fit")).to_be_visible(timeout=ANSWER_MS)
    page.wait_for_timeout(1000)
    seen = page.evaluate("window.seen")
    assert max(pending for _, pending in seen) > 0 == seen[-1][1], "rows were seen before and after their answers"
    places = {place for place, _ in seen}
    assert max(places) - min(places) < 60, f"texts of rows may wrap into a second line: {places}"

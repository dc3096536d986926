"""Clicks that change the question: each one changes the address, and the next click starts from there."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import ANSWER_MS
from tests.browser.test_browser import headline

SMALL = "arch=torchvision:resnet18&dtype=float32,bfloat16&batch=1,2&image=64"
TIGHT = "arch=torchvision:resnet50&dtype=float32&batch=128&gpu=rtx-3060-12gb"

# Notes the address as it is when the first figures of an inference are there.
NOTE_ADDRESS = """() => new MutationObserver(() => {
    const heading = document.querySelector("[data-testid=stMain] [data-testid=stHeading]");
    if (heading?.textContent.startsWith("Inference")) window.asked ??= location.search;
}).observe(document.body, {childList: true, subtree: true, characterData: true})"""


def asked(page: Page) -> dict[str, str]:
    """Return the keys and values of the address."""
    return {key: values[0] for key, values in parse_qs(urlsplit(page.url).query).items()}


def wait_for(page: Page, **values: str) -> None:
    """Wait until the address has these values."""
    condition = "values => { const given = new URLSearchParams(location.search);"
    condition += " return Object.entries(values).every(([key, value]) => given.get(key) === value) }"
    page.wait_for_function(condition, arg=values, timeout=ANSWER_MS)


def test_an_example_stays_when_something_else_is_clicked(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?{SMALL}")
    headline(page, "Training resnet18")
    page.get_by_role("button", name="Train ResNet-50 on an RTX 4090").click()
    wait_for(page, arch="torchvision:resnet50", gpu="rtx-4090")
    headline(page, "Training resnet50")
    page.get_by_role("radio", name="Reserved").click()
    page.evaluate(NOTE_ADDRESS)
    page.get_by_text("Inference", exact=True).first.click()
    wait_for(page, arch="torchvision:resnet50", gpu="rtx-4090", mode="inference")
    page.wait_for_function("window.asked !== undefined", timeout=ANSWER_MS)
    assert "mode=inference" in page.evaluate("window.asked"), "the figures came before the address"
    page.reload()
    headline(page, "resnet50")
    assert asked(page)["gpu"] == "rtx-4090"


def test_apply_works_after_the_answer_has_ended(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?{TIGHT}")
    headline(page, "Training resnet50")
    apply = page.get_by_role("button", name="Apply", exact=True)
    expect(page.get_by_text("To make it fit")).to_be_visible(timeout=ANSWER_MS)
    page.wait_for_timeout(3000)  # the answer has ended, and its clock with it
    before, query = asked(page), urlsplit(page.url).query
    apply.first.click()
    page.wait_for_function("before => location.search.slice(1) !== before", arg=query, timeout=ANSWER_MS)
    assert asked(page) != before
    after = asked(page)
    page.get_by_role("radio", name="Reserved").click()
    page.wait_for_timeout(2000)
    assert asked(page) == after


# The page receives each message of its server `window.late` milliseconds late.
LATE = """(() => { window.late = 0;
    window.WebSocket = class extends window.WebSocket {
        addEventListener(name, listener, options) {
            const call = event => listener.call(this, event);
            const wait = event => window.late ? setTimeout(call, window.late, event) : call(event);
            super.addEventListener(name, name === "message" ? wait : call, options);
        }
        set onmessage(listener) { this.addEventListener("message", listener); }
    } })()"""
# Clicks the first button that has a text, and something else before the page shows the button's effect.
TWO_CLICKS = """([text, other, late, pause]) => {
    const button = [...document.querySelectorAll("button")].find(one => one.textContent.endsWith(text));
    window.late = late;
    button.click();
    setTimeout(() => document.querySelector(other).click(), pause);
    setTimeout(() => { window.late = 0 }, pause + 50);
}"""
RESERVED = "[class*=st-key-focus_measure] [role=radio]:last-of-type"


@pytest.mark.parametrize(("late", "pause"), [(1500, 700), (3000, 2000), (0, 0), (0, 50), (0, 100)])
def test_a_click_stays_when_the_next_comes_before_its_effect(page: Page, app_url: str, late: int, pause: int) -> None:
    page.add_init_script(LATE)
    page.goto(f"{app_url}/?{TIGHT}")
    expect(page.get_by_role("button", name="Apply", exact=True).first).to_be_visible(timeout=ANSWER_MS)
    page.wait_for_timeout(2000)
    page.evaluate(TWO_CLICKS, ["Apply", RESERVED, late, pause])
    wait_for(page, expandable="1")
    page.wait_for_timeout(late + 3000)
    assert asked(page).get("expandable") == "1"
    expect(page.locator(".st-key-expandable input")).to_be_checked()


def test_a_question_stays_removed_when_the_next_click_comes_before_that_shows(page: Page, app_url: str) -> None:
    page.add_init_script(LATE)
    page.goto(f"{app_url}/?{SMALL}")
    headline(page, "Training resnet18")
    page.get_by_role("link", name="Compare").first.click()
    page.get_by_role("button", name="ResNet-50 with and without checkpointing").click()
    expect(page.get_by_text("peak allocated").first).to_be_attached(timeout=ANSWER_MS)
    page.evaluate(TWO_CLICKS, ["Remove", ".st-key-copy_link button", 1500, 700])
    page.wait_for_timeout(4000)
    assert page.url.count("q=") == 1
    expect(page.get_by_label("Question 1")).to_have_value(re.compile("checkpointing=1"))


def test_the_first_click_on_a_cell_is_in_the_address(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?{SMALL}")
    headline(page, "Training resnet18 at batch 2")
    grid = page.get_by_test_id("stDataFrame").first
    grid.scroll_into_view_if_needed()
    box = grid.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.35, box["y"] + box["height"] * 0.5)
    headline(page, "Training resnet18 at batch 1")
    wait_for(page, focus="float32:1")


def test_the_example_of_the_comparison_stays(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?{SMALL}")
    headline(page, "Training resnet18")
    page.get_by_role("link", name="Compare").first.click()
    page.get_by_role("button", name="ResNet-50 with and without checkpointing").click()
    page.wait_for_function("() => location.search.split('q=').length === 3", timeout=ANSWER_MS)
    expect(page.get_by_text("peak allocated").first).to_be_attached(timeout=ANSWER_MS)
    page.wait_for_timeout(2000)
    assert page.url.count("q=") == 2


def copied(page: Page) -> dict[str, list[str]]:
    """Press the button that copies, wait for its confirmation, and return the keys and values of what the clipboard holds."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the link").click()
    expect(page.get_by_role("status").filter(has_text="Copied.")).to_be_visible()
    text = page.evaluate("navigator.clipboard.readText()")
    assert text.split("?")[0].rstrip("/") == page.url.split("?")[0].rstrip("/")
    return parse_qs(urlsplit(text).query)


def test_one_click_copies_the_complete_link(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?{SMALL}")
    headline(page, "Training resnet18 at batch 2")
    given = copied(page)
    assert (given["arch"], given["batch"], given["optimizer"]) == (["torchvision:resnet18"], ["1,2"], ["adamw"])
    page.get_by_text("Inference", exact=True).first.click()
    headline(page, "Inference with resnet18")
    assert copied(page)["mode"] == ["inference"]


def test_one_click_copies_the_command_of_a_server(page: Page, app_url: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{app_url}/?arch=hf:qwen3-8b&mode=serve&gpu=h100-80gb")
    page.get_by_role("button", name="Copy the command").click(timeout=ANSWER_MS)
    expect(page.get_by_role("status").filter(has_text="Copied.")).to_be_visible()
    command = page.evaluate("navigator.clipboard.readText()")
    assert command.startswith("vllm serve Qwen/Qwen3-8B ")
    expect(page.get_by_text(command, exact=True)).to_be_visible()

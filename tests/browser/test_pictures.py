"""The documents' pictures show the page as it is. Each holds the words and figures of its time, and the page still has them.

`python -m tests.readme --pictures` takes them anew.
"""

from __future__ import annotations

import json
import os
import re
import time
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Page

from tests.browser.conftest import PATIENCE_MS
from tests.browser.test_browser import headline, wait_for_the_whole
from tests.browser.test_measure import go_to_measure, result
from tests.readme import PICTURES, TAKE, text_of_documents

FOLDER = Path(__file__).parent
SHOWS = "shows"  # the key of the words in the file
SMALL = "arch=torchvision:resnet18&dtype=float32&batch=2&image=64"
METRICS = "stMetric"


def shown(page: Page) -> list[str]:
    """The page's sentences and figures: headings, metrics, tables row by row, labels of the form."""
    wait_for_the_whole(page)
    kinds = ("stHeading", METRICS, "stWidgetLabel")
    words = [text for kind in kinds for text in page.get_by_test_id(kind).all_inner_texts()]
    rows = page.get_by_test_id(re.compile("stTable|stDataFrame")).locator("tr").all()
    words += [" ".join(row.locator("th, td").all_text_contents()) for row in rows]
    return [" ".join(text.split()) for text in words]


def settled(page: Page) -> list[str]:
    """Return the words after five seconds without a change. A grid draws its cells some time after the run ends."""
    words, since = shown(page), time.monotonic()
    deadline = since + PATIENCE_MS / 1000
    while time.monotonic() < min(since + 5, deadline):
        page.wait_for_timeout(500)
        if (newer := shown(page)) != words:
            words, since = newer, time.monotonic()
    return words


def check(name: str, page: Page, *, height: int, same: re.Pattern | None = None) -> None:
    """Takes the picture where that is asked for; else holds what it shows against the page, of the measured lines `same` alone."""
    file = FOLDER / name
    words = settled(page)
    if os.environ.get(TAKE):
        page.set_viewport_size({"width": 1400, "height": height})
        page.wait_for_timeout(1000)  # charts follow the window a moment later
        told = PngInfo()
        told.add_text(SHOWS, json.dumps(words))
        # colours that little is drawn in are kept, too: those of a legend
        few = Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
        few.save(file, pnginfo=told, optimize=True)
    with Image.open(file) as picture:
        taken = json.loads(picture.info[SHOWS])
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while (
        held(words, same) != held(taken, same) and time.monotonic() < deadline
    ):  # grids draw their cells a moment later
        page.wait_for_timeout(500)
        words = shown(page)
    assert held(words, same) == held(taken, same)
    assert len(held(taken, same)) >= 9


def held(words: list[str], same: re.Pattern | None) -> list[str]:
    """All of the words, or what `same` finds in them."""
    return words if same is None else [found[0] for text in words if (found := same.match(text))]


@pytest.mark.exhaustive
def test_the_page(page: Page, app_url: str) -> None:
    page.goto(app_url)
    headline(page, "Training resnet50 at batch 128")
    check("size-a-model.png", page, height=1110)


@pytest.mark.exhaustive
def test_the_measurement(page: Page, app_url: str) -> None:
    go_to_measure(page, app_url, SMALL).click()
    result(page)
    # What the tensors take, by the estimate; peaks go by the processor's scratch memory, and what is beside them was measured here.
    kinds = "weights|buffers|inputs|gradients|optimizer state|activations after forward|\\w+: allocated at its end"
    check("measure.png", page, height=1800, same=re.compile(rf"({kinds}) [\d.]+ [KMG]iB"))


@pytest.mark.parametrize("name", PICTURES)
def test_a_document_shows_it(name: str) -> None:
    assert f"tests/browser/{name})" in text_of_documents()
    with Image.open(FOLDER / name) as picture:
        assert json.loads(picture.info[SHOWS])

"""One interval for the largest batch: an answer that is asked for later narrows what the headline says."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Page, expect

from sizer.base.config_json import encode_config
from tests.browser.conftest import ANSWER_MS
from tests.browser.test_browser import headline

# Each batch size is traced by itself, since PyTorch's loss in chunks has more of them with more tokens: the report knows those that
# were asked for.
_LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 1024}
CHUNKED = f"arch=config:{encode_config(json.dumps(_LLAMA))}&seq=512&loss=torch&dtype=float32&batch=2,4&gpu=custom:3GiB@8.9"


@pytest.mark.exhaustive
def test_limits_narrow_the_headline_and_the_table(page: Page, app_url: str) -> None:
    page.goto(f"{app_url}/?{CHUNKED}")
    headline(page, "the largest batch is at least 4")
    page.get_by_role("radio", name="How far it goes").click()
    title = page.get_by_test_id("stMain").get_by_test_id("stHeading").first
    expect(title).to_contain_text(re.compile(r"the largest batch is \d+( to \d+)?\.$"), timeout=ANSWER_MS)
    interval = re.search(r"the largest batch is (.*)\.$", title.inner_text())[1]
    assert int(interval.split()[0]) > 4
    expect(page.get_by_test_id("stDataFrame").first.locator("tr").nth(1)).to_contain_text(interval, timeout=ANSWER_MS)
    expect(page.get_by_test_id("stText").filter(has_text=interval)).to_be_visible()
    page.get_by_role("radio", name="Reserved").click()
    headline(page, f"the largest batch is {interval}")

"""The endpoint of the real app: the same JSON as the command's."""

from __future__ import annotations

import json
from urllib.error import HTTPError
from urllib.request import urlopen

from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from tests.browser.conftest import ANSWER_MS

QUERY = "arch=torchvision:resnet18&dtype=float32&batch=2&image=64"


def get(address: str) -> tuple[int, dict]:
    try:
        with urlopen(address, timeout=ANSWER_MS / 1000) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        return error.code, json.load(error)


def test_the_app_answers_over_http(app_url: str) -> None:
    status, found = get(f"{app_url}/api/estimate?{QUERY}")
    assert status == 200
    expected = json.loads(estimate(parse_query(QUERY)).to_json())
    assert found["estimates"] == expected["estimates"]
    assert found["model"] == expected["model"]
    status, found = get(f"{app_url}/api/estimate?{QUERY}&gpu=rtx-9999")
    assert (status, found["key"]) == (400, "gpu")

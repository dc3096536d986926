"""What a pasted link shows: title and description in the HTML that is served, of the question that the link asks."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from sizer.base import config_json
from sizer.catalogue import sources
from sizer.ui.preview import ABOUT, INDEX, PAGES, TITLE, describe, page_html, routes

SMALL = "arch=torchvision:resnet18&dtype=float32&batch=1&image=64"
HOSTILE = 'a"><script>alert(1)</script>'


@pytest.mark.parametrize(
    ("page", "query", "title", "description"),
    [
        ("", "", "Sizer: how much device memory does it need?", ABOUT),
        (
            "",
            f"{SMALL}&gpu=t4",
            "Sizer: resnet18 on Tesla T4 (16 GB)",
            "resnet18 · Training · float32 · batch 1 · 64 × 64 pixels · adamw · Tesla T4 (16 GB)",
        ),
        ("", "arch=nothing:x", "Sizer: resnet50 on A100 (80 GB)", None),
        (
            "measure",
            SMALL,
            "Sizer: resnet18 measured",
            "resnet18 · Training · float32 · batch 1 · 64 × 64 pixels · adamw",
        ),
        (
            "compare",
            f"q={quote(SMALL)}&q=resnet50&q={quote('arch=hf:nothing')}",
            "Sizer: resnet18 and resnet50 compared",
            None,
        ),
        ("compare", "q=", "Sizer: questions compared", ABOUT),
        ("ledger", "comparison=3", "Sizer: Every measurement beside its estimate", ABOUT),
    ],
)
def test_a_link_is_described_by_its_question(page, query, title, description):
    found = describe(page, query)
    assert found[0] == title
    assert description in (None, found[1])


def test_the_title_of_streamlits_page_is_replaced():
    assert INDEX.read_text(encoding="utf-8").count(TITLE) == 1
    served = page_html("", SMALL)
    assert TITLE not in served
    assert served.count("<title>") == 1
    assert '<meta property="og:title" content="Sizer: resnet18 on A100 (80 GB)" />' in served


def test_a_strangers_words_are_text():
    served = page_html("", f"arch=timm:{quote(HOSTILE)}")
    assert "<script>alert" not in served
    served = page_html("compare", f"q={quote(f'arch=timm:{quote(HOSTILE)}')}")
    assert "<script>alert" not in served


def test_every_page_has_its_route():
    files = {path.stem for path in (Path(__file__).parents[2] / "pages").glob("*.py")}
    assert {page or "estimate" for page in PAGES} == files
    assert {route.path for route in routes()} == {f"/{page}" for page in PAGES}


def test_a_preview_unpacks_no_config(monkeypatch):
    for module in (config_json, sources):
        monkeypatch.setattr(module, "decode_config", lambda value: pytest.fail("a config was unpacked"))
    packed = config_json.encode_config(f"[{','.join(['[1]'] * 500_000)}]")
    compared = [f"q=arch%3Dconfig%3A{packed}", f"q=arch%3Dconfig%253A{packed}"] * 2
    for page, query in (("", f"arch=config:{packed}"), ("compare", "&".join(compared)), ("measure", f"arch=config:{packed}")):
        title, description = describe(page, query)
        assert title.startswith("Sizer: how much") and description == ABOUT
    title, _ = describe("", f"{SMALL}&targets={'a' * 20_000}")
    assert len(title) < 200

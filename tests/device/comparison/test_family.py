"""Which kind of network a request asks for."""

from __future__ import annotations

import pytest

from sizer.device.comparison.row import family_of
from sizer.query.text import parse_query


@pytest.mark.parametrize(
    ("arch", "family"),
    [
        ("torchvision:resnet50", "CNN"),
        ("torchvision:swin_v2_b", "transformer"),
        ("torchvision:maskrcnn_resnet50_fpn", "other"),
        ("hf:gpt2", "transformer"),
        ("hf:convnext-tiny-224", "CNN"),
        ("hf:mamba-130m", "other"),
        ("hf:detr-resnet-50", "other"),
        ("hub:someone/Resnet-like", "CNN"),
    ],
)
def test_families(arch, family):
    assert family_of(parse_query(f"arch={arch}")) == family

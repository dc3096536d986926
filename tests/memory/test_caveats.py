"""What stands beside the headline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.memory.caveats import caveats
from sizer.request import Request
from tests.ui.reports import report_for


@pytest.mark.parametrize(("name", "weights", "told"), [("gpt-oss-20b", "checkpoint", True), ("detr-resnet-50", "checkpoint", False),
                                                       ("gpt-oss-20b", "nf4", False)])  # fmt: skip
def test_a_preset_that_is_not_its_checkpoint_says_so(name: str, weights: str, told: bool) -> None:
    report = report_for(Request(source="hf", name=name, dtypes=("bfloat16",), batches=(1,)))
    said = caveats(replace(report, request=report.request | {"source": "hf", "name": name, "weights": weights}))
    assert any("this is the unquantised architecture" in line for line in said) is told

"""Public reports of allocated memory, each repeated by a query: errors stay as recorded, and large ones have a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torchvision.models import resnet50

import sizer
from sizer.base.config_json import read_config
from sizer.estimating.estimator import estimate_cell
from sizer.query.request import Request, gpu_of
from sizer.query.text import parse_query
from sizer.report.replays import replay_unbounded
from sizer.tape.loop_choices import zero_gradients
from tests.benchmarks.tables import read_table
from tests.figures import REPORTS

ROWS = read_table(REPORTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["work"])
def test_a_report_is_repeated(row: dict[str, str]) -> None:
    request = parse_query(row["query"])
    report, tape = estimate_cell(request, config=config_of(request), gpu=gpu_of(request))
    (estimate,) = report.estimates
    assert percent(estimate.peak_allocated_bytes, row) == pytest.approx(float(row["error_percent"]), abs=0.05)
    if row["zeroed_percent"]:
        zeroed = replace(zero_gradients(tape), outputs=(), graphs=(), half_outputs=frozenset())
        peak = replay_unbounded(zeroed, "cuda").timeline.peak_allocated_bytes
        assert percent(peak, row) == pytest.approx(float(row["zeroed_percent"]), abs=0.05)


def config_of(request: Request) -> dict | None:
    return None if request.config is None else read_config(request.config)


def percent(peak: int, row: dict[str, str]) -> float:
    return 100 * (peak / int(row["allocated_bytes"]) - 1)


@pytest.mark.exhaustive
def test_the_loop_of_an_old_pytorch_explains_resnet_50() -> None:
    """mmcls 0.13's step in PyTorch 1.7 (mmcv's OptimizerHook): forward pass, zero_grad, backward pass, step; 2,962 MiB."""
    (row,) = (row for row in ROWS if row["work"].startswith("ResNet-50"))
    report = sizer.size_step(old_step, gpu="gtx-1080", torch="2.6")
    assert percent(report.estimates[0].peak_allocated_bytes, row) == pytest.approx(float(row["zeroed_percent"]), abs=0.05)


@pytest.mark.exhaustive
def test_a_second_copy_of_a_weight_explains_four_bits() -> None:
    """`F.dequantize_4bit(B, quant_state).to(A.dtype)` (bitsandbytes 0.39 to 0.49, autograd/_functions.py): float16 and float32."""
    (row,) = (row for row in ROWS if row["work"].startswith("the same in 4 bits"))
    (estimate,) = sizer.estimate(row["query"]).estimates
    assert estimate.peak_phase == "prefill" and estimate.peak_module.endswith("mlp.c_proj")
    more = 2 * 24_576 * 6_144  # bytes of that layer's weight in float16
    assert percent(estimate.peak_allocated_bytes + more, row) == pytest.approx(-0.18, abs=0.05)


def old_step() -> Callable[[], None]:
    model = resnet50(num_classes=10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, foreach=False)

    def step() -> None:
        images, labels = torch.randn(32, 3, 224, 224).cuda(), torch.zeros(32, dtype=torch.long).cuda()
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()

    return step


def test_an_error_above_three_percent_has_a_reason() -> None:
    assert [row["work"] for row in ROWS if abs(float(row["error_percent"])) > 3 and not row["reason"]] == []

"""The peak of a compiled step over its budget: each point is the estimate of its own query."""

from __future__ import annotations

import pytest

from sizer.base.codec import decode, encode
from sizer.base.errors import RequestError
from sizer.decision.budget import BUDGETS, budget
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from sizer.report.decision import BudgetPoint, BudgetReport, Cell, describe_budgets
from tests.decision.questions import TWO_LAYERS

pytest.importorskip("triton")
GPT2 = f"{TWO_LAYERS}&dtype=bfloat16&batch=2&seq=256&gpu=rtx-4090"


@pytest.mark.exhaustive
def test_each_point_is_the_estimate_of_its_own_query():
    *partial, found = budget(parse_query(GPT2))
    assert [len(report.pending) for report in partial] == [6, 6, 5, 4, 3, 2, 1]
    assert tuple(point.budget for point in found.points) == BUDGETS
    last = found.points[-1]
    (own,) = estimate(parse_query(last.query)).estimates
    assert (own.peak_allocated_bytes, own.peak_reserved_bytes) == (last.peak_allocated_bytes, last.peak_reserved_bytes)
    (eager,) = estimate(parse_query(GPT2)).estimates
    (checkpointed,) = estimate(parse_query(f"{GPT2}&checkpointing=1")).estimates
    assert found.eager.peak_allocated_bytes == eager.peak_allocated_bytes
    assert found.checkpointing.peak_allocated_bytes == checkpointed.peak_allocated_bytes
    shares = [point.recomputed_flops_share for point in found.points]
    assert shares == sorted(shares) and shares[0] == 0.0 and 0.3 < shares[-1] < 1
    assert "aten._scaled_dot_product_flash_attention.default" in " ".join(found.points[-1].recomputed)
    assert not any("view" in line for point in found.points for line in point.recomputed)
    assert decode(BudgetReport, encode(found)) == found


@pytest.mark.parametrize(
    ("query", "said"),
    [
        (GPT2.replace("rtx-4090", "cpu"), "compile: given 'default' with gpu=cpu"),
        (f"{GPT2}&mode=inference", "the activation memory budget is that of a backward pass: given mode=inference"),
        (f"{GPT2}&train=without-tower", "train: given 'without-tower' with compile=default"),
        (GPT2.replace("batch=2", "batch=2,4"), "this answer is for one dtype and batch size"),
    ],
)
def test_what_has_no_budget_is_refused(query: str, said: str):
    with pytest.raises(RequestError) as refused:
        next(iter(budget(parse_query(query))))
    assert said in str(refused.value)


def test_a_smaller_budget_is_never_said_to_need_less():
    cell = Cell(
        dtype="bfloat16",
        batch=1,
        peak_allocated_bytes=9,
        peak_reserved_bytes=9,
        process_bytes=9,
        process_low_bytes=9,
        process_high_bytes=9,
        fits=True,
    )
    peaks = {1.0: 2**30, 0.4: 2**28, 0.0: 2**29}
    points = tuple(BudgetPoint(budget=value, query="", peak_allocated_bytes=peak) for value, peak in peaks.items())
    found = BudgetReport(query="", eager=cell, points=points)
    assert describe_budgets(found) == (
        "The lowest tested peak is 256.00 MiB, at budget 0.4. "
        "A smaller budget needs more: recomputation in the backward pass needs memory."
    )

"""Operators of torchvision without a kernel for a dtype: the kernels of the installed wheel decide."""

from __future__ import annotations

import pytest
import torch

from sizer.base.errors import RequestError
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from sizer.tracing.device import Device
from sizer.tracing.meta.missing_kernels import MISSING, missing_kernel
from sizer.tracing.recorder import Recorder
from sizer.tracing.trace import recording
from tests.tracing.torchvision_dtypes import DTYPES, OTHER_KINDS, cases, refused, registered

DETECTION = "arch=torchvision:fasterrcnn_mobilenet_v3_large_320_fpn&image=64&batch=1"


def refused_in_a_trace(kind: str) -> list[str]:
    with recording(Recorder(Device(kind, (8, 0) if kind == "cuda" else None))):
        found = []
        for operator, call in cases().items():
            if operator not in registered():
                continue
            for name, dtype in DTYPES.items():
                if operator == "box_iou_rotated" and name not in MISSING[operator][kind == "cpu"]:
                    continue  # torchvision has no meta kernel for it
                try:
                    call("meta", dtype)
                except NotImplementedError as error:
                    assert missing_kernel(str(error)), error
                    found.append(f"{operator} {name}")
        return found


def test_every_operator_of_the_wheel_has_a_case_and_a_row():
    assert registered() - OTHER_KINDS <= set(cases()) == set(MISSING)


def test_a_trace_by_the_cpus_rules_refuses_what_the_wheels_cpu_kernels_refuse():
    judged = refused("cpu")
    assert "nms float16" in judged and "roi_align float16" not in judged
    assert refused_in_a_trace("cpu") == judged


def test_a_named_dtype_is_refused_with_the_operator():
    with pytest.raises(RequestError, match="torchvision's operator nms has no bfloat16 kernel on CUDA") as caught:
        estimate(parse_query(f"{DETECTION}&dtype=float32,bfloat16"))
    assert [refusal.key for refusal in caught.value.refusals] == ["dtype"]
    assert caught.value.exit_status == 2


@pytest.mark.exhaustive  # takes longest
def test_an_answer_on_all_dtypes_leaves_it_out_and_says_so():
    report = estimate(parse_query(f"{DETECTION}&mode=inference"))
    assert report.request["dtypes"] == ("float32", "float16", "amp-bfloat16", "amp-float16")
    assert {row.dtype for row in report.estimates} == set(report.request["dtypes"])
    assert "bfloat16 is left out: torchvision's operator nms has no bfloat16 kernel on CUDA" in report.notes
    assert not report.failures


def test_autocast_runs_them_in_float32():
    with recording(Recorder(Device("cuda", (8, 0)))), torch.autocast("cuda", torch.bfloat16):
        kept = torch.ops.torchvision.nms(
            torch.zeros(4, 4, dtype=torch.bfloat16, device="meta"),
            torch.zeros(4, dtype=torch.bfloat16, device="meta"),
            0.5,
        )
    assert kept.shape == (4,), "every one of four unknown boxes is kept"

"""The rules of one PyTorch give the same figures whichever PyTorch runs them, where the rules alone decide."""

from __future__ import annotations

import pytest
import torch

import sizer
from sizer.base.errors import RequestError
from sizer.tracing.cuda.by_capability import LARGE_WORKSPACE, LT_WORKSPACE
from tests.tracing.by_version import GPUS, QUESTIONS, peaks, perceptron, recorded

RECORDED = recorded()


@pytest.mark.parametrize("version", ["2.11", "2.15"])
def test_rules_give_what_the_version_itself_said(version: str) -> None:
    assert peaks(version) == RECORDED[version]


def test_versions_differ_where_their_rules_do() -> None:
    differ = {name for gpu in GPUS for name in QUESTIONS if RECORDED["2.11"][gpu][name] != RECORDED["2.15"][gpu][name]}
    # workspaces that are kept; grouped heads, a single key head and unbatched attention, which were not fused
    assert differ >= {"perceptron", "attention in float32, grouped", "attention in float16, one key head"}
    assert "recurrent" not in differ


def test_what_cublas_keeps_is_told_by_version() -> None:
    old, new = (
        sizer.size_step(perceptron, gpu="h100-80gb", torch=version).estimates[0] for version in ("2.11", "2.15")
    )
    # 2.11 keeps 32 MiB for each of two threads, and 1 MiB for the one where cuBLASLt adds biases; 2.15 nothing
    assert old.phases[-1].allocated_bytes - new.phases[-1].allocated_bytes == 2 * LARGE_WORKSPACE + LT_WORKSPACE


def test_what_cublas_keeps_in_2_6() -> None:
    old, next_one = (
        sizer.size_step(perceptron, gpu="a100-80gb", torch=version).estimates[0] for version in ("2.6", "2.11")
    )
    # both keep 8,519,680 for each of two threads; cuBLASLt's MiB, which 2.11 keeps, 2.6 has for the time of a call
    assert next_one.phases[-1].allocated_bytes - old.phases[-1].allocated_bytes == LT_WORKSPACE


def test_which_of_two_free_blocks_is_taken_is_told_by_version() -> None:
    def empty(mebibytes: int) -> torch.Tensor:
        return torch.empty(mebibytes * 2**20, dtype=torch.uint8, device="cuda")

    def step() -> None:
        whole = empty(80)
        del whole
        first, second = empty(40), empty(40)  # the halves of that segment
        newer = empty(40)
        del second, newer  # free blocks of one size
        small = empty(30)
        del first
        large = empty(80)  # there is room where the half of the older segment was not taken
        del small, large

    old, new = (
        sizer.size_step(lambda: step, gpu="t4", torch=version, steps=1).estimates[0] for version in ("2.11", "2.15")
    )
    assert (old.peak_reserved_bytes, new.peak_reserved_bytes) == (120 * 2**20, 200 * 2**20)


def test_the_report_says_that_2_8_was_not_read() -> None:
    report = sizer.size_step(perceptron, gpu="a100-80gb", torch="2.8")
    assert report.target == {"torch": "2.8"}
    (said,) = [text for text in report.notes if "PyTorch 2.8 is not among the versions with known rules" in text]
    assert said.endswith("the rules of 2.6 are used")
    by_2_6 = sizer.size_step(perceptron, gpu="a100-80gb", torch="2.6").estimates[0]
    assert report.estimates[0].phases == by_2_6.phases


def test_a_version_without_known_rules_is_refused() -> None:
    with pytest.raises(RequestError, match=r"torch: given '2\.5', allowed PyTorch's versions from 2\.6 on"):
        sizer.size_step(perceptron, torch="2.5")


def test_the_report_says_whose_rules_it_follows() -> None:
    other = "2.11" if sizer.size_step(perceptron).target["torch"] != "2.11" else "2.12"
    report = sizer.size_step(perceptron, torch=other)
    assert report.target == {"torch": other}
    assert any(
        text.startswith(f"the rules are those of PyTorch {other}, the code that ran is") for text in report.notes
    )
    assert set(report.cautions) <= set(report.notes)

"""A server's sampler as it is traced against PyTorch's own host code."""

from __future__ import annotations

import pytest

from sizer.catalogue.gpu_keys import find_gpu
from sizer.estimating.server_profile import trace_rejection, trace_sampler

# 38.02, 50.2 and 15.69 bytes a logit: the sort's buffers are for all rows from 128 on; the Triton path keeps 108 rows of scratch.
CASES = [("sort", 256, 151_936, 1), ("sort", 64, 128_256, 1), ("triton", 256, 151_936, 108), ("flashinfer", 256, 32_000, 1)]
CASES += [("copied", 256, 151_936, 1), ("bare", 64, 128_256, 1)]
# Bytes a logit, without rows of scratch: 32 up to 0.11.0, 46 with the sort (63 below 128 requests), 26 with the Triton path.
REJECTIONS = [("sort", 256, 128_256, 1, "drafted"), ("sort", 256, 128_256, 1, "both"), ("sort", 64, 151_936, 1, "copied")]
REJECTIONS += [("triton", 256, 151_936, 108, "copied")]


@pytest.mark.parametrize(("path", "rows", "vocabulary", "programs"), CASES)
def test_a_sampler_takes_what_pytorchs_own_operators_take(run_on_null, path, rows, vocabulary, programs):
    arguments = (path, str(rows), str(vocabulary), str(programs))
    truth = run_on_null("tests.null_driver.samplers", *arguments, gpu="h100-80gb")
    assert trace_sampler(path, rows, vocabulary, programs, find_gpu("h100-80gb")) == truth


@pytest.mark.parametrize(("path", "rows", "vocabulary", "programs", "rejection"), REJECTIONS)
def test_verifying_drafted_tokens_takes_what_pytorchs_own_operators_take(run_on_null, path, rows, vocabulary, programs, rejection):
    arguments = (path, str(rows), str(vocabulary), str(programs), rejection)
    truth = run_on_null("tests.null_driver.samplers", *arguments, gpu="h100-80gb")
    assert trace_rejection(path, rows, vocabulary, programs, find_gpu("h100-80gb"), rejection=rejection) == truth

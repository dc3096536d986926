"""flex_attention outside of torch.compile, in a step of your own, against PyTorch's own host code."""

from __future__ import annotations

from functools import partial

import pytest

import sizer
from sizer.base.versions import installed_version
from sizer.tracing.compiled.names import OLDEST_READ
from tests.null_driver.flexible import CASES, setup

# flex_attention compiles itself with the backend "eager"
OLDER = installed_version() < OLDEST_READ
pytestmark = pytest.mark.skipif(OLDER, reason="this PyTorch's compiler is refused by name (test_own_code.py)")


@pytest.fixture(scope="module")
def truth(run_on_null) -> dict[str, list[int]]:
    return run_on_null("tests.null_driver.flexible", gpu="rtx-4090")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse is deprecated")
@pytest.mark.parametrize("name", CASES)
def test_attention_by_plain_operators_takes_what_it_takes_on_cuda(truth, name):
    (estimate,) = sizer.size_step(partial(setup, **CASES[name]), gpu="rtx-4090").estimates
    assert [estimate.phases[-1].allocated_bytes, estimate.peak_allocated_bytes] == truth[name]

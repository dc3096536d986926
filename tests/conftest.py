"""What holds for every test: none leaves a setting of the process to the next, whose answer would then depend on their order."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


def _settings() -> dict[str, object]:
    """PyTorch's and Python's settings that an answer depends on."""
    return {
        "torch.backends.cudnn.conv.fp32_precision": torch.backends.cudnn.conv.fp32_precision,
        "torch.backends.cudnn.rnn.fp32_precision": torch.backends.cudnn.rnn.fp32_precision,
        "torch.backends.cuda.matmul.fp32_precision": torch.backends.cuda.matmul.fp32_precision,
        "torch.backends.cudnn.enabled": torch.backends.cudnn.enabled,
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.get_fastpath_enabled(),
        "gc.isenabled()": gc.isenabled(),
    }


@pytest.fixture(autouse=True)
def settings_unchanged() -> Iterator[None]:
    """Fails the test that leaves another setting than it found."""
    before = _settings()
    yield
    assert _settings() == before

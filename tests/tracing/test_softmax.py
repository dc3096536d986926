"""Softmax in float32 of half-precision inputs, as CUDA runs it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import sizer
from sizer.tape.tape import CATEGORIES
from sizer.tracing.device import Device
from sizer.tracing.recorder import Recorder
from sizer.tracing.trace import recording


def traced(dtype: torch.dtype, kind: str, capability: tuple[int, int] | None) -> tuple[list[int], Device]:
    """The bytes of every block of softmax(x [4, 1024], dtype=float32) and its gradient, x and its gradient left out."""
    recorder = Recorder(Device(kind, capability))
    with recording(recorder):
        x = torch.empty(4, 1024, dtype=dtype, device="meta", requires_grad=True)
        start = len(recorder.log.sizes)
        F.softmax(x, -1, dtype=torch.float32).backward(torch.empty(4, 1024, device="meta"))
        assert x.grad.dtype == dtype
    sizes = [
        s for s, c in zip(recorder.log.sizes, recorder.log.categories, strict=True) if CATEGORIES[c] != "workspace"
    ]
    return sizes[start:], recorder.device


def test_float16_needs_no_copy_in_float32() -> None:
    # output 4 * 1024 * 4 B, the incoming gradient likewise, the gradient of x 4 * 1024 * 2 B
    sizes, device = traced(torch.float16, "cuda", (8, 0))
    assert sizes == [16384, 16384, 8192]
    assert not device.halves_differ


def test_bfloat16_is_copied_and_its_gradient_too() -> None:
    # the copy of x and the output 16,384 B each, the incoming gradient, its float32 result, then that in bfloat16
    sizes, device = traced(torch.bfloat16, "cuda", (8, 0))
    assert sizes == [16384, 16384, 16384, 16384, 8192]
    assert device.halves_differ


def test_the_estimate_does_not_share_a_tape_that_would_be_wrong() -> None:
    report = sizer.estimate("arch=hf:gpt2&seq=64&attention=eager&batch=4&dtype=float16,bfloat16")
    half, brain = (report.find(dtype, 4) for dtype in ("float16", "bfloat16"))
    assert half.weights_bytes == brain.weights_bytes
    assert half.peak_requested_bytes <= brain.peak_requested_bytes


def test_a_module_in_float16() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(8, 64, dtype=torch.float16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softmax(self.score(x), -1, dtype=torch.float32)

    row = sizer.size_module(Attention, (torch.zeros(2, 8, dtype=torch.float16),)).estimates[0]
    # softmax's output [2, 64] float32, its mean's scalars (the sum over one output): no float32 copy of the scores
    assert 512 <= row.activations_bytes <= 512 + 3 * 8

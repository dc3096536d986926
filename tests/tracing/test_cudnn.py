"""cuDNN's own heuristics, asked for described devices: known workspaces, layouts, backends, and nobody there to ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sizer
from sizer.memory.gpus import GPUS
from sizer.memory.hardware import HARDWARE
from sizer.memory.report import Report
from sizer.tracing import convolution_cuda, cudnn, cudnn_convolution
from sizer.tracing.answers import answers_for, who_answers
from sizer.tracing.convolution_backend import as_call, backend_of
from sizer.tracing.cudnn_convolution import strides_of, workspace_bytes

WORDS = ("forward", "float32", "contiguous", "tf32")
SMALL = "arch=torchvision:resnet18&image=32&batch=2,4&dtype=float32&mode=inference&gpu=h100-80gb"


def numbers(input: tuple[int, ...], weight: tuple[int, ...], *, padding: int = 0, stride: int = 1) -> tuple[int, ...]:
    """A convolution of two dimensions without dilation, all three tensors at the beginning of their blocks."""
    result = ((size + 2 * padding - kernel) // stride + 1 for size, kernel in zip(input[2:], weight[2:], strict=True))
    return (*input, input[0], weight[0], *result, *weight, *[padding] * 2, *[stride] * 2, 1, 1, 0, 0, 0)


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No cuDNN is installed."""
    caches = (cudnn.library, cudnn_convolution._device, workspace_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(cudnn, "_folders", lambda: iter([Path("/nowhere")]))
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


def test_tensor_cores_of_an_h100_take_copies_in_nhwc() -> None:
    # float32: input [b, 3, 224, 224], output [b, 64, 112, 112], weight [64, 3, 7, 7] of 4 bytes an element, and 16 bytes
    for batch in (2, 32):
        copies = 4 * (batch * 3 * 224 * 224 + batch * 64 * 112 * 112 + 64 * 3 * 7 * 7)
        asked = numbers((batch, 3, 224, 224), (64, 3, 7, 7), padding=3, stride=2)
        assert workspace_bytes("h100-80gb", WORDS, asked) == copies + 16
    # here output stays as it is: input [2, 64, 56, 56] and weight [64, 64, 3, 3]
    small = numbers((2, 64, 56, 56), (64, 64, 3, 3), padding=1)
    assert workspace_bytes("h100-80gb", WORDS, small) == 4 * (2 * 64 * 56 * 56 + 64 * 64 * 3 * 3) + 16


def test_channels_last_needs_no_copies() -> None:
    asked = numbers((2, 64, 56, 56), (64, 64, 3, 3), padding=1)
    assert workspace_bytes("h100-80gb", ("forward", "bfloat16", "channels last", "tf32"), asked) == 0


@pytest.mark.parametrize("gpu", HARDWARE)
def test_cudnn_knows_every_device(gpu: str) -> None:
    asked = numbers((2, 64, 56, 56), (64, 64, 3, 3), padding=1)
    assert workspace_bytes(gpu, ("forward", "float16", "contiguous", "tf32"), asked) is not None


def test_every_cuda_device_of_the_catalogue_is_described() -> None:
    assert set(HARDWARE) == {key for key, gpu in GPUS.items() if gpu.backend == "cuda"}


def test_what_cudnn_does_not_support_has_no_answer() -> None:
    wrong = (*numbers((2, 64, 56, 56), (64, 64, 3, 3), padding=1)[:-9], *[0] * 9)  # a stride of 0
    assert workspace_bytes("h100-80gb", WORDS, wrong) is None


@pytest.mark.parametrize(
    ("sizes", "layout", "strides"),
    [
        ((2, 3, 4, 5), "contiguous", [60, 20, 5, 1]),
        ((2, 3, 4, 5), "channels last", [60, 1, 15, 3]),
        ((2, 3, 1, 5), "contiguous", [15, 5, 5, 1]),  # the dimension of 1 as if it were more
        ((1, 3, 2, 4, 5), "channels last", [120, 1, 60, 15, 3]),
    ],
)
def test_strides(sizes: tuple[int, ...], layout: str, strides: list[int]) -> None:
    assert strides_of(sizes, layout) == strides


@pytest.mark.parametrize(
    ("input", "weight", "groups", "dtype", "capability", "backend"),
    [
        ((2, 64, 9, 9), (64, 64, 3, 3), 1, torch.float32, (7, 5), "cudnn"),
        ((2, 64, 9, 9), (64, 64, 3, 3), 1, torch.bfloat16, (8, 0), "cudnn"),
        ((2, 64, 9, 9), (64, 64, 3, 3), 1, torch.bfloat16, (7, 5), "slow"),
        ((2, 64, 9, 9), (64, 1, 3, 3), 64, torch.float32, (9, 0), "depthwise"),
        ((2, 64, 9, 9), (64, 1, 3, 3), 64, torch.float16, (9, 0), "cudnn"),
        ((2, 64, 6, 6), (64, 1, 3, 3), 64, torch.float16, (9, 0), "depthwise"),  # less than 7 wide
        ((2, 16, 9, 9), (16, 1, 3, 3), 16, torch.float16, (9, 0), "depthwise"),  # less than 32 channels
        ((2, 64, 9, 9, 9), (64, 64, 3, 3, 3), 1, torch.bfloat16, (7, 0), "slow dilated"),
        ((0, 64, 9, 9), (64, 64, 3, 3), 1, torch.float32, (9, 0), "empty"),
    ],
)
def test_backend(input, weight, groups, dtype, capability, backend) -> None:  # type: ignore[no-untyped-def]
    tensors = (torch.empty(sizes, dtype=dtype, device="meta") for sizes in (input, weight))
    rank = len(input) - 2
    call = as_call(*tensors, ([1] * rank, [1] * rank, [1] * rank, False, [0] * rank, groups))
    assert backend_of(call, capability) == backend


def test_reports_say_who_was_asked() -> None:
    report = sizer.estimate(SMALL)
    told = report.explanation
    who = f"cuDNN {cudnn.version_text()} chooses for a described NVIDIA H100 80GB HBM3"
    assert who_answers(GPUS["h100-80gb"]) == who
    assert any(who in line for line in told.modelled)
    use = next(use for use in told.workspaces if use.op == "aten.convolution.default")
    assert who in use.formula and not use.modelled
    row, gpu = report.estimates[0], report.gpu
    assert row.process_high_bytes - row.process_low_bytes == gpu.context_high_bytes - gpu.context_low_bytes
    assert Report.from_dict(report.to_dict()) == report


def test_without_cudnn_workspaces_are_modelled_and_said_to_be(nobody: None) -> None:
    gpu = GPUS["h100-80gb"]
    assert cudnn.library() is None and cudnn.version() is None and who_answers(gpu) is None
    assert answers_for(gpu)(convolution_cuda.CUDNN, WORDS, numbers((2, 64, 56, 56), (64, 64, 3, 3), padding=1)) is None
    report = sizer.estimate(SMALL)
    assert [line for line in report.uncounted if "workspaces of convolutions: modelled" in line]
    use = next(use for use in report.explanation.workspaces if use.op == "aten.convolution.default")
    assert use.modelled and "cuDNN's workspace, taken as copies" in use.formula
    row = report.estimates[0]
    context = report.gpu.context_high_bytes - report.gpu.context_low_bytes
    # the largest workspace at batch 2: input [2, 3, 32, 32], output [2, 64, 16, 16] and weight [64, 3, 7, 7] of the first
    # convolution are 193,280 bytes; [2, 512, 1, 1] twice and [512, 512, 3, 3] of the last 9,445,376 bytes
    assert row.process_high_bytes - row.process_low_bytes == context + 2 * 4 * (2 * 2 * 512 + 512 * 512 * 9)


def test_an_old_library_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn.library.cache_clear()
    monkeypatch.setattr(cudnn, "_version", lambda found: 90700)
    assert cudnn.library() is None
    cudnn.library.cache_clear()

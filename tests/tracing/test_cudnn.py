"""cuDNN's own heuristics, asked for described devices: known workspaces, layouts, backends, and nobody there to ask."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sizer
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.hardware import HARDWARE
from sizer.report.bounds import CONTEXT, ENGINES, MODELS, Margin
from sizer.report.report import Report
from sizer.tracing.cuda import by_capability, cudnn, cudnn_convolution, deviceless
from sizer.tracing.cuda.convolution import as_call, backend_of
from sizer.tracing.cuda.cudnn_graph import dense_strides
from sizer.tracing.cuda.deviceless import NoImportError, replace_import
from sizer.tracing.cuda.size_oracle import oracle_name, size_oracle_of

WORDS = ("forward", "float32", "contiguous", "tf32")
SMALL = "arch=torchvision:resnet18&image=32&batch=2,4&dtype=float32&mode=inference&gpu=h100-80gb"


def numbers(input: tuple[int, ...], weight: tuple[int, ...], *, padding: int = 0, stride: int = 1) -> tuple[int, ...]:
    """A convolution of two dimensions without dilation, all three tensors at the beginning of their blocks."""
    result = ((size + 2 * padding - kernel) // stride + 1 for size, kernel in zip(input[2:], weight[2:], strict=True))
    return (*input, input[0], weight[0], *result, *weight, *[padding] * 2, *[stride] * 2, 1, 1, 0, 0, 0)


def workspace_bytes(gpu: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int | None:
    """What cuDNN answers to one query."""
    (found,) = cudnn_convolution.workspace_bytes(gpu, [(words, numbers)])
    return found


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No cuDNN is installed."""
    caches = (cudnn._found, cudnn_convolution.without_cublaslt, cudnn.device)
    with monkeypatch.context() as patch:
        patch.setattr(cudnn_convolution, "_kept", {})
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


@pytest.mark.parametrize("gpu", ["rtx-3060-12gb", "rtx-4090", "a100-40gb"])
@pytest.mark.parametrize(
    ("direction", "bytes"), [("forward", 0), ("backward data", 0), ("backward filter", 32 * 256 * 64 * 4)]
)
def test_pointwise_convolutions_go_through_cublaslt(gpu: str, direction: str, bytes: int) -> None:
    # the gradient of the weight [64, 256, 1, 1] is computed for each of the 32 images and summed up afterwards
    asked = numbers((32, 256, 56, 56), (64, 256, 1, 1))
    assert workspace_bytes(gpu, (direction, "float32", "contiguous", "tf32"), asked) == bytes


def test_without_a_driver_cudnn_would_pass_over_these_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = numbers((32, 256, 56, 56), (64, 256, 1, 1))
    words = ("forward", "float32", "contiguous", "tf32")
    assert cudnn_convolution.ask("a100-40gb", words, [asked]) == [0]
    monkeypatch.setattr(deviceless.Interposer, "described", lambda self, capability: nullcontext())
    # copies of all three operands in NHWC instead: 4 * (32 * 256 * 56 * 56 + 32 * 64 * 56 * 56 + 64 * 256) bytes are 122.6 MiB
    (alone,) = cudnn_convolution.ask("a100-40gb", words, [asked])
    assert alone > 4 * 32 * 256 * 56 * 56


def test_winograd_multiplies_through_cublaslt_where_there_is_no_tf32() -> None:
    # 36 products of 32 * 14 * 14 tiles of 4x4 pixels, transformed: 36 * 4 * (6272 * (64 + 64) + 64 * 64) bytes
    asked = numbers((32, 64, 56, 56), (64, 64, 3, 3), padding=1)
    for direction in ("forward", "backward data", "backward filter"):
        found = workspace_bytes("t4", (direction, "float32", "contiguous", "tf32"), asked)
        assert found == 36 * 4 * (6272 * (64 + 64) + 64 * 64)


def test_engines_that_would_be_compiled_are_chosen_and_not_compiled() -> None:
    channels = numbers(
        (32, 64, 56, 56), (64, 1, 3, 3), padding=1
    )  # depthwise: no copies in NHWC as the next engine takes
    for dtype in ("float16", "bfloat16"):
        assert workspace_bytes("a100-40gb", ("backward filter", dtype, "contiguous"), channels) == 0


_ASKED_IN_ORDER = """
import json, sys
from sizer.tracing.cuda.cudnn_convolution import workspace_bytes
asked = [(gpu, (tuple(words), tuple(numbers))) for gpu, words, numbers in json.loads(sys.argv[1])]
print(json.dumps([workspace_bytes(gpu, [query])[0] for gpu, query in asked]))
"""


def test_the_first_device_of_a_process_decides_nothing_for_later_ones() -> None:
    # cuDNN remembers TF32 from the first device that it is asked about; a T4 has none
    asked = [
        (gpu, ("forward", "float32", layout, "tf32"), numbers((8, 256, 14, 14), (256, 256, 7, 7), padding=3))
        for gpu in ("t4", "a100-40gb", "h100-80gb", "v100-16gb", "rtx-4090")
        for layout in ("contiguous", "channels last")
    ]

    def answers(order: list) -> list:
        command = [sys.executable, "-c", _ASKED_IN_ORDER, json.dumps(order)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert answers(asked) == answers(asked[::-1])[::-1]


@pytest.mark.parametrize("has_driver", [False, True])
def test_what_others_are_forked_from_asks_about_each_device_unless_there_is_a_driver(
    has_driver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> None:
        if name != "libcuda.so.1" or not has_driver:
            raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cudnn_convolution, "ctypes", SimpleNamespace(CDLL=load))
    monkeypatch.setattr(cudnn_convolution, "_kept", {})
    cudnn_convolution.prepare()
    assert cudnn_convolution._kept.keys() == (set() if has_driver else HARDWARE.keys())


def test_the_same_answers_without_numba() -> None:
    asked = [
        (gpu, (direction, dtype, layout), numbers((2, 64, 56, 56), (64, 64, 3, 3), padding=1))
        for gpu in ("t4", "h100-80gb", "rtx-5090")  # engines by number are passed over on the last
        for direction in ("forward", "backward data", "backward filter")
        for dtype, layout in (("float32", "contiguous"), ("float16", "channels last"))
    ]
    source = 'import sys; sys.modules["numba"] = None\n' + _ASKED_IN_ORDER
    command = [sys.executable, "-c", source, json.dumps(asked)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found == [workspace_bytes(*one) for one in asked]
    assert len(set(found)) > 3


@pytest.mark.parametrize(
    ("compute", "operand", "result", "capability", "bytes"),
    [
        (68, 0, 0, (7, 5), 0),
        (77, 0, 0, (8, 0), 0),
        (77, 14, 14, (8, 0), 0),
        (68, 14, 14, (7, 5), None),  # bfloat16 since 8.0
        (68, 2, 0, (7, 5), 0),
        (64, 0, 0, (9, 0), None),  # no float32 in a product computed in float16
        (72, 3, 10, (9, 0), None),  # integers
    ],
)
def test_products_that_cublaslt_supports(
    compute: int, operand: int, result: int, capability, bytes: int | None
) -> None:  # type: ignore[no-untyped-def]
    product = deviceless.Product(compute=compute, operand=operand, result=result)
    assert deviceless.workspace_bytes(product, capability) == bytes


def test_the_report_says_where_cublaslt_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cudnn, "interposer", lambda: "no such table here")
        patch.setattr(cudnn_convolution, "_kept", {})
        cudnn_convolution.without_cublaslt.cache_clear()
        report = sizer.estimate(SMALL)
    cudnn_convolution.without_cublaslt.cache_clear()
    assert any(
        "engines that use cuBLASLt are left out" in line and "no such table here" in line for line in report.uncounted
    )


def test_a_library_that_imports_no_such_function() -> None:
    with pytest.raises(NoImportError, match="imports no nothing_of_the_kind"):
        replace_import(cudnn.library(), "nothing_of_the_kind", None)


def test_channels_last_needs_no_copies() -> None:
    asked = numbers((2, 64, 56, 56), (64, 64, 3, 3), padding=1)
    assert workspace_bytes("h100-80gb", ("forward", "bfloat16", "channels last", "tf32"), asked) == 0


@pytest.mark.parametrize("gpu", HARDWARE)
def test_cudnn_knows_every_device(gpu: str) -> None:
    asked = numbers((2, 64, 56, 56), (64, 64, 3, 3), padding=1)
    assert workspace_bytes(gpu, ("forward", "float16", "contiguous", "tf32"), asked) is not None


def test_what_cudnn_9_knows_of_the_catalogue_is_described() -> None:
    nvidias = {key: gpu.capability for key, gpu in GPUS.items() if gpu.maker == "NVIDIA"}
    pascal_and_jetson = {key for key, capability in nvidias.items() if capability < (7, 0) or capability == (8, 7)}
    assert set(HARDWARE) == nvidias.keys() - pascal_and_jetson
    assert len(pascal_and_jetson) == 7


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
    found = np.zeros(len(sizes), np.int64)
    dense_strides(np.array(sizes), layout == "channels last", found)
    assert [*found] == strides


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
    assert oracle_name(GPUS["h100-80gb"]) == who
    assert any(who in line for line in told.modelled)
    use = next(use for use in told.workspaces if use.op == "aten.convolution.default")
    assert who in use.formula and not use.modelled
    assert [margin.name for margin in report.estimates[0].margins] == [CONTEXT, ENGINES]
    assert Report.from_dict(report.to_dict()) == report


def test_without_cudnn_workspaces_are_modelled_and_said_to_be(nobody: None) -> None:
    gpu = GPUS["h100-80gb"]
    assert cudnn.library() is None and cudnn.version() is None and oracle_name(gpu) is None
    asked = (by_capability.CUDNN, WORDS, numbers((2, 64, 56, 56), (64, 64, 3, 3), padding=1))
    assert size_oracle_of(gpu)([asked]) == [None]
    report = sizer.estimate(SMALL)
    assert [line for line in report.uncounted if "workspaces of convolutions: modelled" in line]
    use = next(use for use in report.explanation.workspaces if use.op == "aten.convolution.default")
    assert use.modelled and "cuDNN's workspace" in use.formula and "copies" in use.formula
    # the largest workspace at batch 2: [2, 512, 1, 1] twice and [512, 512, 3, 3] of the last convolution are 9,445,376 bytes, which
    # share a segment of 20 MiB with others; twice as many need another one
    assert 2 * 4 * (2 * 2 * 512 + 512 * 512 * 9) < 20 * 2**20
    assert report.estimates[0].margins[1:] == (Margin(name=MODELS, less_bytes=0, more_bytes=20 * 2**20),)


def test_an_old_library_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn._found.cache_clear()
    monkeypatch.setattr(cudnn, "_version", lambda found: 90700)
    assert cudnn.library() is None
    cudnn._found.cache_clear()

"""Operators that behave differently on meta than on CUDA: the smallest case of each kind.

The right values are PyTorch 2.15's CUDA host code over the null driver (tests/null_driver), with the device of an H100.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import deform_conv2d, nms

import sizer
from sizer.catalogue.recipes import INSIDE

HALF = torch.bfloat16
LAST = torch.channels_last


def planes() -> Tensor:
    return torch.empty(2, 64, 32, 32, device="cuda", dtype=HALF)  # 262,144 bytes


def last() -> Tensor:
    return planes().to(memory_format=LAST)


def part() -> Tensor:
    return torch.empty(2, 128, 32, 32, device="cuda", dtype=HALF)[:, :64]


def turned() -> Tensor:
    """As an attention block returns an image: channels last, and the stride of the one sample is 64."""
    return torch.empty(1, 1024, 64, device="cuda", dtype=HALF).transpose(-1, -2).reshape(1, 64, 32, 32)


def probabilities() -> Tensor:
    return torch.empty(128, 1024, device="cuda")  # 524,288 bytes


def host() -> Tensor:
    return torch.zeros(2, 64, 128, 128)


def brought() -> Tensor:
    return host().cuda()


def weights() -> Tensor:
    return torch.empty(64, device="cuda", dtype=HALF)


def traced(
    make: Callable[[], Tensor], operator: Callable[[Tensor], Tensor], *, trains: bool = False
) -> tuple[int, tuple[int, ...]]:
    """Return the bytes at the peak above the input, and the strides of the result."""
    strides: list[tuple[int, ...]] = []

    def setup():
        input = make().detach().requires_grad_(trains)

        def step():
            with torch.set_grad_enabled(trains):
                out = operator(input)
            strides.append(out.stride())
            if out.requires_grad:
                out.backward(torch.ones_like(out))

        return step

    estimate = sizer.size_step(setup, steps=1, gpu="h100-80gb").estimates[0]
    return max(p.peak_allocated_bytes for p in estimate.phases[1:]) - estimate.phases[0].allocated_bytes, strides[-1]


def written(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[x[..., 0] > 0] = x.view(-1, 32) * 2
    return out


BYTES = {
    "nearest": (planes, lambda x: F.interpolate(x, scale_factor=2.0), 1048576),
    "nearest, channels last": (last, lambda x: F.interpolate(x, scale_factor=2.0), 1048576),
    "nearest down, channels last": (last, lambda x: F.interpolate(x, size=(16, 16)), 65536),
    "nearest of a slice": (part, lambda x: F.interpolate(x, scale_factor=2.0), 1310720),
    "group norm, channels last": (last, lambda x: F.group_norm(x, 32, weights(), weights()), 266240),
    "group norm": (planes, lambda x: F.group_norm(x, 32, weights(), weights()), 266240),
    "group norm without weights": (lambda: planes().float(), lambda x: F.group_norm(x, 32), 525312),
    "RMS norm over channels moved last": (planes, lambda x: F.rms_norm(x.movedim(1, -1), (64,)), 532480),
    "average pooling of a slice": (part, lambda x: F.avg_pool2d(x, 2), 327680),
    "max pooling of a slice": (part, lambda x: F.max_pool2d(x, 2), 589824),
    "adaptive average of a slice": (part, lambda x: F.adaptive_avg_pool2d(x, 8), 278528),
    "adaptive max, channels last": (last, lambda x: F.adaptive_max_pool2d(x, 8), 425984),
    "area of a slice": (part, lambda x: F.interpolate(x, size=(16, 16), mode="area"), 327680),
    "antialiased, channels last": (
        last, lambda x: F.interpolate(x, size=(64, 64), mode="bilinear", antialias=True), 2359296,
    ),
    "reflection padding, channels last": (last, lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), 558080),
    "unfold": (planes, lambda x: F.unfold(x, 3, padding=1), 2621440),
    "cumsum, channels last": (last, lambda x: x.cumsum(2), 524288),
    "roll, channels last": (last, lambda x: x.roll(1, 2), 524288),
    "multinomial": (probabilities, lambda x: torch.multinomial(x, 1), 527360),
    "multinomial with replacement": (probabilities, lambda x: torch.multinomial(x, 4, replacement=True), 1052672),
    "multinomial of one row": (lambda: probabilities()[0], lambda x: torch.multinomial(x, 1), 6656),
    "multinomial of long rows": (
        lambda: torch.empty(8, 151936, device="cuda"), lambda x: torch.multinomial(x, 1), 4867584,
    ),
    "topk, channels last": (last, lambda x: x.topk(2, 1)[0], 303104),
    "mask": (planes, lambda x: x[x > 0], 4587520),
    "mask of rows": (lambda: rows(), lambda x: x[x[..., 0] > 0], 928256),
    "masked_select": (planes, lambda x: x.masked_select(x > 0), 4587520),
    "nonzero": (planes, torch.nonzero, 4195840),
    "values at a mask": (lambda: rows(), written, 1748992),
    "result in an empty tensor": (planes, lambda x: torch.mul(x, 2, out=torch.empty(0, device="cuda", dtype=HALF)), 262144),
}  # fmt: skip


def rows() -> Tensor:
    return torch.empty(64, 100, 32, device="cuda")  # 819,200 bytes


def places(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device="cuda")


def statistics() -> list[Tensor]:
    return [torch.empty(64, device="cuda") for _ in range(2)]


@torch.library.custom_op("sizer_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """Hold a temporary of the input's size, which the fake kernel does not."""
    return (x + x).clone()


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("sizer_tests::launch", mutates_args=())
def launch(x: Tensor) -> Tensor:
    """Ask the driver for its stream after an allocation, as code does that launches kernels by itself."""
    twice = x + x
    torch._C._cuda_getCurrentRawStream(0)
    return twice.clone()


@launch.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


# With their gradients, where the input requires one.
WITH_GRADIENTS = {
    "product": (rows, lambda x: x.prod(), 1639424),
    "mask": (planes, lambda x: x[x > 0], 8257536),
    "mask of rows": (rows, lambda x: x[x.detach()[..., 0] > 0], 2778112),
    "product over rows": (rows, lambda x: x.prod(1), 1875968),
    "cumulative product": (rows, lambda x: x.cumprod(1), 5120000),
    "renorm": (rows, lambda x: x.renorm(2, 1, 0.5), 4916736),
    "unfold, channels last": (last, lambda x: F.unfold(x, 3, padding=1), 7340032),
    "dropout of permuted planes": (lambda: planes().permute(0, 2, 1, 3), lambda x: F.dropout(x, 0.1, True), 1048576),
    "batch norm in evaluation, channels last": (last, lambda x: F.batch_norm(x, *statistics()), 1048576),
    "batch norm of permuted planes": (
        lambda: planes().permute(0, 2, 1, 3), lambda x: F.batch_norm(x, None, None, training=True), 1311744,
    ),
    "adaptive max, channels last": (last, lambda x: F.adaptive_max_pool2d(x, 8), 704512),
    "embedding_bag": (lambda: rows()[0], lambda x: F.embedding_bag(places(8, 500), x, mode="sum"), 248320),
    "embedding scaled by frequency": (lambda: rows()[0], lambda x: F.embedding(places(500), x, scale_grad_by_freq=True), 185344),
    "embedding of bounded rows": (
        lambda: rows()[0], lambda x: F.embedding(places(500), x.detach(), max_norm=1.0) * x[0], 256512,
    ),
    "bilinear": (lambda: rows()[0], lambda x: F.bilinear(x, x, torch.empty(5, 32, 32, device="cuda")), 34014208),
    "multi_margin_loss": (lambda: rows()[0], lambda x: F.multi_margin_loss(x, places(100)), 14848),
    "number to a power": (rows, lambda x: 2.0 ** x, 3276800),
    "transposed convolution of groups": (
        lambda: torch.empty(2, 2, 4, 4, device="cuda"),
        lambda x: F.conv_transpose2d(
            x, torch.empty(2, 2, 4, 5, device="cuda", requires_grad=True), torch.empty(4, device="cuda", requires_grad=True),
            stride=(3, 2), padding=(1, 2), output_padding=(2, 3), groups=2, dilation=4,
        ), 33601536,
    ),
    "a product in place": (
        lambda: rows()[0],
        lambda x: torch.zeros(100, 100, device="cuda").addmm_(x.detach(), x.detach().t()), 33594880,
    ),
    "attention by cuDNN, one sample": (
        lambda: torch.empty(4, 128, 64, device="cuda", dtype=HALF), lambda x: F.scaled_dot_product_attention(x, x, x), 464384,
    ),
    "custom operator": (rows, lambda x: twice(x.detach()), 1638400),
    "custom operator that cannot run on meta": (rows, lambda x: launch(x.detach()), 819200),
    "slice to the host": (rows, lambda x: x.detach()[:, :20].cpu(), 163840),
    "to the host in another dtype": (rows, lambda x: x.detach().to("cpu", torch.float64, non_blocking=True), 1638400),
    "large slice to the host": (rows, lambda x: torch.cat([x, x])[:, :90].detach().cpu(), 3112960),
}  # fmt: skip
# Tensors of 8 MiB [2, 64, 128, 128], which have no memory of the host in a trace.
COPIES = {
    "channels last": (host, lambda x: x.to("cuda", memory_format=LAST), 16777216, (1048576, 1, 8192, 64)),
    "cast on the host": (host, lambda x: x.to("cuda", HALF), 4194304, (1048576, 16384, 128, 1)),
    "cast on the device": (host, lambda x: x.to("cuda", HALF, non_blocking=True), 12582912, (1048576, 16384, 128, 1)),
    "cast on the host, channels last": (
        host, lambda x: x.to("cuda", HALF, memory_format=LAST), 8388608, (1048576, 1, 8192, 64),
    ),
    "cast on the device, channels last": (
        host, lambda x: x.to("cuda", HALF, non_blocking=True, memory_format=LAST), 12582912, (1048576, 1, 8192, 64),
    ),
    "half of the channels": (host, lambda x: x[:, ::2].to("cuda"), 4194304, (524288, 16384, 128, 1)),
    "channels last on the host": (host, lambda x: x.to(memory_format=LAST).to("cuda"), 8388608, (1048576, 1, 8192, 64)),
    "cast on the host, where channels are last": (
        host, lambda x: x.to(memory_format=LAST).to("cuda", HALF), 8388608, (1048576, 1, 8192, 64),
    ),
    "to the host, channels last": (brought, lambda x: x.to("cpu", memory_format=LAST), 0, (1048576, 1, 8192, 64)),
    "to the host, by position": (
        brought, lambda x: x.to("cpu", HALF, True, True, memory_format=LAST), 4194304, (1048576, 1, 8192, 64),
    ),
    "to the device, by position": (host, lambda x: x.to("cuda", HALF, False, True), 4194304, (1048576, 16384, 128, 1)),
    "to the host, cast there": (brought, lambda x: x.to("cpu", HALF), 0, (1048576, 16384, 128, 1)),
    "to the host, cast on the device": (
        brought, lambda x: x.to("cpu", HALF, non_blocking=True), 4194304, (1048576, 16384, 128, 1),
    ),
    "to the host, half of the channels, cast there": (
        brought, lambda x: x[:, ::2].to("cpu", HALF), 4194304, (524288, 16384, 128, 1),
    ),
    "to the host, turned": (
        brought, lambda x: x.transpose(0, 1).to("cpu", memory_format=LAST), 8388608, (32768, 1, 256, 2),
    ),
    "to the host, no longer channels last": (
        brought, lambda x: x.to(memory_format=LAST).to("cpu", memory_format=torch.contiguous_format), 16777216,
        (1048576, 16384, 128, 1),
    ),
}  # fmt: skip
# What a kernel holds of a gradient without memory of its own, as that of a sum.
OF_SUMS = {
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), 264704),
    "softmax": (lambda x: x.softmax(1), 787456),
    "resampling": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), 1311744),
    "pooling": (lambda x: F.avg_pool3d(x, 2), 295936),
    "adaptive pooling": (lambda x: F.adaptive_avg_pool2d(x, 16), 328704),
    "padding": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), 559104),
    "soft margins": (lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="none"), 1049600),
}  # fmt: skip


def _of_float8(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)


def _number() -> Tensor:
    return torch.ones((), device="cuda")


OF_OTHERS = {
    "random places": (lambda: torch.randperm(100_000, device="cuda"), 4834304),
    "few random places": (lambda: torch.randperm(5_000, device="cuda"), 192000),
    "boxes": (lambda: nms(torch.empty(256, 4, device="cuda"), torch.empty(256, device="cuda"), 0.5), 24064),
    "deformed convolution": (
        lambda: deform_conv2d(
            torch.empty(2, 64, 32, 32, device="cuda"), torch.empty(2, 18, 32, 32, device="cuda"),
            torch.empty(64, 64, 3, 3, device="cuda"), padding=1,
        ),
        40141824,
    ),
    "counts": (lambda: torch.bincount(torch.zeros(200, dtype=torch.long, device="cuda"), minlength=10), 3584),
    "draws": (lambda: torch.multinomial(torch.ones(300, device="cuda"), 40), 6144),
    "product of scaled float8": (
        lambda: torch._scaled_mm(
            _of_float8(256, 512), _of_float8(1024, 512).t(), scale_a=_number(), scale_b=_number(), out_dtype=HALF
        ),
        2229248,
    ),
}  # fmt: skip
STRIDES = {
    "x / 1.0": (turned, lambda x: x / 1.0, (64, 1, 2048, 64)),
    "zeros_like": (turned, torch.zeros_like, (64, 1, 2048, 64)),
    "advanced indexing": (turned, lambda x: x[:, torch.arange(8, device="cuda")], (8192, 1024, 32, 1)),
    "pixel_unshuffle, channels last": (last, lambda x: F.pixel_unshuffle(x, 2), (65536, 256, 16, 1)),
    "group norm of one sample, channels last": (
        lambda: last()[:1].contiguous(memory_format=LAST), lambda x: F.group_norm(x, 32), (65536, 1, 2048, 64),
    ),
}  # fmt: skip


@pytest.mark.skipif(torch.__version__ < "2.15", reason="the right values are those of PyTorch 2.15")
@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_those_of_cudas_kernels(name: str):
    make, operator, right = BYTES[name]
    assert traced(make, operator)[0] == right


@pytest.mark.skipif(torch.__version__ < "2.15", reason="the right values are those of PyTorch 2.15")
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_bytes_of_gradients_are_those_of_cudas_kernels(name: str):
    make, operator, right = WITH_GRADIENTS[name]
    assert traced(make, operator, trains=True)[0] == right


@pytest.mark.skipif(torch.__version__ < "2.15", reason="the right values are those of PyTorch 2.15")
@pytest.mark.parametrize("name", OF_SUMS)
def test_bytes_of_the_gradient_of_a_sum_are_those_of_cudas_kernels(name: str):
    operator, right = OF_SUMS[name]

    def summed(x: Tensor) -> Tensor:
        operator(x).sum().backward()
        return x.detach()

    assert traced(planes, summed, trains=True)[0] == right


@pytest.mark.skipif(torch.__version__ < "2.15", reason="the right values are those of PyTorch 2.15")
@pytest.mark.parametrize("name", OF_OTHERS)
def test_bytes_of_other_operators_are_those_of_cudas_kernels(name: str):
    operator, right = OF_OTHERS[name]
    assert traced(lambda: torch.empty(0, device="cuda"), lambda _: operator())[0] == right


@pytest.mark.parametrize("name", COPIES)
def test_copies_between_the_device_and_the_host(name: str):
    make, operator, *right = COPIES[name]
    assert [*traced(make, operator)] == right


@pytest.mark.parametrize("name", STRIDES)
def test_strides_are_those_of_cudas_kernels(name: str):
    if name.startswith("group norm") and torch.__version__ < "2.15":
        pytest.skip("its strides were compared with PyTorch 2.15 alone")
    make, operator, right = STRIDES[name]
    assert traced(make, operator)[1] == right


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_resampling_holds_its_result_alone_in_inference_mode(mode: str):
    def resample(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return F.interpolate(x, scale_factor=2.0, mode=mode)

    assert traced(planes, resample)[0] == 2 * 64 * 64 * 64 * 2  # the result [2, 64, 64, 64] in bfloat16: one kernel


def test_a_custom_operator_that_runs_its_fake_kernel_is_named():
    def setup():
        x = torch.empty(64, 64, device="cuda")
        return lambda: launch(x)

    uncounted = sizer.size_step(setup, gpu="a100-80gb").uncounted
    assert [text for text in uncounted if text.startswith(INSIDE)] == [f"{INSIDE}: sizer_tests::launch"]

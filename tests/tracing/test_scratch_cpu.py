"""What the CPU's kernels hold inside, one mechanism at a time: the arithmetic by hand, and the profiler's word for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, _prims_common, nn
from torch.utils.checkpoint import checkpoint

from sizer.architecture.blueprint import Blueprint
from sizer.tracing.cpu import onednn
from sizer.tracing.cpu.convolution import _Call
from sizer.tracing.cpu.onednn import Convolution
from sizer.tracing.device import Device
from sizer.tracing.meta import strides
from sizer.tracing.recorder import Recorder
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace
from tests.tracing.cpu_truth import measure_on_cpu, tape_bytes
from tests.tracing.test_mechanisms import blueprint


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- oneDNN's layouts, on AVX-512: blocks of 16 channels


def convolution(
    inputs: int, outputs: int, pixels: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> Convolution:
    """Two square images [inputs, pixels, pixels], padded by half the kernel; channels per group."""
    result = (pixels + 2 * (kernel // 2) - kernel) // stride + 1
    return Convolution(
        batch=2,
        groups=groups,
        inputs=inputs,
        outputs=outputs,
        image=(pixels, pixels),
        result=(result, result),
        kernel=(kernel, kernel),
        stride=(stride, stride),
        padding=(kernel // 2, kernel // 2),
        dilation=(1, 1),
    )


def test_every_operand_is_copied_to_blocks_of_channels() -> None:
    layout = onednn.forward(convolution(20, 24, 8, 3))
    # channels padded to 32: input and output 2*32*8*8*4, weight 32*32*3*3*4
    assert (layout.source, layout.weight, layout.result, layout.scratch) == (16384, 36864, 16384, 0)


def test_avx2_has_blocks_of_eight() -> None:
    layout = onednn.forward(replace(convolution(20, 24, 8, 3), simd=8))
    # 20 channels padded to 24: 2*24*8*8*4, 24*24*3*3*4
    assert (layout.source, layout.weight, layout.result) == (12288, 20736, 12288)


def test_few_input_channels_stay_as_they_are() -> None:
    layout = onednn.forward(convolution(3, 20, 8, 3))
    # the picture is read in place; weight 32*3*3*3*4, output 2*32*8*8*4
    assert (layout.source, layout.weight, layout.result) == (0, 3456, 16384)


def test_depthwise_pads_the_groups() -> None:
    layout = onednn.forward(convolution(1, 1, 8, 3, groups=20))
    # 2*32*8*8*4, weight 32*3*3*4
    assert (layout.source, layout.weight, layout.result) == (16384, 1152, 16384)


def test_groups_take_the_block_that_divides_them() -> None:
    # 8 channels a group: blocks of 8, nothing padded: 2*32*8*8*4, weight 4*8*8*3*3*4
    layout = onednn.forward(convolution(8, 8, 8, 3, groups=4))
    assert (layout.source, layout.weight, layout.result) == (16384, 9216, 16384)
    # 6 divide into no block: a matrix product over columns 6*3*3*8*8*4 (+ 128 to align), the output in its own layout
    layout = onednn.forward(convolution(6, 6, 8, 3, groups=4))
    assert (layout.source, layout.weight, layout.result, layout.scratch) == (0, 0, 12288, 13824 + 128)


def test_strided_kernels_of_one_pixel_copy_what_they_use() -> None:
    layout = onednn.forward(replace(convolution(32, 16, 8, 1, stride=2), result=(4, 4)))
    # one image's used pixels: 32*4*4*4, aligned by 128
    assert layout.scratch == 2048 + 128
    assert layout.source == 2 * 32 * 8 * 8 * 4


def test_strided_gradients_put_channels_last() -> None:
    layout = onednn.backward_data(convolution(32, 32, 8, 3, stride=2))
    # one pixel more below and to the right: 5*5*32 = 800 floats, in whole pages of 4096; a page of marks, 4 of addresses
    assert layout.is_last
    assert layout.scratch == 4096 * 4 + 4096 + 4 * 4096


def test_wide_depthwise_kernels_pad_every_group_where_channels_come_last() -> None:
    narrow, wide = (onednn.backward_weights_last(convolution(1, 1, 8, kernel, groups=32)).weight for kernel in (3, 7))
    # up to 3 pixels wide a kernel of its own, 32*3*3*4; beyond, 16 x 16 channels for every one of 32 groups: 32*256*7*7*4
    assert (narrow, wide) == (1152, 1605632)


def test_the_weights_gradient_by_a_matrix_product_books_bytes_as_floats() -> None:
    c = convolution(1, 1, 4, 5, groups=32)
    # weight 32*5*5*4 = 3200 bytes, booked as 3200 floats; columns 5*5*4*4*4; each aligned by 128
    assert onednn.backward_weights(c).scratch == 12800 + 128 + 1600 + 128


# --- whole modules against the profiler


def squared(factory: Callable[[], nn.Module], inputs: Tensor) -> Blueprint:
    """The sum of squares as loss: the gradient of a plain sum has no memory of its own, so that kernels copy it first."""
    return replace(blueprint(factory, inputs), loss=lambda module, example: module(*example.args).square().sum())


class Attend(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.project, self.dropout = nn.Linear(16, 48), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout).transpose(1, 2).flatten(2)


class Normalized(nn.Module):
    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.convolve, self.norm, self.trains = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), trains

    def forward(self, x: Tensor) -> Tensor:
        x, norm = self.convolve(x), self.norm
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=self.trains)


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Saving(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)


class Inferring(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return super().forward(x)


class Fitted(nn.Module):
    """A loss between a product and one half, times the product."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.project, self.loss = nn.Linear(16, 32), loss

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x).sigmoid()
        return x * self.loss(x, torch.full_like(x, 0.5))


class Last(nn.Sequential):
    """Channels last, as ConvNeXt's blocks have them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))


def images(*shape: int) -> Tensor:
    return torch.zeros(2, *shape)


TOKENS = torch.zeros(2, 12, dtype=torch.int64)
MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), images(16)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 4)), TOKENS),
    "attention": (Attend, images(40, 16)),
    "attention with dropout": (lambda: Attend(0.1), images(40, 16)),
    "convolution": (lambda: nn.Conv2d(20, 24, 3, padding=1), images(20, 12, 12)),
    "convolution of one pixel": (lambda: nn.Conv2d(20, 24, 1), images(20, 12, 12)),
    "strided convolution": (
        lambda: nn.Sequential(nn.Conv2d(20, 32, 3, 2, 1), nn.Conv2d(32, 8, 1, 2)),
        images(20, 12, 12),
    ),
    "depthwise convolution": (lambda: nn.Conv2d(20, 20, 5, padding=2, groups=20), images(20, 12, 12)),
    "dilated convolution": (lambda: nn.Conv2d(16, 16, 3, padding=2, dilation=2), images(16, 12, 12)),
    "convolution over time": (lambda: nn.Sequential(nn.Conv1d(16, 32, 5), nn.Conv1d(32, 8, 3, 2)), images(16, 40)),
    "convolution over films": (lambda: nn.Conv3d(16, 16, 3, padding=1), images(16, 4, 8, 8)),
    "transposed convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ConvTranspose2d(16, 8, 2, 2)),
        images(3, 12, 12),
    ),
    "channels last": (
        lambda: Last(nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.Conv2d(16, 32, 2, 2)),
        images(16, 12, 12),
    ),
    "batch norm": (lambda: Normalized(True), images(3, 12, 12)),
    "fixed batch norm": (lambda: Normalized(False), images(3, 12, 12)),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)), images(3, 12, 12)),
    "upsampling": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Upsample(scale_factor=2, mode="bilinear")),
        images(3, 12, 12),
    ),
    "shared weight": (lambda: Twice(16, 16), images(16)),
    "checkpointing": (lambda: Saving(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), images(16)),
}
LOSSES = F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy, F.huber_loss, F.l1_loss
MODULES |= {loss.__name__: (partial(Fitted, loss), images(16)) for loss in LOSSES}
CASES = [(name, "float32") for name in MODULES]
HALVES = ("shared weight", "convolution", "attention", "batch norm", "group norm")
CASES += [(name, "amp-bfloat16") for name in HALVES]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_bytes_equal_the_profilers(name: str, dtype: str) -> None:
    factory, inputs = MODULES[name]
    plan, work = squared(factory, inputs), Work(mode="training", dtype=dtype, optimizer="sgd")
    truth = measure_on_cpu(plan, work, batch=2)
    alive, peaks = tape_bytes(trace(plan, build(plan), work, batch=2, device=Device("cpu")))
    assert alive == {**truth.alive, "forward": truth.alive["forward"] - truth.saved_numbers}
    for phase, measured in truth.peaks.items():
        # a Python number is wrapped in 8 bytes and 4 more, which the trace does not see; every entry of oneDNN's scratchpads is
        # aligned by 128
        assert abs(peaks[phase] - measured) <= 192 + truth.saved_numbers, (
            f"{phase}: {peaks[phase] - measured} of {measured}"
        )


@pytest.mark.parametrize("name", ["linear", "convolution", "attention"])
def test_inference_mode_equals_the_profilers(name: str) -> None:
    factory, inputs = MODULES[name]
    plan, work = blueprint(lambda: Inferring(factory()), inputs), Work(mode="inference", dtype="float32")
    truth = measure_on_cpu(plan, work, batch=2)
    alive, peaks = tape_bytes(trace(plan, build(plan), work, batch=2, device=Device("cpu")))
    assert alive == truth.alive
    assert {phase: peaks[phase] for phase in truth.peaks} == pytest.approx(truth.peaks, abs=32)


# --- in between


def steps(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[int, int]:
    """(most bytes at a time, bytes left) of an operator on the CPU by the rules, its arguments aside."""
    recorder = Recorder(Device("cpu"))
    placed = [recorder.place(t) for t in tensors]
    start = len(recorder.log.order)
    with recorder:
        out = function(*placed)
    now = most = 0
    for event in recorder.log.order[start:]:
        now += recorder.log.sizes[event] if event >= 0 else -recorder.log.sizes[~event]
        most = max(most, now)
    del out
    return most, now


def test_the_mean_of_half_precision_is_taken_in_float32() -> None:
    # input in float32 4*16*4 and sums 4*4, then the result 4*2
    assert steps(lambda x: x.mean(1), torch.zeros(4, 16, dtype=torch.bfloat16)) == (256 + 16, 8)


def test_operands_of_two_dtypes_meet_in_a_copy() -> None:
    # the half in float32 64*4 beside the result 64*4
    assert steps(torch.add, torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)) == (512, 256)


def test_flash_attention_holds_a_block_of_weights() -> None:
    # output 2*2*40*8*4 and logsumexp 2*2*40*4; a block of 32 rows x 40 columns, two numbers a row, the rows' output 32*8
    left = 5120 + 640
    block = (32 * 40 + 2 * 32 + 32 * 8) * 4
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    recorded = steps(lambda x: attend(x, x, x)[0], torch.zeros(2, 2, 40, 8))
    assert recorded[0] == left + block


def test_one_thread_leaves_small_batches_of_one_pixel_kernels_to_pytorch() -> None:
    weight = torch.zeros(8, 4, 1, 1)
    device = Device("cpu")
    for batch, held in ((2, False), (16, True)):
        call = _Call(
            torch.zeros(batch, 4, 6, 6), weight, ([1, 1], [0, 0], [1, 1], False, [0, 0], 1), (batch, 8, 6, 6), False
        )
        assert call.uses_library() is held
    assert device.changes_at is None
    steps_of = Recorder(device)
    image = steps_of.place(torch.zeros(2, 4, 6, 6))
    with steps_of:
        F.conv2d(image, steps_of.place(weight))
    assert device.changes_at == 16


def test_formats_are_those_that_pytorch_suggests() -> None:
    sizes = [*product((0, 1, 2, 3), repeat=4), *product((1, 2), repeat=5), (2, 3), ()]
    tensors = [torch.empty(size, device="meta").permute(order) for size in sizes for order in permutations(range(len(size)))]
    tensors += [torch.empty(2, 1, 1, 4, device="meta").expand(2, 3, 1, 4), torch.empty(4, 6, 8, 2, device="meta")[::2, 1::3, :5]]
    found = [strides.suggest_memory_format(tensor) for tensor in tensors]
    assert found == [*map(_prims_common.suggest_memory_format, tensors)]
    assert {*found} == {torch.contiguous_format, torch.channels_last, torch.channels_last_3d}


def test_results_keep_channels_last() -> None:
    last = torch.empty(2, 8, 4, 4, device="meta").to(memory_format=torch.channels_last)
    weight = torch.empty(8, 8, 3, 3, device="meta")
    out = torch.empty(2, 8, 4, 4, device="meta")
    assert strides.convolution((last, weight), out).is_contiguous(memory_format=torch.channels_last)
    assert strides.convolution((out, weight), out) is out

"""What memory is made of, one mechanism at a time: tiny modules whose bytes can be added up by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sizer.allocator.allocator import replay
from sizer.allocator.timeline import live_by_category
from sizer.architecture.blueprint import Blueprint, Example
from sizer.base.errors import TraceError
from sizer.base.versions import installed_version
from sizer.estimating.custom import size_step
from sizer.tape.tape import CATEGORIES, Tape
from sizer.tracing.cuda.attention import choose
from sizer.tracing.cuda.by_capability import blas_of
from sizer.tracing.device import Device
from sizer.tracing.meta import in_place
from sizer.tracing.meta.attention import Attention
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace
from tests.tracing.cpu_truth import measure_on_cpu, tape_bytes

AMPERE, HOPPER = (8, 0), (9, 0)
WORKSPACE = 8_519_680  # 4096 KiB * 2 + 16 KiB * 8


def device(kind: str = "cuda", capability: tuple[int, int] = AMPERE) -> Device:
    """A device by the rules of PyTorch 2.14, where cuBLAS keeps its workspaces to the end."""
    return Device(kind, capability if kind == "cuda" else None, version=(2, 14))


def blueprint(factory: Callable[[], nn.Module], *inputs: Tensor) -> Blueprint:
    """The sum of the module's output as loss."""
    return Blueprint(
        name="tiny",
        class_name="tiny",
        build=factory,
        example=lambda batch, training: Example(args=inputs),
        loss=lambda module, example: module(*example.args).sum(),
        predict=lambda module, example: module(*example.args),
    )


def run(factory: Callable[[], nn.Module], *inputs: Tensor, on: Device | None = None, **work: Any) -> Tape:
    """The tape of two steps."""
    plan, mode = blueprint(factory, *inputs), {"mode": "training", "dtype": "float32", **work}
    return trace(plan, build(plan), Work(**mode), batch=2, device=on or device()).validate()


def alive(tape: Tape, phase: str) -> dict[str, int]:
    """Bytes by category at a phase's end, those that are there."""
    return {category: size for category, size in live_by_category(tape)[phase].items() if size}


def peaks(tape: Tape, category: str) -> dict[str, int]:
    """The most bytes of one category alive at a time, by phase."""
    index, now, position, found = CATEGORIES.index(category), 0, 0, {}
    for end, phase in tape.marks:
        most = now
        for event in tape.order[position:end]:
            block = event if event >= 0 else ~event
            if tape.categories[block] == index:
                now += tape.sizes[block] if event >= 0 else -tape.sizes[block]
                most = max(most, now)
        position, found[phase] = end, most
    return found


def blocks(tape: Tape, op: str, size: int) -> list[int]:
    """The blocks of a size that an operator made."""
    return [i for i, s in enumerate(tape.sizes) if s == size and tape.op_names[tape.ops[i]] == op]


# --- weights, gradients, optimizer state, activations


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))


def test_training_step_of_linear_layers() -> None:
    tape = run(Mlp, torch.zeros(2, 8))
    # (8*4 + 4 + 4*3 + 3) elements * 4 bytes = 51 * 4
    weights = 204
    assert alive(tape, "load") == {"parameter": weights}
    # input 2*8*4; output of ReLU 2*4*4 (the first layer's output is free) and the loss 4; one cuBLAS workspace
    forward = {"parameter": weights, "input": 64, "activation": 32 + 4, "workspace": WORKSPACE}
    assert alive(tape, "forward") == forward
    # the graph and the loss are gone, a gradient for each weight, autograd's thread has a workspace too
    backward = {"parameter": weights, "input": 64, "gradient": weights, "workspace": 2 * WORKSPACE}
    assert alive(tape, "backward") == backward
    # AdamW: two moments (the step counters stay on the CPU)
    assert alive(tape, "optimizer") == {**backward, "optimizer state": 2 * weights}
    # zero_grad has dropped the gradients
    after = {name: size for name, size in backward.items() if name != "gradient"}
    assert alive(tape, "step2") == {**after, "optimizer state": 2 * weights}


def test_half_precision_halves_weights_and_activations() -> None:
    tape = run(Mlp, torch.zeros(2, 8), dtype="bfloat16")
    assert alive(tape, "load") == {"parameter": 102}  # 51 * 2
    assert alive(tape, "forward") == {"parameter": 102, "input": 32, "activation": 16 + 2, "workspace": WORKSPACE}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def test_tied_weights_count_once() -> None:
    tape = run(Tied, torch.zeros(2, 3, dtype=torch.int64))
    assert alive(tape, "load") == {"parameter": 320}  # 10*8*4
    assert alive(tape, "backward")["gradient"] == 320
    assert alive(tape, "optimizer")["optimizer state"] == 640


def test_embedding_keeps_indices_and_makes_a_dense_gradient() -> None:
    class Squared(nn.Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens).pow(2)

    tape = run(lambda: Squared(10, 8), torch.zeros(2, 3, dtype=torch.int64))
    # indices 2*3*8 are the input itself; pow saves the embeddings 2*3*8*4; the loss 4; no matrix product, no workspace
    assert alive(tape, "forward") == {"parameter": 320, "input": 48, "activation": 192 + 4}
    assert alive(tape, "backward") == {"parameter": 320, "input": 48, "gradient": 320}


def test_inference_keeps_the_output_alone() -> None:
    tape = run(Mlp, torch.zeros(2, 8), mode="inference")
    # output 2*3*4; one thread, one workspace
    expected = {"parameter": 204, "input": 64, "activation": 24, "workspace": WORKSPACE}
    assert alive(tape, "forward") == expected
    assert alive(tape, "step2") == {name: size for name, size in expected.items() if name != "activation"}


def test_inference_mode_within_a_step_of_ones_own() -> None:
    def setup() -> Callable[[], None]:
        module, images = Mlp().cuda().eval(), torch.zeros(2, 8, device="cuda")

        def step() -> None:
            with torch.inference_mode():
                module(images)

        return step

    estimate = size_step(setup).estimates[0]
    assert (estimate.weights_bytes, estimate.gradients_bytes, estimate.optimizer_bytes) == (204, 0, 0)
    # 4 weights and the input, 512 bytes each, and what cuBLAS keeps
    blas = blas_of(AMPERE, installed_version())
    kept = blas.size + (blas.lt_size or 0) if blas.kept else 0
    assert estimate.phases[-1].allocated_bytes == 4 * 512 + 512 + kept
    # at the peak a layer's input and output, and where nothing is kept the 1 MiB that cuBLASLt works in
    assert estimate.peak_allocated_bytes == 4 * 512 + 512 + (kept or 2**20) + 2 * 512


# --- operators that save something of their own


def test_dropout_saves_bytes_on_cuda_and_floats_on_cpu() -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    # mask of 2*8 elements: 1 byte each on CUDA, 4 on the CPU; and the loss 4
    assert alive(run(factory, torch.zeros(2, 8)), "forward")["activation"] == 16 + 4
    assert alive(run(factory, torch.zeros(2, 8), on=device("cpu")), "forward")["activation"] == 64 + 4


class Normalized(nn.Module):
    def __init__(self, training: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.how = nn.Linear(4, 4), nn.BatchNorm1d(3), training

    def forward(self, x: Tensor) -> Tensor:
        x, norm = self.linear(x), self.norm
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=self.how)


def test_batch_norm_keeps_statistics_when_it_trains() -> None:
    trained, frozen = (run(lambda how=how: Normalized(how), torch.zeros(2, 3, 4)) for how in (True, False))
    # running mean and variance 3*4 each, the number of batches 8
    assert alive(trained, "load")["buffer"] == 32
    # its input 2*3*4*4, mean and inverse deviation 3*4 each, the loss 4; with fixed statistics the input and the loss
    assert alive(trained, "forward")["activation"] == 96 + 24 + 4
    assert alive(frozen, "forward")["activation"] == 96 + 4


def test_batch_norm_in_bfloat16_keeps_float32_statistics() -> None:
    tape = run(lambda: Normalized(True), torch.zeros(2, 3, 4), dtype="bfloat16")
    assert alive(tape, "forward")["activation"] == 48 + 24 + 2


# --- attention


def tensor(shape: tuple[int, ...], dtype: torch.dtype, trains: bool) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trains)


def question(
    *, heads: int = 4, key_heads: int = 4, queries: int = 16, keys: int = 16, head: int = 64, value_head: int | None = None,
    dtype: torch.dtype = torch.bfloat16, mask: bool = False, dropout: float = 0.0, causal: bool = False, trains: bool = True,
) -> Attention:  # fmt: skip
    """Attention over a batch of 2."""
    key = (2, key_heads, keys)
    return Attention(
        query=tensor((2, heads, queries, head), dtype, trains),
        key=tensor((*key, head), dtype, trains),
        value=tensor((*key, value_head or head), dtype, trains),
        mask=torch.empty(2, 1, queries, keys, dtype=torch.bool, device="meta") if mask else None,
        dropout=dropout,
        is_causal=causal,
        scale=None,
        grouped=heads != key_heads,
    )


FLOAT32, FLOAT16 = {"dtype": torch.float32}, {"dtype": torch.float16}
CHOICES = [
    (AMPERE, {}, "flash"),
    (AMPERE, FLOAT16, "flash"),
    (AMPERE, FLOAT32, "efficient"),  # flash takes halves only
    (AMPERE, {"dtype": torch.float64}, "math"),
    (AMPERE, {"mask": True}, "efficient"),  # flash takes no mask
    (AMPERE, {"mask": True, **FLOAT32}, "efficient"),
    (AMPERE, {"head": 256}, "flash"),
    (AMPERE, {"head": 257}, "math"),  # too wide for flash, not a multiple of 8 for efficient
    (AMPERE, {"head": 264}, "efficient"),  # 33*8
    (AMPERE, {"head": 60}, "flash"),  # padded to 64
    (AMPERE, {"head": 60, "mask": True}, "math"),  # 60 is no multiple of 8
    (AMPERE, {"head": 60, **FLOAT32}, "efficient"),  # but of 4
    (AMPERE, {"value_head": 32}, "efficient"),  # flash wants the same width everywhere
    (AMPERE, {"dropout": 0.1}, "flash"),
    (AMPERE, {"causal": True}, "flash"),
    (AMPERE, {"causal": True, "queries": 8}, "efficient"),  # not square
    (AMPERE, {"key_heads": 2}, "flash"),
    (AMPERE, {"key_heads": 2, **FLOAT32}, "efficient"),
    (AMPERE, {"key_heads": 3}, "math"),  # 4 heads over 3
    (AMPERE, {"keys": 0}, "math"),
    ((7, 0), {}, "math"),  # a V100 has no kernel for bfloat16
    ((7, 0), FLOAT16, "efficient"),
    ((7, 0), FLOAT32, "efficient"),
    ((7, 0), {"head": 60, **FLOAT16}, "math"),
    ((7, 5), FLOAT16, "efficient"),
    ((8, 9), {"head": 192}, "flash"),
    ((8, 9), {"head": 200}, "efficient"),  # flash's backward pass does not fit there
    ((8, 9), {"head": 200, "trains": False}, "flash"),
    ((8, 9), {"head": 232}, "flash"),
    ((8, 9), {"head": 232, "dropout": 0.1}, "efficient"),
    (HOPPER, {}, "cudnn"),
    (HOPPER, {"mask": True}, "cudnn"),
    (HOPPER, FLOAT32, "efficient"),
    (HOPPER, {"head": 136}, "flash"),  # wider than 128
    (HOPPER, {"head": 192, "value_head": 128}, "cudnn"),
    (HOPPER, {"dropout": 0.125}, "cudnn"),
    (HOPPER, {"keys": 1}, "flash"),
    (HOPPER, {"causal": True, "queries": 8}, "cudnn"),
    ((10, 0), {}, "cudnn"),
    ((12, 0), {}, "flash"),
]


@pytest.mark.parametrize(("capability", "asked", "backend"), CHOICES, ids=str)
def test_attention_backend(capability: tuple[int, int], asked: dict[str, Any], backend: str) -> None:
    assert choose(device(capability=capability), question(**asked)) == backend


@pytest.mark.parametrize(("version", "backend"), [((2, 11), "cudnn"), ((2, 12), "flash")], ids=str)
def test_cudnn_takes_any_dropout_before_2_12(version: tuple[int, int], backend: str) -> None:
    assert choose(Device("cuda", HOPPER, version=version), question(dropout=0.1)) == backend


class Attend(nn.Module):
    """Self-attention of 2 heads of 8 over [2, 4, 16], query, key and value being the same projection."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.project, self.dropout = nn.Linear(16, 16, bias=False), dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)


def test_attention_by_flash_saves_no_weights_of_attention() -> None:
    on = device()
    tape = run(Attend, torch.zeros(2, 4, 16), dtype="bfloat16", on=on)
    # projection 2*4*16*2 and output likewise, logsumexp [2, 2, 4] in float32, the loss 2, random state [2] and [] of 8 bytes
    assert alive(tape, "forward")["activation"] == 256 + 256 + 64 + 2 + 16 + 8
    assert [*map(str, on.kernels())] == ["attention: flash (bfloat16, no mask, head dim 8)"]


def test_attention_by_math_saves_them() -> None:
    on = device(capability=(7, 0))
    tape = run(Attend, torch.zeros(2, 4, 16), dtype="bfloat16", on=on)
    # in float32: scaled query and scaled key 2*4*16*4 each, softmax [2, 2, 4, 4], value; and the loss 2
    assert alive(tape, "forward")["activation"] == 512 + 512 + 256 + 512 + 2
    assert [*map(str, on.kernels())] == [
        "attention: math (bfloat16, no mask, head dim 8; not flash: it needs capability 8.0 to 12.1; "
        "not efficient: it has no kernel for this dtype here)"
    ]


# --- autocast


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x))


def test_autocast_casts_a_shared_weight_once_and_drops_it_at_the_end() -> None:
    tape = run(Twice, torch.zeros(2, 8), mode="inference", dtype="amp-bfloat16")
    copies = blocks(tape, "aten._to_copy.default", 128)  # 8*8*2
    assert len(copies) == 2  # one for each of the two passes
    order, products = list(tape.order), blocks(tape, "aten.mm.default", 32)  # 2*8*2
    assert len(products) == 4
    forward_ends = tape.marks[1][0]
    assert order.index(copies[0]) < order.index(products[0])
    assert order.index(products[1]) < order.index(~copies[0]) < forward_ends
    # what is left: the float32 weight 8*8*4, the input 2*8*4, the output in bfloat16
    assert alive(tape, "forward") == {"parameter": 256, "input": 64, "activation": 32, "workspace": WORKSPACE}


def test_autograd_keeps_the_cast_weight_that_it_saved() -> None:
    tape = run(Twice, torch.zeros(2, 8), dtype="amp-bfloat16")
    assert len(blocks(tape, "aten._to_copy.default", 128)) == 2  # one for each of the two steps
    # saved: the weight's copy 128, the input's copy 2*8*2, the first output 2*8*2; the loss (a sum, in float32) 4
    assert alive(tape, "forward")["activation"] == 128 + 32 + 32 + 4
    assert alive(tape, "backward")["gradient"] == 256


# --- libraries


@pytest.mark.parametrize(
    ("capability", "size"), [((7, 0), WORKSPACE), (AMPERE, WORKSPACE), (HOPPER, 2**25), ((10, 0), 2**25)]
)
@pytest.mark.parametrize(("mode", "threads"), [("training", 2), ("inference", 1)])
def test_cublas_workspace_of_each_thread(capability: tuple[int, int], size: int, mode: str, threads: int) -> None:
    tape = run(Mlp, torch.zeros(2, 8), mode=mode, on=device(capability=capability))
    released = {~event for event in tape.order if event < 0}
    kept = [i for i, c in enumerate(tape.categories) if CATEGORIES[c] == "workspace" and i not in released]
    assert [tape.sizes[i] for i in kept] == [size] * threads


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_no_cublas_elsewhere(kind: str) -> None:
    assert "workspace" not in alive(run(Mlp, torch.zeros(2, 8), on=device(kind)), "step2")


# --- optimizers


def four_layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])


LAYER = 1024  # 16*16*4
WEIGHTS = 4 * LAYER


@pytest.mark.parametrize(
    ("optimizer", "implementation", "state", "temporary"),
    [
        # foreach: the square root of every second moment at once
        ("adamw", None, 2 * WEIGHTS, WEIGHTS),
        ("adamw", "foreach", 2 * WEIGHTS, WEIGHTS),
        # one parameter after the other: square root, its quotient by the bias correction, and the previous parameter's
        # quotient, to which the loop's variable still holds on
        ("adamw", "loop", 2 * WEIGHTS, 3 * LAYER),
        # fused: nothing, but every step counter is a tensor of 4 bytes on the device
        ("adamw", "fused", 2 * WEIGHTS + 4 * 4, 0),
        ("adam", None, 2 * WEIGHTS, WEIGHTS),
        ("sgd", None, 0, 0),
        ("sgd-momentum", None, WEIGHTS, 0),
        ("none", None, 0, 0),
    ],
)
def test_optimizer(optimizer: str, implementation: str | None, state: int, temporary: int) -> None:
    tape = run(four_layers, torch.zeros(2, 16), optimizer=optimizer, optimizer_impl=implementation)
    after = alive(tape, "optimizer")
    assert after.get("optimizer state", 0) == state
    assert after["gradient"] == WEIGHTS  # until zero_grad, also where nothing steps
    assert peaks(tape, "temporary")["optimizer"] == temporary
    assert "gradient" not in alive(tape, "step2")
    assert alive(tape, "step2").get("optimizer state", 0) == state


# --- gradient checkpointing


class Block(nn.Module):
    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.layers, self.saves = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), saves

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False) if self.saves else self.layers(x)


def test_checkpointing_keeps_only_the_inputs_of_its_blocks() -> None:
    plain, saving = (run(lambda s=s: nn.Sequential(Block(s), Block(s)), torch.zeros(2, 8)) for s in (False, True))
    # two hidden tensors 2*32*4 after the ReLU, what is between the blocks 2*8*4, the loss 4
    assert alive(plain, "forward")["activation"] == 2 * 256 + 64 + 4
    # the first block's input is the input itself
    assert alive(saving, "forward")["activation"] == 64 + 4
    for category in ("parameter", "gradient"):
        assert alive(saving, "backward")[category] == alive(plain, "backward")[category]


def test_checkpointing_computes_again_under_autocast() -> None:
    tape = run(lambda: Block(True), torch.zeros(2, 8), dtype="amp-bfloat16")
    # hidden 2*32*2, in the forward pass and again in the backward pass of both steps; never 2*32*4
    assert len(blocks(tape, "aten.addmm.default", 128)) == 4
    assert not blocks(tape, "aten.addmm.default", 256)


# --- invariants

CASES = {
    "mlp": (Mlp, (torch.zeros(2, 8),)),
    "tied": (Tied, (torch.zeros(2, 3, dtype=torch.int64),)),
    "attention": (Attend, (torch.zeros(2, 4, 16),)),
    "batch norm": (lambda: Normalized(True), (torch.zeros(2, 3, 4),)),
    "checkpoint": (lambda: Block(True), (torch.zeros(2, 8),)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "amp-float16"])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_invariants_at_every_event(case: str, dtype: str, mode: str) -> None:
    factory, inputs = CASES[case]
    tape = run(factory, *inputs, dtype=dtype, mode=mode)
    total, by_category = 0, dict.fromkeys(CATEGORIES, 0)
    for event in tape.order:
        block = event if event >= 0 else ~event
        size = tape.sizes[block] if event >= 0 else -tape.sizes[block]
        total += size
        by_category[CATEGORIES[tape.categories[block]]] += size
        assert min(by_category.values()) >= 0
        assert sum(by_category.values()) == total
    weights = alive(tape, "load")["parameter"]
    for _, phase in tape.marks:
        assert alive(tape, phase)["parameter"] == weights
    timeline = replay(tape, backend="cuda")
    assert sum(timeline.at_peak.values()) == timeline.peak_allocated_bytes >= timeline.peak_requested_bytes >= weights
    for point in timeline.curve:
        assert min(point.by_category) >= 0


class Hot(nn.Module):
    """Vectors of 1000 classes for 300 numbers, in a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.Identity()
        self.inner.forward = lambda numbers: F.one_hot(numbers, 1000).sum()

    def forward(self, numbers: Tensor) -> Tensor:
        return self.scale * self.inner(numbers)


def test_one_hot_writes_into_zeros() -> None:
    numbers = torch.arange(300)
    tape = run(Hot, numbers)
    # 300 * 1000 * 8 bytes of zeros, no comparison of 300 * 1000 * 1 bytes beside them as on meta
    assert peaks(tape, "temporary")["forward"] == 2_400_000
    plan, work = blueprint(Hot, numbers), Work(mode="training", dtype="float32", optimizer="sgd")
    truth = measure_on_cpu(plan, work, batch=2)
    ours = tape_bytes(trace(plan, build(plan), work, batch=2, device=device("cpu")))[1]["forward"]
    # the smallest and the largest class, two numbers of 8 bytes, live on or not by what ran before in this process
    assert 0 <= truth.peaks["forward"] - ours <= 16


class Failing(nn.Module):
    """Fails in `parts.1`, whatever its first part has caught before."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(5, 4)])

    def forward(self, x: Tensor) -> Tensor:
        with suppress(RuntimeError):
            self.parts[0](x.new_zeros(1, 7))
        return self.parts[1](self.parts[0](x))


def test_a_failure_names_the_module_whose_forward_raised_it() -> None:
    with pytest.raises(TraceError, match=r"RuntimeError in parts\.1 at aten\.addmm\.default: "):
        run(Failing, torch.zeros(2, 4))


def test_a_failure_names_the_line_of_the_models_own_code() -> None:
    line = Failing.forward.__code__.co_firstlineno + 3
    with pytest.raises(TraceError, match=rf"\(test_mechanisms\.py:{line}\)$"):
        run(Failing, torch.zeros(2, 4))


class Caching(nn.Module):
    """Makes a table in its first forward and keeps it, in the dtype that its weights have then."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.project = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
        self.table: Tensor | None = None
        self.seen = nn.Buffer(torch.zeros(4))
        self.prepared = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.prepared:  # as transformers does with the hooks that collect outputs
            self.prepared = True
            self.project.register_forward_hook(lambda module, args, output: output[:, 1:])
        if self.table is None:
            self.table = self.scale.detach() * 2
            self.seen = self.seen + self.table
        return self.project(x * self.table * self.seen)


def test_a_trace_finds_nothing_that_an_earlier_one_left_in_the_module() -> None:
    plan = blueprint(Caching, torch.zeros(2, 4))
    module = build(plan)
    for dtype, table_bytes in (("float32", 16), ("bfloat16", 8), ("bfloat16", 8)):  # 4 elements
        tape = trace(plan, module, Work(mode="training", dtype=dtype), batch=2, device=device())
        first = next(block for block, op in enumerate(tape.ops) if tape.op_names[op] == "aten.mul.Tensor")
        assert tape.sizes[first] == table_bytes
        assert module.table is None
        assert len(module.project._forward_hooks) == 1


def test_a_reason_of_our_own_is_passed_on_as_it_is() -> None:
    def refuse(module: nn.Module, example: Example) -> Tensor:
        raise TraceError("nothing to train")

    plan = replace(blueprint(Mlp, torch.zeros(2, 8)), loss=refuse)
    with pytest.raises(TraceError, match=r"^nothing to train$"):
        trace(plan, build(plan), Work(mode="training", dtype="float32"), batch=2, device=device())


# --- the observer's effect, undone: against PyTorch's own profiler


class Shared(nn.Module):
    """Gradients of x [2, 3, 8] come from four places, those of the weight [10, 8] from three."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = torch.tanh(x) * torch.sigmoid(x) + torch.exp(x) * torch.cos(x)
        return torch.tanh(x @ self.embed.weight.t()) * torch.sigmoid(torch.sin(x) @ self.embed.weight.t())


class Fanned(nn.Embedding):
    """Three gradients of x [2, 3, 8] meet and nothing else is there."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        return torch.cat([-x, -x, -x])


class Negated(torch.autograd.Function):
    """A backward pass written in Python adds two tensors that it alone has: to a third one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        opposite = -gradient
        return opposite + torch.exp(gradient)


class Written(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return Negated.apply(super().forward(tokens))


TOKENS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    "factory",
    [Tied, Shared, lambda: Fanned(10, 8), lambda: Written(10, 8)],
    ids=["tied", "shared", "fanned", "written in Python"],
)
def test_gradients_that_meet_take_the_bytes_that_the_profiler_saw(factory: Callable[[], nn.Module]) -> None:
    plan, work = blueprint(factory, TOKENS), Work(mode="training", dtype="float32", optimizer="sgd")
    truth = measure_on_cpu(plan, work, batch=2)
    live, most = tape_bytes(trace(plan, build(plan), work, batch=2, device=device("cpu")))
    assert live == {**truth.alive, "forward": truth.alive["forward"] - truth.saved_numbers}
    assert most["backward"] == truth.peaks["backward"]


def test_without_undoing_the_observer_the_peak_would_be_higher(monkeypatch: pytest.MonkeyPatch) -> None:
    def factory() -> nn.Module:
        return Fanned(10, 8)

    # the gradient of the loss 4, two gradients of x 2*3*8*4 each, the second added to the first
    assert peaks(run(factory, TOKENS), "temporary")["backward"] == 4 + 2 * 192
    monkeypatch.setattr(in_place, "in_backward", lambda: False)
    # two gradients of x and their sum
    assert peaks(run(factory, TOKENS), "temporary")["backward"] == 4 + 3 * 192

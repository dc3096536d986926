"""CUDA's mechanisms one at a time: which kernel, and what it holds inside, added up by hand; shapes are in the comments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sizer.catalogue.gpus import GPUS
from sizer.tape.affine import fit_affine
from sizer.tape.tape import CATEGORIES, Tape
from sizer.tracing.cuda.attention import CONDITIONS, choose, order, refusal
from sizer.tracing.cuda.by_capability import DEFAULT_WORKSPACE, LARGE_WORKSPACE, LT_WORKSPACE, blas_of
from sizer.tracing.cuda.by_hardware import NORM, norm_block
from sizer.tracing.cuda.cublas import needs, uses_lt
from sizer.tracing.cuda.recurrent import reserve_bytes
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.device_rules import rules_for
from sizer.tracing.meta.attention import Attention
from sizer.tracing.operator_tables import operator
from tests.tracing.test_mechanisms import FLOAT16, FLOAT32, Attend, Mlp, alive, peaks, question, run

VOLTA, TURING, AMPERE, ADA, HOPPER, BLACKWELL = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)
HALF, FLOAT = torch.bfloat16, torch.float32


def cuda(capability: tuple[int, int] = AMPERE, version: tuple[int, int] = (2, 15)) -> Device:
    return Device("cuda", capability, version=version)


def held(tape: Tape, op: str) -> list[list[int]]:
    """The workspaces of an operator, those that were alive together in one list, in order."""
    workspace, together, alive_now = CATEGORIES.index("workspace"), [], 0
    for event in tape.order:
        block = event if event >= 0 else ~event
        if tape.categories[block] != workspace or tape.op_names[tape.ops[block]] != op:
            continue
        if event >= 0:
            if not alive_now:
                together.append([])
            together[-1].append(tape.sizes[block])
        alive_now += 1 if event >= 0 else -1
    return together


def held_sizes(tape: Tape, op: str) -> list[int]:
    """The workspaces of an operator in the order in which they begin."""
    workspace = CATEGORIES.index("workspace")
    return [
        tape.sizes[block]
        for block in tape.order
        if block >= 0 and tape.categories[block] == workspace and tape.op_names[tape.ops[block]] == op
    ]


class Calls(nn.Module):
    """One call between a weight that wants a gradient and the sum of the output."""

    def __init__(self, call: Callable[[Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.empty(shape)), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.weight).pow(2)


def call(function: Callable[[Tensor], Tensor], *shape: int, on: Device | None = None, dtype: str = "float32") -> Tape:
    """Two training steps without optimizer over `function(weight [shape])`."""
    return run(lambda: Calls(function, *shape), torch.zeros(1), on=on or cuda(), dtype=dtype, optimizer="none")


# --- cuBLAS and cuBLASLt, by version and capability

BLAS = [
    ((2, 6), AMPERE, DEFAULT_WORKSPACE, LT_WORKSPACE, True),
    ((2, 6), HOPPER, LARGE_WORKSPACE, LT_WORKSPACE, True),
    ((2, 11), AMPERE, DEFAULT_WORKSPACE, LT_WORKSPACE, True),
    ((2, 11), HOPPER, LARGE_WORKSPACE, LT_WORKSPACE, True),
    ((2, 11), BLACKWELL, DEFAULT_WORKSPACE, LT_WORKSPACE, True),  # 9.0 alone took more
    ((2, 13), AMPERE, DEFAULT_WORKSPACE, None, True),
    ((2, 13), (12, 0), LARGE_WORKSPACE, None, True),
    ((2, 15), AMPERE, DEFAULT_WORKSPACE, LT_WORKSPACE, False),
    ((2, 15), BLACKWELL, LARGE_WORKSPACE, LT_WORKSPACE, False),
]


@pytest.mark.parametrize(("version", "capability", "size", "lt_size", "kept"), BLAS, ids=str)
def test_workspaces_of_cublas(version, capability, size, lt_size, kept) -> None:
    blas = blas_of(capability, version)
    assert (blas.size, blas.lt_size, blas.kept) == (size, lt_size, kept)


# 8,519,680 = 4096 KiB * 2 + 16 KiB * 8; a linear layer's bias goes to cuBLASLt
KEPT = [((2, 6), 2 * 8_519_680), ((2, 11), 2 * 8_519_680 + 2**20), ((2, 13), 2 * 8_519_680), ((2, 15), 0)]


@pytest.mark.parametrize(("version", "kept"), KEPT, ids=str)
def test_what_cublas_keeps_after_a_training_step(version: tuple[int, int], kept: int) -> None:
    tape = run(Mlp, torch.zeros(2, 8), on=cuda(version=version))
    assert alive(tape, "optimizer").get("workspace", 0) == kept


def test_in_2_6_cublaslt_has_its_own_for_each_call() -> None:
    for capability, kept in ((AMPERE, 8_519_680), (HOPPER, 32 * 2**20)):
        tape = run(Mlp, torch.zeros(2, 8), on=cuda(capability, (2, 6)), mode="inference")
        # two layers with a bias, two passes, 1 MiB each; beside the first the handle's workspace begins, which stays
        assert held_sizes(tape, "aten.addmm.default") == [2**20, kept, 2**20, 2**20, 2**20]
        assert alive(tape, "forward")["workspace"] == kept


def test_since_2_15_each_call_has_its_own() -> None:
    tape = run(Mlp, torch.zeros(2, 8), on=cuda(), mode="inference")
    # two layers with a bias, two passes, 1 MiB each; nothing of it stays
    assert held(tape, "aten.addmm.default") == [[2**20]] * 4
    assert "workspace" not in alive(tape, "forward")


def test_an_empty_product_needs_no_workspace() -> None:
    tape = run(lambda: nn.Linear(8, 4, bias=False), torch.zeros(0, 8), on=cuda(), mode="inference")
    assert held(tape, "aten.mm.default") == []


def meta(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("bias", "first", "second", "light"),
    [
        (meta(3), meta(2, 4), meta(4, 3), True),
        (meta(2, 3), meta(2, 4), meta(4, 3), False),  # a matrix is no bias
        (meta(1), meta(2, 4), meta(4, 3), False),  # one number for all columns
        (meta(3), meta(1, 4), meta(4, 3), True),  # a single row
        (meta(1, 3), meta(2, 4), meta(4, 3), True),  # a bias of one row
        (meta(3), meta(1, 1), meta(1, 3), False),
        (meta(3), meta(2, 1), meta(1, 3), False),
        (meta(3, dtype=torch.int64), meta(2, 4, dtype=torch.int64), meta(4, 3, dtype=torch.int64), False),
        (meta(6)[::2], meta(2, 4), meta(4, 3), False),
    ],
)
def test_which_products_go_to_cublaslt(bias: Tensor, first: Tensor, second: Tensor, light: bool) -> None:
    assert uses_lt(bias, first, second) == light


# what PyTorch 2.15's own code takes over the null driver
@pytest.mark.parametrize(
    ("func", "bias", "beta", "out", "light"),
    [
        ("default", meta(3), 1, None, True),
        ("default", meta(3), 0.5, None, False),  # cuBLASLt's epilogue adds the bias as it is
        ("default", meta(2, 3), 0.5, None, True),  # a matrix of a half dtype
        ("default", meta(2, 3), 0, None, False),
        ("out", meta(3), 1, meta(3, 2).T, False),  # by columns
        ("out", meta(2, 3), 1, meta(2, 3), True),
        ("out", meta(2, 3), 1, "bias", False),  # in place
        ("dtype", meta(3, dtype=torch.float32), 1, meta(2, 3, dtype=torch.float32), True),
        ("dtype", meta(2, 3, dtype=torch.float32), 1, meta(2, 3, dtype=torch.float32), False),
    ],
)
def test_what_else_decides_on_cublaslt(func: str, bias: Tensor, beta: float, out: object, light: bool) -> None:
    bias = bias if func == "dtype" else bias.to(torch.bfloat16)
    first, second = meta(2, 4, dtype=torch.bfloat16), meta(4, 3, dtype=torch.bfloat16)
    result = bias if out == "bias" else out if isinstance(out, Tensor) else meta(2, 3, dtype=torch.bfloat16)
    addmm = getattr(torch.ops.aten.addmm, func)
    blas = blas_of(AMPERE, (2, 15))
    called, kept = needs(blas, addmm, (bias, first, second), result, beta=beta)
    assert (called, kept) == ((LT_WORKSPACE if light else DEFAULT_WORKSPACE,), ())


def test_in_2_6_a_bias_of_one_row_does_not_go_to_cublaslt() -> None:
    assert not uses_lt(meta(1, 3), meta(2, 4), meta(4, 3), row=False)
    takes = [blas_of(AMPERE, version).lt_takes_a_row for version in ((2, 6), (2, 8), (2, 9), (2, 11))]
    assert takes == [False, False, True, True]


def test_expanded_operands_are_copied_for_the_product() -> None:
    tape = run(lambda: nn.Linear(8, 4, bias=False), torch.zeros(2, 8), on=cuda(), optimizer="none")
    # the gradient of the sum is one number expanded to [2, 4]: 2*4*4 bytes beside the workspace, in both steps
    assert held(tape, "aten.mm.default") == [[DEFAULT_WORKSPACE], [32, DEFAULT_WORKSPACE]] * 2


def test_strided_operands_are_copied_for_the_product() -> None:
    tape = call(lambda w: w[:, ::2, ::2] @ w[:, ::2, ::2].transpose(1, 2), 2, 8, 8)
    # [2, 4, 4] of every second row and column: neither stride is 1, so both operands are copied, 2*4*4*4 each
    assert held(tape, "aten.bmm.default")[0] == [128, 128, DEFAULT_WORKSPACE]


# --- attention: the order, the conditions, what each version changed

VERSIONS = [
    ((2, 6), (8, 6), {}, "flash"),
    ((2, 6), (8, 6), {"mask": True}, "efficient"),
    ((2, 6), (8, 6), {"key_heads": 2, "mask": True}, "math"),
    ((2, 6), HOPPER, {}, "flash"),  # cuDNN comes after math
    ((2, 6), HOPPER, FLOAT32, "efficient"),
    ((2, 6), (12, 0), {}, "math"),  # no fused kernel above 9.0
    ((2, 6), BLACKWELL, FLOAT32, "math"),
    ((2, 7), (12, 0), {}, "flash"),
    ((2, 7), (12, 1), {}, "math"),
    ((2, 8), (12, 1), {}, "flash"),
    ((2, 8), HOPPER, {}, "flash"),
    ((2, 9), HOPPER, {}, "cudnn"),
    ((2, 10), HOPPER, {}, "flash"),
    ((2, 11), AMPERE, {"key_heads": 2, **FLOAT32}, "math"),  # grouped heads: flash alone took them
    ((2, 13), AMPERE, {"key_heads": 2, "mask": True}, "math"),
    ((2, 14), AMPERE, {"key_heads": 2, **FLOAT32}, "efficient"),
    ((2, 11), AMPERE, {"key_heads": 2}, "flash"),
    ((2, 14), HOPPER, {"head": 256}, "flash"),
    ((2, 15), HOPPER, {"head": 256}, "cudnn"),  # cuDNN newer than 9.22
    ((2, 15), BLACKWELL, {"head": 256}, "cudnn"),
    ((2, 15), HOPPER, {"head": 160}, "flash"),  # no backward pass for it
    ((2, 15), HOPPER, {"head": 160, "trains": False}, "cudnn"),
    ((2, 15), HOPPER, {"head": 192, "value_head": 128}, "cudnn"),
    ((2, 11), HOPPER, {"head": 192, "value_head": 128}, "cudnn"),
    ((2, 15), AMPERE, {"head": 256}, "flash"),
]


@pytest.mark.parametrize(("version", "capability", "asked", "backend"), VERSIONS, ids=str)
def test_attention_backend_by_version(version, capability, asked: dict[str, Any], backend: str) -> None:
    assert choose(cuda(capability, version), question(**asked)) == backend


def test_the_order_in_which_backends_are_asked() -> None:
    asked = question()
    assert order(cuda(AMPERE), asked) == ("flash", "efficient", "math")
    assert order(cuda(HOPPER), asked) == order(cuda(BLACKWELL), asked) == ("cudnn", "flash", "efficient", "math")
    assert order(cuda((12, 0)), asked) == ("flash", "efficient", "math")
    assert order(cuda(HOPPER, (2, 6)), asked) == ("flash", "efficient", "math")
    assert order(cuda(HOPPER), question(**FLOAT32)) == ("flash", "efficient", "math")


def test_backends_that_user_code_has_switched_off_are_passed_over() -> None:
    device, asked = cuda(HOPPER), question()
    assert choose(device, asked) == "cudnn"
    for backend, name in ((SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.MATH, "math")):
        with sdpa_kernel(backend):
            assert choose(device, asked) == name
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert refusal("cudnn", device, asked) == "it is switched off (torch.nn.attention.sdpa_kernel)"
        with pytest.raises(RuntimeError, match=r"^No available kernel. Aborting execution.$"):
            choose(device, question(**FLOAT32))


def test_the_order_that_user_code_has_set() -> None:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert order(cuda(HOPPER), question())[:2] == ("efficient", "flash")
        assert choose(cuda(HOPPER), question()) == "efficient"


def _changed(**changes: Any) -> Attention:
    asked = question()
    return Attention(**{name: getattr(asked, name) for name in Attention.__slots__} | changes)


STRIDED = meta(2, 4, 16, 128, dtype=HALF)[..., ::2]
LATE = meta(2 * 4 * 16 * 64 + 1, dtype=HALF)[1:].view(2, 4, 16, 64)
REFUSALS = {
    "flash": [
        (AMPERE, _changed(query=meta(4, 16, 64, dtype=HALF)), "query, key and value need four dimensions"),
        (AMPERE, question(keys=0), "there are no queries or keys"),
        (AMPERE, question(mask=True), "it takes no mask"),
        (AMPERE, question(head=264), "it needs one head dim of at most 256"),
        (TURING, question(), "it needs capability 8.0 to 12.1"),
        ((BLACKWELL, (2, 6)), question(), "this version has none for the capability"),
        (ADA, question(head=200), "its backward pass has no kernel for this head dim here"),
        (AMPERE, question(causal=True, queries=8), "causal attention needs as many queries as keys"),
        (AMPERE, question(**FLOAT32), "it needs float16 or bfloat16"),
        (AMPERE, question(heads=65536, key_heads=65536), "batch or heads are above 65,535"),
        (AMPERE, question(key_heads=3), "batches or heads do not match"),
        (AMPERE, _changed(query=STRIDED), "the last dimension is strided"),
    ],
    "efficient": [
        (AMPERE, _changed(query=meta(4, 16, 64, dtype=HALF)), "query, key and value need four dimensions"),
        (AMPERE, question(queries=0), "there are no queries or keys"),
        ((13, 0), question(), "it needs capability 5.0 to 12.1"),
        ((BLACKWELL, (2, 6)), question(), "this version has none for the capability"),
        (AMPERE, question(head=60), "head dims do not match or are not aligned"),
        (AMPERE, _changed(key=LATE), "tensors do not begin at an aligned place"),
        (AMPERE, _changed(value=STRIDED), "the last dimension is strided"),
        (AMPERE, question(key_heads=3), "batches or heads do not match"),
        (TURING, question(), "it has no kernel for this dtype here"),
    ],
    "cudnn": [
        (HOPPER, _changed(query=meta(4, 16, 64, dtype=HALF)), "query, key and value need four dimensions"),
        (HOPPER, question(keys=0), "there are no queries or keys"),
        (HOPPER, question(**FLOAT32), "it needs float16 or bfloat16"),
        (HOPPER, _changed(mask=meta(1, 16, 16, dtype=HALF)), "it does not take this mask"),
        (TURING, question(**FLOAT16), "it needs capability 8.0 to 12.1"),
        ((BLACKWELL, (2, 6)), question(), "this version has none for the capability"),
        (HOPPER, question(dropout=0.1), "dropout is no multiple of 1/16"),
        (HOPPER, _changed(query=STRIDED), "the last dimension is strided"),
        (HOPPER, question(heads=65536, key_heads=65536), "batch or heads are above 65,535"),
        (HOPPER, question(key_heads=3), "batches or heads do not match"),
        (HOPPER, question(head=132), "it has no kernel for these head dims"),
        (HOPPER, question(keys=1), "it needs more than one key"),
    ],
}


@pytest.mark.parametrize("backend", REFUSALS)
def test_every_condition_of_a_backend_can_fail_and_says_so(backend: str) -> None:
    reached = [
        refusal(backend, cuda(*on) if isinstance(on[0], tuple) else cuda(on), asked)
        for on, asked, _ in REFUSALS[backend]
    ]
    assert reached == [why for *_, why in REFUSALS[backend]]
    assert set(reached) == {why for why, _ in CONDITIONS[backend]}


def test_a_mask_with_gradient_is_not_for_cudnn() -> None:
    mask = torch.empty(2, 4, 16, 16, dtype=HALF, device="meta", requires_grad=True)
    assert refusal("cudnn", cuda(HOPPER), _changed(mask=mask)) == "it does not take this mask"
    assert choose(cuda(HOPPER), _changed(mask=mask)) == "efficient"


def test_one_key_head_for_all_since_2_14() -> None:
    one = _changed(key=meta(2, 1, 16, 64, dtype=HALF), value=meta(2, 1, 16, 64, dtype=HALF))
    assert choose(cuda(version=(2, 13)), one) == "math"
    assert choose(cuda(version=(2, 14)), one) == "flash"


@pytest.mark.parametrize(("version", "kernel"), [((2, 13), "math"), ((2, 14), "flash")])
def test_unbatched_attention_is_fused_since_2_14(version: tuple[int, int], kernel: str) -> None:
    on = cuda(version=version)
    tape = call(lambda w: F.scaled_dot_product_attention(w, w, w), 4, 16, 64, on=on, dtype="bfloat16")
    assert [choice.kernel for choice in on.kernels()] == [kernel]
    assert tape.marks[-1][1] == "step2"


# --- attention: what stays for the backward pass, and what that holds inside


def test_flash_attention_backward() -> None:
    tape = run(Attend, torch.zeros(2, 4, 16), dtype="bfloat16", on=cuda(), optimizer="none")
    # gradient [2, 2, 4, 8] is an expanded number: copied, 2*4*2*8*2; softmax_d [2, 2, 128] in float32 2*2*128*4;
    # dq_accum [2, 128, 2, 32]: 4 queries rounded to 128, 8 columns to 32, 2*128*2*32*4
    assert held(tape, "aten._scaled_dot_product_flash_attention_backward.default") == [[256, 2048, 65536]] * 2


def test_flash_attention_backward_of_wide_heads() -> None:
    for version, columns in (((2, 6), 160), ((2, 11), 192)):
        tape = call(
            lambda w: F.scaled_dot_product_attention(w, w, w), 2, 4, 16, 160, on=cuda(version=version), dtype="bfloat16"
        )
        # softmax_d 2*4*128*4, dq_accum [2, 128, 4, columns]: 160 rounded to 32, in 2.11 to 64
        assert held(tape, "aten._scaled_dot_product_flash_attention_backward.default")[0][-2:] == [
            4096,
            2 * 128 * 4 * columns * 4,
        ]


@pytest.mark.parametrize(("version", "seeds"), [((2, 6), 0), ((2, 11), 24)])
def test_flash_attention_keeps_its_random_state_on_the_host_in_2_6(version: tuple[int, int], seeds: int) -> None:
    tape = run(Attend, torch.zeros(2, 4, 16), dtype="bfloat16", on=cuda(version=version), optimizer="none")
    # projection 2*4*16*2, output likewise, log sums [2, 2, 4] in float32, the loss 2; later two numbers of 8, and one not used
    assert alive(tape, "forward")["activation"] == 256 + 256 + 2 * 2 * 4 * 4 + 2 + seeds


def test_math_adds_a_boolean_mask_in_the_querys_dtype() -> None:
    mask = torch.zeros(16, 16, dtype=torch.bool, device="meta")
    on = cuda(TURING)  # no fused kernel for bfloat16
    tape = call(
        lambda w: F.scaled_dot_product_attention(w, w, w, attn_mask=mask), 2, 4, 16, 64, on=on, dtype="bfloat16"
    )
    made = [
        tape.sizes[block] for block in tape.order if block >= 0 and tape.op_names[tape.ops[block]] == "aten.where.self"
    ]
    assert made == [16 * 16 * 2] * 2  # in both steps


def test_flash_attention_backward_of_grouped_heads() -> None:
    def grouped(w: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(w, w[:, :1], w[:, :1], enable_gqa=True)

    tape = call(grouped, 2, 4, 16, 64, dtype="bfloat16")
    # gradient and output [2, 4, 16, 64] are copied token by token, 2*4*16*64*2 each; softmax_d 2*4*128*4, dq_accum 2*128*4*64*4,
    # and the key's and the value's gradient of every head 2*16*4*64*2
    copied, of_heads = [16384, 16384], [16384, 16384]
    assert held(tape, "aten._scaled_dot_product_flash_attention_backward.default")[0] == [*copied, 4096, 262144, *of_heads]


@pytest.mark.parametrize(("version", "seeds"), [((2, 15), 16), ((2, 14), 0)])
def test_efficient_attention_keeps_its_random_state_on_the_host_with_dropout(version, seeds: int) -> None:
    tape = run(Attend, torch.zeros(2, 4, 16), on=cuda(version=version), optimizer="none")
    # projection 2*4*16*4, output likewise, log sums [2, 2, 4 rounded to 32] in float32, the loss 4; since 2.15 without dropout a
    # seed and an offset of 8 each
    assert alive(tape, "forward")["activation"] == 512 + 512 + 2 * 2 * 32 * 4 + 4 + seeds
    tape = run(lambda: Attend(dropout=0.5), torch.zeros(2, 4, 16), on=cuda(version=version), optimizer="none")
    assert alive(tape, "forward")["activation"] == 512 + 512 + 2 * 2 * 32 * 4 + 4


def test_efficient_attention_backward_in_float32() -> None:
    tape = run(Attend, torch.zeros(2, 4, 16), on=cuda(), optimizer="none")
    # the expanded gradient copied, 2*4*2*8*4, held to the end; the product of gradient and output as large as the gradient, its
    # sum [2, 2, 4] in float32, and delta, which is that sum copied and held to the end; a tile of 64 x 64 for each of the 4
    # pairs: (4 + 64*64) * 4
    stages = held(tape, "aten._scaled_dot_product_efficient_attention_backward.default")
    assert stages == [[512, 512, 64, 64, 4 * (4 + 64 * 64) * 4]] * 2


@pytest.mark.parametrize(
    ("capability", "head", "elements"),
    [
        (AMPERE, 64, 4 + 64 * 64),  # one block of 64 rows and 64 columns covers 16 queries
        (AMPERE, 128, 4 + 128 * 128),
        (ADA, 96, 2 * (4 + 128 * 64)),  # two columns of blocks
        (
            ADA,
            128,
            2 * (4 + 64 * 64) + 2 * 64 * 128,
        ),  # too little shared memory: key's and value's gradients go out, too
        (AMPERE, 256, 4 * (4 + 128 * 64) + 2 * 64 * 256),
    ],
)
def test_efficient_attention_backward_in_half_precision(capability, head: int, elements: int) -> None:
    mask = torch.zeros(16, 16, dtype=torch.bool, device="meta")

    def attend(w: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(w, w, w, attn_mask=mask).contiguous()

    tape = call(attend, 2, 4, 16, head, on=cuda(capability), dtype="bfloat16")
    stage = held(tape, "aten._scaled_dot_product_efficient_attention_backward.default")[0]
    # delta [2, 4, 16] in float32; then for each of the 2*4 pairs the elements above
    assert stage[-2:] == [2 * 4 * 16 * 4, 2 * 4 * elements * 4]


def test_efficient_attention_backward_expands_grouped_heads() -> None:
    def grouped(w: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(w, w[:, :1], w[:, :1], enable_gqa=True).contiguous()

    tape = call(grouped, 2, 4, 16, 64)
    # the key's and the value's gradient of every head, 2*4*16*64*4 each
    assert held(tape, "aten._scaled_dot_product_efficient_attention_backward.default")[0][:2] == [32768] * 2


# --- normalization


@pytest.mark.parametrize(
    ("dtype", "shape", "training", "kernel"),
    [
        ("float32", (2, 3, 4), True, "cuDNN"),
        ("float32", (2, 3, 4), False, "cuDNN"),
        ("float32", (2, 3), True, "PyTorch's own"),  # not for two dimensions
        ("bfloat16", (2, 3, 4), True, "PyTorch's own"),
        ("float16", (2, 3, 4), True, "PyTorch's own"),  # its weights are no float32
        ("amp-float16", (2, 3, 4), True, "cuDNN"),
        ("amp-bfloat16", (2, 3, 4), True, "PyTorch's own"),
    ],
)
def test_batch_norm_kernel(dtype: str, shape: tuple[int, ...], training: bool, kernel: str) -> None:
    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(shape[-1], shape[-1]), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            n = self.norm
            return F.batch_norm(self.linear(x), n.running_mean, n.running_var, n.weight, n.bias, training=training)

    on = cuda()
    run(Normalized, torch.zeros(shape), on=on, dtype=dtype)
    assert [c.kernel for c in on.kernels() if c.operator == "batch norm"] == [kernel]


def composite_kernel(name: str, on: Device) -> Callable[..., Any]:
    """What stands on a device for a composite operator."""
    return partial(rules_for(on).kernels[operator(name)], on)


@pytest.mark.parametrize(
    ("shape", "training", "kernel"),
    [
        ((65535, 1, 1), False, "cuDNN"),
        ((65536, 1, 1), False, "PyTorch's own"),
        ((65536, 1, 1), True, "cuDNN"),
        ((880802, 1, 1), True, "PyTorch's own"),
        ((2, 1, 2**30), True, "PyTorch's own"),  # 2**31 elements
    ],
)
def test_batch_norm_of_very_large_tensors(shape: tuple[int, ...], training: bool, kernel: str) -> None:
    on, one = cuda(), meta(1)
    composite_kernel("batch_norm", on)(meta(*shape), one, one, one, one, training, 0.1, 1e-5, True)
    assert [c.kernel for c in on.kernels()] == [kernel]


def test_batch_norm_leaves_channels_last_images_as_they_are() -> None:
    images = meta(2, 3, 4, 5).to(memory_format=torch.channels_last)
    one = meta(3)
    out = composite_kernel("batch_norm", cuda())(images, one, one, one, one, True, 0.1, 1e-5, True)
    assert out.is_contiguous(memory_format=torch.channels_last)


class Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8, bias=False), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def test_rms_norm_saves_its_input_and_one_number_a_row() -> None:
    tape = run(Rms, torch.zeros(2, 4, 8), on=cuda(), optimizer="none")
    # input 2*4*8*4, inverse root [2, 4, 1] in float32, the loss 4; the gradients are those of 8*8 + 8 weights
    assert alive(tape, "forward")["activation"] == 256 + 32 + 4
    assert alive(tape, "backward")["gradient"] == (64 + 8) * 4


def test_rms_norm_in_2_6_is_a_chain_of_operators() -> None:
    tape = run(Rms, torch.zeros(2, 4, 8), on=cuda(version=(2, 6)), optimizer="none")
    # kept in float32: input 2*4*8*4, inverse root [2, 4, 1], their product for the weight's gradient 2*4*8*4, the loss 4
    assert alive(tape, "forward")["activation"] == 256 + 32 + 256 + 4


def test_rms_norm_of_mixed_dtypes_is_a_chain_of_operators() -> None:
    on = cuda()
    rms_norm = composite_kernel("rms_norm", on)
    rms_norm(meta(2, 8, dtype=HALF), [8], meta(8), 1e-5)
    rms_norm(meta(2, 3, 4, 8).to(memory_format=torch.channels_last), [8], meta(8), 1e-5)
    assert not on.kernels()
    rms_norm(meta(2, 8, dtype=HALF), [8], meta(8, dtype=HALF), 1e-5)
    assert [*map(str, on.kernels())] == ["RMS norm: fused (bfloat16)"]


def test_group_norm_holds_sums_per_sample_and_channel() -> None:
    tape = call(lambda w: F.group_norm(w, 2, w[0, :, 0], w[0, :, 1]), 2, 4, 3)
    # scale and shift [2, 4] in float32; backward two sums [2, 4], two more [2, 2] and a factor [2, 4]
    assert held(tape, "aten.native_group_norm.default")[0] == [32, 32]
    assert held(tape, "aten.native_group_norm_backward.default")[0] == [32, 32, 16, 16, 32]
    # without weights neither scale, shift nor factor
    assert held(call(lambda w: F.group_norm(w, 2), 2, 4, 3), "aten.native_group_norm_backward.default")[0] == [32, 32, 16, 16]


def test_layer_norm_backward_copies_a_strided_gradient() -> None:
    tape = call(lambda w: F.layer_norm(w, (8,)).sum(), 2, 3, 8)
    # the gradient of the sum is an expanded number [2, 3, 8]: 2*3*8*4
    assert held(tape, "aten.native_layer_norm_backward.default") == [[192]] * 2


def test_softmax_copies_what_is_strided() -> None:
    tape = call(lambda w: F.softmax(w.t(), -1).sum(), 3, 8)
    # the transposed input [8, 3]; then the product of gradient and output, which is contiguous: 3*8*4 each
    assert held(tape, "aten._softmax.default") == [[96]] * 2
    assert held(tape, "aten._softmax_backward_data.default") == [[96]] * 2


def test_a_roll_goes_dimension_by_dimension() -> None:
    # [3, 8] in float32 for all but the last dimension
    assert held(call(lambda w: w.roll((1, 1), (0, 1)), 3, 8), "aten.roll.default")[0] == [96]
    assert held(call(lambda w: w.roll(1, 0), 3, 8), "aten.roll.default") == []


@pytest.mark.parametrize(
    ("key", "rows", "columns", "bytes"),
    [
        ("rtx-3060-12gb", 100_352, 96, 3136 * 96 * 2),  # a row of partial sums for 32 rows, in the weight's bfloat16
        ("rtx-3060-12gb", 65_536, 96, 0),  # not more than 65,536 rows
        ("rtx-3060-12gb", 100_352, 448, 0),  # 14 blocks of 32 columns keep half of 28 multiprocessors busy
        ("h100-80gb", 100_352, 448, 2340 * 448 * 2),  # but not half of 132; of 14 blocks each, 2,340 are 32,768
    ],
)
def test_gradients_of_a_norms_weights_are_summed_in_two_passes(key: str, rows: int, columns: int, bytes: int) -> None:
    assert norm_block(key, ("partial sums", "2"), (rows, columns)) == bytes
    staged = norm_block(key, ("semaphores", "2"), (rows, columns))
    assert staged == 0 if bytes == 0 else staged > 0


def test_a_layer_norm_has_no_partial_sums_before_2_8() -> None:
    def step(w: Tensor) -> Tensor:
        return F.layer_norm(w, (96,), torch.ones(96, device="meta", requires_grad=True))

    asked = {
        version: sum(one.kind == NORM for one in call(step, 4, 96, on=cuda(version=version)).size_queries)
        for version in ((2, 6), (2, 8))
    }
    assert asked[2, 6] == 0
    assert asked[2, 8] > 0


def test_a_layer_norm_asks_at_every_batch() -> None:
    tape = call(lambda w: F.layer_norm(w, (96,), torch.ones(96, device="meta", requires_grad=True)), 4, 96)
    asked = [question for question in tape.size_queries if question.kind == NORM]
    assert {question.numbers for question in asked} == {(4, 96)}
    assert all(answer == 0 for answer in tape.resolve(size_oracle_of(GPUS["t4"])).sizes[-3:])


# --- indexing


def _embedding_blocks(indices: int, rows: int, capability=(9, 0), version=(2, 15)) -> list[int]:
    on = cuda(capability, version)
    tape = run(lambda: _Looked(rows, 8), torch.zeros(2, indices // 2, dtype=torch.int64), on=on, optimizer="none")
    key = {(9, 0): "h100-80gb", (8, 0): "a100-80gb"}[capability]
    answered = tape.resolve(size_oracle_of(GPUS[key]))
    blocks = held(answered, "aten.embedding_dense_backward.default")
    return [size for stage in blocks[: len(blocks) // 2] for size in stage]


class _Looked(nn.Embedding):
    def forward(self, kinds: Tensor) -> Tensor:
        return super().forward(kinds).pow(2)


def test_embedding_backward_of_few_indices_takes_nothing() -> None:
    assert sum(_embedding_blocks(3072, 10)) == 0


@pytest.mark.parametrize(
    ("capability", "version", "passes", "sort"),
    [
        ((9, 0), (2, 15), 2, 71167),
        ((8, 0), (2, 15), 2, 72191),
        ((9, 0), (2, 11), 8, 83455),
        ((8, 0), (2, 11), 8, 84479),
    ],
)
def test_embedding_backward_sorts_and_sums(capability, version, passes: int, sort: int) -> None:
    # Of 4,096 indices, int64: 32,768 bytes a vector. Sorted through one more and CUB's storage: 2 * 32,768 again, (2 + 8 * passes)
    # * 256 for counts, in 2 passes over the 10 bits of 1,000, up to PyTorch 2.11 in 8 over all 64; a KiB a tile (4,608 pairs on
    # an H100, 3,840 on an A100: 1 and 2) less 1. Then two more with a count and two scans, segments twice, and for each of 1,000
    # rows and every tenth index a place (8 bytes) and a row (8 * 4): 1,000 + 409.
    assert sort == 2 * 32768 + (2 + 8 * passes) * 256 + 1024 * (1 if capability == (9, 0) else 2) - 1
    segments, parts = 1000 * 8, 1409
    assert _embedding_blocks(4096, 1000, capability, version) == [
        *[32768] * 3, sort, 32768, 8, 32768, 1279, segments, segments, 1279, 8, parts * 8, parts * 32, 0,
    ]  # fmt: skip


def test_embedding_backward_adds_parts_of_few_rows_at_once() -> None:
    # 100 rows and every tenth of 4,096 indices are parts, each with its row instead of a sum: 4,096 // 100 is 30 or more
    assert _embedding_blocks(4096, 100)[-3:] == [509 * 8, 0, 509 * 8]
    assert _embedding_blocks(4096, 137)[-3:] == [546 * 8, 546 * 32, 0]


def _sorted_blocks(tape: Tape, op: str) -> list[int]:
    """Return the bytes that an operator holds on an H100 while it sorts, without blocks that this sort does not need."""
    return [size for size in held(tape.resolve(size_oracle_of(GPUS["h100-80gb"])), op)[0] if size]


def test_index_backward_sorts() -> None:
    places = torch.zeros(6, dtype=torch.int64, device="meta")
    tape = call(lambda w: w[places], 10, 8)
    # the gradient is added at 6 places: four vectors of int64 and CUB's one byte
    assert _sorted_blocks(tape, "aten.index_put.default") == [48] * 4 + [1]


def test_long_rows_are_sorted_through_a_copy() -> None:
    # places 4097*8; CUB's buffers of 65 * 256 and 129 * 256, 4 passes of 2,048, counters 256, a tile 1,024, alignment 255
    assert _sorted_blocks(call(lambda w: w.sort(-1)[0], 1, 4097), "aten.sort.default") == [32776, 59391]
    # in place, with the places of one row: 4096*8
    assert _sorted_blocks(call(lambda w: w.sort(-1)[0], 1, 4096), "aten.sort.default") == [32768]
    # two rows at once: pairs of place and segment 8194*8 before and after, keys 8194*4
    # CUB: buffers of 33,024 and 65,792, 4 passes of 2,048, counters 256, two tiles of 1,024, alignment 255
    assert _sorted_blocks(call(lambda w: w.sort(-1)[0], 2, 4097), "aten.sort.default") == [65552, 65552, 32776, 109567]


@pytest.mark.parametrize("function", [lambda w: w.masked_scatter(w > 0, w), lambda w: w.flatten().cumsum(0)])
def test_a_scan_takes_whole_tiles_at_each_batch(function: Callable[[Tensor], Tensor]) -> None:
    # 700 values a sample, of which a tile of CUB's scan has 896 (places in int64) or 1,920 (float32): on no line over the batch
    tapes = [replace(call(function, batch, 700), batch=batch) for batch in (2, 3, 150)]
    line = fit_affine(*tapes[:2])
    line.check(tapes[2])
    oracle = size_oracle_of(GPUS["h100-80gb"])
    assert line.evaluate(150).resolve(oracle).sizes == tapes[2].resolve(oracle).sizes
    # -(-105,000 // 896) = 118 tiles of 16 bytes, -(-105,000 // 1,920) = 55 of 8; 32 more each, in multiples of 256, and 511
    assert {2560 + 511, 768 + 511} & {*tapes[2].resolve(oracle).sizes}


# --- convolution


@pytest.mark.parametrize(
    ("capability", "dtype", "copied"),
    [
        # input [2, 4, 8, 8], weight [6, 4, 1, 1], output [2, 6, 8, 8]: 512 + 24 + 768 elements
        (AMPERE, "bfloat16", 1304 * 2),
        (AMPERE, "float32", 1304 * 4),  # TensorFloat-32
        (VOLTA, "float32", 0),  # no tensor cores
    ],
)
def test_convolution_for_tensor_cores_is_laid_out_anew_by_the_model(capability, dtype: str, copied: int) -> None:
    tape = run(lambda: nn.Conv2d(4, 6, 1, bias=False), torch.zeros(2, 4, 8, 8), on=cuda(capability), dtype=dtype)
    assert held(tape, "aten.convolution.default") == [[copied]] * 2
    # the gradient of a sum is one value for all of the output, copied to be contiguous: 768 elements; the input needs no
    # gradient, so one stage for the weight's
    grad = 768 * (2 if dtype == "bfloat16" else 4)
    assert held(tape, "aten.convolution_backward.default") == [[grad, copied]] * 2


# --- recurrent layers


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(8, 16, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize(
    ("kind", "options", "kept"),
    [
        # 5 steps of 2 samples, 16 hidden: gates and cell of an LSTM 5 a unit, of a GRU 4, of a plain RNN 1
        (nn.LSTM, {}, 10 * 16 * 5),
        (nn.LSTM, {"num_layers": 2}, 10 * 16 * 5 * 2 + 10 * 16),  # and what the first layer hands to the second
        (nn.LSTM, {"bidirectional": True}, 10 * 16 * 5 * 2),
        (nn.GRU, {}, 10 * 16 * 4),
        (nn.RNN, {}, 10 * 16),
        (nn.RNN, {"nonlinearity": "relu"}, 10 * 16),
    ],
)
def test_cudnn_runs_recurrent_layers_in_one_kernel(kind, options: dict[str, Any], kept: int) -> None:
    tape = run(lambda: Recurrent(kind, **options), torch.zeros(5, 2, 8), on=cuda(), optimizer="none")
    ways = 2 if options.get("bidirectional") else 1
    layers = ways * options.get("num_layers", 1)
    states = (2 if kind is nn.LSTM else 1) * layers * 2 * 16 * 4
    # output [5, 2, 16 a way], which the next layer of it saved, the reserve, the initial states that were made, the loss 4
    assert alive(tape, "forward")["activation"] == 10 * 16 * ways * 4 + kept * 4 + states + 4
    weights = alive(tape, "load")["parameter"]
    assert alive(tape, "backward")["gradient"] == weights
    # one buffer holds the gradients of all weights
    gradients = [s for s, c in zip(tape.sizes, tape.categories, strict=True) if CATEGORIES[c] == "gradient"]
    assert gradients == [weights] * 2


def test_reserve_of_recurrent_layers_with_dropout() -> None:
    # LSTM, 10 steps times samples, 16 hidden, 2 layers: gates and cells, and what goes between the layers twice, 2 bytes each
    assert reserve_bytes(2, 10, 16, 16, 2, 1, 0.1, 2) == (10 * 16 * 5 * 2 + 10 * 16 * 2) * 2


def test_recurrent_layers_keep_nothing_in_inference_and_take_packed_sequences() -> None:
    class Packed(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3], device="cpu"))
            return self.layer(packed)[0].data

    tape = run(lambda: Packed(nn.LSTM), torch.zeros(5, 2, 8), on=cuda(), mode="inference")
    # 5 + 3 rows of 16 numbers
    assert alive(tape, "forward")["activation"] == 8 * 16 * 4


def test_recurrent_layers_under_autocast_run_in_half_precision() -> None:
    tape = run(lambda: Recurrent(nn.LSTM), torch.zeros(5, 2, 8), on=cuda(), mode="inference", dtype="amp-float16")
    assert alive(tape, "forward")["activation"] == 10 * 16 * 2


# --- the fast path of multi-head attention and of encoder layers


class Encoder(nn.Module):
    """One layer of width 16, 2 heads, 32 hidden, over [2, 4, 16]."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    ("capability", "dtype", "first", "kernels"),
    [
        (AMPERE, "bfloat16", False, ["multi-head attention: fast path (evaluation, bfloat16, fused)",
                                     "attention: flash (bfloat16, no mask, head dim 8)"]),
        (AMPERE, "bfloat16", True, ["multi-head attention: fast path (evaluation, bfloat16, fused)",
                                    "attention: flash (bfloat16, no mask, head dim 8)"]),
        (HOPPER, "bfloat16", False, ["multi-head attention: fast path (evaluation, bfloat16, fused)",
                                     "attention: cudnn (bfloat16, no mask, head dim 8)"]),
        # autocast closes it
        (AMPERE, "amp-bfloat16", False, ["attention: flash (bfloat16, no mask, head dim 8)"]),
    ],
)  # fmt: skip
def test_encoder_layer_in_evaluation(capability, dtype: str, first: bool, kernels: list[str]) -> None:
    on = cuda(capability)
    tape = run(lambda: Encoder(norm_first=first), torch.zeros(2, 4, 16), on=on, dtype=dtype, mode="inference")
    assert [*map(str, on.kernels())] == kernels
    # the output alone: 2*4*16 numbers
    assert alive(tape, "forward")["activation"] == 128 * (4 if dtype.startswith("amp") else 2)


def test_encoder_layer_with_scores_holds_them() -> None:
    on = cuda()
    # 2 heads of 5 columns, which no fused kernel takes here
    tape = run(
        lambda: nn.TransformerEncoderLayer(10, 2, 20, batch_first=True), torch.zeros(2, 4, 10), on=on, mode="inference"
    )
    assert [*map(str, on.kernels())] == ["multi-head attention: fast path (evaluation, float32, with its scores)"]
    # at the most the projection [2, 4, 30] and what it is rearranged into, 2*4*30*4 each; later the scores take less
    assert peaks(tape, "temporary")["forward"] == 2 * 960


def test_encoder_layers_train_as_written() -> None:
    on = cuda()
    run(Encoder, torch.zeros(2, 4, 16), on=on, dtype="bfloat16")
    assert all("fast path" not in choice for choice in map(str, on.kernels()))


def test_padding_masks_take_the_fast_path_without_nested_tensors() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=x[..., 0] > 1)

    on = cuda()
    tape = run(Masked, torch.zeros(2, 4, 16), on=on, mode="inference")
    assert [*map(str, on.kernels())] == ["multi-head attention: fast path (evaluation, float32, with its scores)"]
    assert alive(tape, "forward")["activation"] == 2 * 4 * 16 * 4


def test_attention_weights_that_were_asked_for_are_averaged() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[1]

    tape = run(Weighted, torch.zeros(2, 4, 16), on=cuda(), mode="inference")
    # [2, 4, 4] in float32
    assert alive(tape, "forward")["activation"] == 128


def test_pytorchs_spare_backend_has_its_own_name_again() -> None:
    before = torch.utils.backend_registration._privateuse1_backend_name
    run(Mlp, torch.zeros(2, 8), on=cuda())
    assert torch.utils.backend_registration._privateuse1_backend_name == before != "meta"

"""Autocast on meta tensors: PyTorch's own lists, its nesting, its cache, and nothing of it left behind."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sizer.base.versions import Version, installed_version
from sizer.tracing.meta import autocast as lists
from sizer.tracing.meta.autocast import Autocast

HALF, FLOAT, FP16 = torch.bfloat16, torch.float32, torch.float16

OURS = {
    "AutocastCUDA": (lists.LOWER_PRECISION, lists.FLOAT32, lists.FLOAT32_SET_DTYPE, lists.PROMOTE, lists.BANNED),
    "AutocastCPU": (lists.CPU_LOWER_PRECISION, lists.CPU_FLOAT32, lists.CPU_PROMOTE),
    "AutocastMPS": (lists.MPS_LOWER_PRECISION, lists.MPS_FLOAT32, lists.MPS_PROMOTE),
}
LEFT_OUT = {
    "norm.Scalar": "Tensor.norm and torch.norm call linalg_vector_norm, which is on the list",
    "norm.ScalarOpt_dim": "the same",
}


@contextmanager
def traced(kind: str = "cuda", version: Version | None = None) -> Iterator[Autocast]:
    autocast = Autocast(kind, version or installed_version())
    with autocast.installed():
        yield autocast


def empty(*shape: int, dtype: torch.dtype = FLOAT, trains: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trains)


# --- the lists


def registered(key: str) -> set[str]:
    """The names that the installed PyTorch registers on an autocast key, without "aten::"; named tensors are left aside."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::") and has(n, key)]
    return {n.removeprefix("aten::") for n in names if "imname" not in n and "names_" not in n}


@pytest.mark.parametrize("version", [(2, 6), (2, 8), (2, 11), (2, 15)])
def test_rms_norm_is_on_the_list_after_2_11(version: Version) -> None:
    listed = version > (2, 11) and "rms_norm" in registered("AutocastCUDA")  # the code is the installed PyTorch's
    dtype = FLOAT if listed else HALF
    with traced(version=version), torch.autocast("cuda", dtype=HALF):
        assert F.rms_norm(empty(2, 4, dtype=HALF), (4,)).dtype == dtype


@pytest.mark.parametrize("key", OURS)
def test_nothing_on_the_list_of_pytorch_is_missing(key: str) -> None:
    ours = {name for names in OURS[key] for name in names}
    assert len(registered(key)) > 90
    assert registered(key) - ours == (set(LEFT_OUT) if key == "AutocastCUDA" else set())


@pytest.mark.parametrize("key", OURS)
def test_every_operator_has_one_policy(key: str) -> None:
    ours = [name for names in OURS[key] for name in names]
    assert sorted(ours) == sorted(set(ours))


@pytest.mark.parametrize("kind", ["cuda", "cpu", "mps"])
def test_every_name_is_registered_on_the_spare_key(kind: str) -> None:
    key = f"Autocast{kind.upper()}"
    expected = {name for names in OURS[key] for name in names} & registered(key)
    with traced(kind):
        assert registered("AutocastIPU") == expected
    assert registered("AutocastIPU") == set()


# --- policies


def image(dtype: torch.dtype = FLOAT) -> Tensor:
    return empty(1, 2, 4, 4, dtype=dtype)


CUDA_POLICIES: list[tuple[str, Callable[[], Tensor], torch.dtype]] = [
    ("linear", lambda: F.linear(empty(2, 4), empty(3, 4), empty(3)), HALF),
    ("matmul", lambda: empty(2, 4) @ empty(4, 3), HALF),
    ("bmm", lambda: torch.bmm(empty(2, 3, 4), empty(2, 4, 3)), HALF),
    ("conv2d", lambda: F.conv2d(image(), empty(3, 2, 1, 1)), HALF),
    ("einsum", lambda: torch.einsum("ij,jk->ik", empty(2, 4), empty(4, 3)), HALF),
    ("attention", lambda: F.scaled_dot_product_attention(*[empty(1, 2, 4, 8)] * 3), HALF),
    ("softmax of a half", lambda: F.softmax(empty(2, 4, dtype=HALF), -1), FLOAT),
    ("softmax with a dtype of its own", lambda: F.softmax(empty(2, 4, dtype=HALF), -1, dtype=HALF), HALF),
    ("sum of a half", lambda: empty(2, 4, dtype=HALF).sum(), FLOAT),
    ("layer norm of a half", lambda: F.layer_norm(empty(2, 4, dtype=HALF), (4,)), FLOAT),
    ("exp of a half", lambda: empty(2, dtype=HALF).exp(), FLOAT),
    ("cross entropy", lambda: F.cross_entropy(empty(2, 4, dtype=HALF), torch.empty(2, dtype=torch.int64, device="meta")), FLOAT),
    ("mse", lambda: F.mse_loss(empty(2, dtype=HALF), empty(2, dtype=HALF)), FLOAT),
    ("norm", lambda: empty(2, dtype=HALF).norm(), FLOAT),
    ("add of mixed dtypes promotes by itself", lambda: empty(2) + empty(2, dtype=HALF), FLOAT),
    ("add of halves", lambda: empty(2, dtype=HALF) + empty(2, dtype=HALF), HALF),
    ("add of floats stays", lambda: empty(2) + empty(2), FLOAT),
    ("relu stays", lambda: F.relu(empty(2)), FLOAT),
    ("cat of mixed dtypes promotes by itself", lambda: torch.cat([empty(2), empty(2, dtype=HALF)]), FLOAT),
    ("addcmul of mixed dtypes", lambda: torch.addcmul(empty(2, dtype=HALF), empty(2), empty(2, dtype=HALF)), FLOAT),
    ("addcmul of halves", lambda: torch.addcmul(*[empty(2, dtype=HALF)] * 3), HALF),
    ("double is left alone", lambda: F.linear(*[empty(2, 2, dtype=torch.float64)] * 2), torch.float64),
    ("integers are left alone", lambda: torch.empty(2, dtype=torch.int64, device="meta").sum(), torch.int64),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "dtype"), CUDA_POLICIES, ids=[p[0] for p in CUDA_POLICIES])
def test_dtype_under_cudas_autocast(name: str, call: Callable[[], Tensor], dtype: torch.dtype) -> None:
    with traced(), torch.autocast("cuda", dtype=HALF):
        assert call().dtype == dtype


MPS_POLICIES: list[tuple[str, Callable[[], Tensor], torch.dtype]] = [
    ("linear", lambda: F.linear(empty(2, 4), empty(3, 4), empty(3)), FP16),
    ("conv3d", lambda: F.conv3d(empty(1, 2, 4, 4, 4), empty(3, 2, 1, 1, 1)), FP16),
    ("transposed conv3d", lambda: F.conv_transpose3d(empty(1, 2, 4, 4, 4), empty(2, 3, 1, 1, 1)), FLOAT),
    ("batch norm of a half", lambda: F.batch_norm(empty(2, 3, 4, dtype=FP16), empty(3), empty(3)), FLOAT),
    ("bce", lambda: F.binary_cross_entropy(empty(2, dtype=FP16), empty(2, dtype=FP16)), FP16),
    ("upsampling stays", lambda: F.interpolate(image(FP16), scale_factor=2), FP16),
]


@pytest.mark.parametrize(("name", "call", "dtype"), MPS_POLICIES, ids=[p[0] for p in MPS_POLICIES])
def test_dtype_under_the_autocast_of_mps(name: str, call: Callable[[], Tensor], dtype: torch.dtype) -> None:
    with traced("mps"), torch.autocast("mps", dtype=FP16):
        assert call().dtype == dtype


@pytest.mark.parametrize(("kind", "before"), [("cuda", "AccumulateGrad"), ("mps", "ToCopyBackward0")])
def test_cuda_asks_sums_for_float32_and_mps_casts_their_input(kind: str, before: str) -> None:
    x = empty(2, 4, dtype=FP16, trains=True)
    with traced(kind), torch.autocast(kind, dtype=FP16):
        total = x.sum()
    assert total.dtype == FLOAT
    assert type(total.grad_fn.next_functions[0][0]).__name__ == before


def test_binary_cross_entropy_is_refused_on_cuda_as_on_the_device() -> None:
    with traced():
        assert F.binary_cross_entropy(empty(2), empty(2)).dtype == FLOAT
        with torch.autocast("cuda", dtype=FP16):
            with pytest.raises(RuntimeError, match="BCELoss are unsafe to autocast"):
                F.binary_cross_entropy(empty(2), empty(2))
            with torch.autocast("cuda", enabled=False):
                assert F.binary_cross_entropy(empty(2), empty(2)).dtype == FLOAT


def _on(device: str) -> list[tuple[str, Callable[[], Tensor]]]:
    def make(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    def half(*shape: int) -> Tensor:
        return make(*shape, dtype=HALF)

    return [
        ("linear", lambda: F.linear(make(2, 4), make(3, 4), make(3))),
        ("conv2d", lambda: F.conv2d(make(1, 2, 4, 4), make(3, 2, 1, 1))),
        ("attention", lambda: F.scaled_dot_product_attention(*[make(1, 2, 4, 8)] * 3)),
        ("softmax", lambda: F.softmax(half(2, 4), -1)),
        ("layer norm", lambda: F.layer_norm(half(2, 4), (4,), half(4), half(4))),
        ("layer norm, mixed", lambda: F.layer_norm(half(2, 4), (4,), make(4), make(4))),
        ("mse", lambda: F.mse_loss(half(2), half(2))),
        ("smooth l1", lambda: F.smooth_l1_loss(half(2), half(2))),
        ("bce", lambda: F.binary_cross_entropy(half(2), half(2))),
        ("prod", lambda: half(2).prod()),
        ("sum", lambda: half(2).sum()),
        ("cat", lambda: torch.cat([make(2), half(2)])),
        ("stack", lambda: torch.stack([make(2), half(2)])),
        ("stack of halves", lambda: torch.stack([half(2), half(2)])),
        ("add", lambda: make(2) + half(2)),
        ("exp", lambda: half(2).exp()),
        ("pad", lambda: F.pad(half(1, 2, 4), (1, 1), mode="reflect")),
        ("pad 2d", lambda: F.pad(half(1, 2, 4, 4), (1, 1, 1, 1), mode="reflect")),
        ("average pool 3d", lambda: F.avg_pool3d(half(1, 2, 4, 4, 4), 2)),
        ("gelu", lambda: F.gelu(half(2))),
    ]


CPU_CASES = [name for name, _ in _on("cpu")]


@pytest.mark.parametrize("name", CPU_CASES)
def test_dtype_under_cpus_autocast_is_that_of_the_cpu(name: str) -> None:
    with torch.autocast("cpu", dtype=HALF):
        real = dict(_on("cpu"))[name]()
    with traced("cpu"), torch.autocast("cpu", dtype=HALF):
        meta = dict(_on("meta"))[name]()
    assert (meta.dtype, meta.shape) == (real.dtype, real.shape)


def test_autograd_records_the_casts() -> None:
    weight, x = empty(3, 4, trains=True), empty(2, 4)
    with traced():
        with torch.autocast("cuda", dtype=HALF):
            out = F.linear(x, weight)
        out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == FLOAT  # the cast's own backward casts back


def test_default_dtype_is_the_devices() -> None:
    for kind, dtype in (("cuda", FP16), ("mps", FP16), ("cpu", HALF)):
        with traced(kind), torch.autocast(kind):
            assert F.linear(empty(2, 4), empty(3, 4)).dtype == dtype


def test_as_a_decorator() -> None:
    with traced():
        linear = torch.autocast("cuda", dtype=HALF)(F.linear)
        assert linear(empty(2, 4), empty(3, 4)).dtype == HALF
        assert F.linear(empty(2, 4), empty(3, 4)).dtype == FLOAT


# --- nesting


def product() -> torch.dtype:
    return F.linear(empty(2, 4), empty(3, 4)).dtype


def test_nesting() -> None:
    with traced():
        assert product() == FLOAT
        with torch.autocast("cuda", dtype=HALF):
            assert product() == HALF
            with torch.autocast("cuda", enabled=False):
                assert product() == FLOAT
                with torch.autocast("cuda", dtype=FP16):
                    assert product() == FP16
                assert product() == FLOAT
            assert product() == HALF
            with torch.autocast("meta", dtype=FP16):
                assert product() == FP16
            assert product() == HALF
        assert product() == FLOAT


def test_an_exception_leaves_the_state_as_it_was() -> None:
    with traced():
        with pytest.raises(ValueError, match="on the way"), torch.autocast("cuda", dtype=HALF):
            raise ValueError("on the way")
        assert product() == FLOAT
        assert not torch.is_autocast_enabled("cuda")


def test_another_devices_autocast_is_pytorchs_own() -> None:
    with traced(), torch.autocast("cpu", dtype=HALF):
        assert product() == FLOAT  # "meta" tensors stand for CUDA's here
        assert F.linear(torch.ones(2, 4), torch.ones(3, 4)).dtype == HALF


def test_answers_inside() -> None:
    with traced():
        assert not torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", dtype=HALF):
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled("meta")
            assert not torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cuda") == HALF
            assert torch.amp.is_autocast_available("cuda")
            with torch.autocast("cuda", enabled=False):
                assert not torch.is_autocast_enabled("cuda")
        assert not torch.is_autocast_enabled("cuda")


# --- the cache of cast weights


def test_a_weight_is_cast_once_and_until_the_outermost_context_ends() -> None:
    weight = empty(3, 4, trains=True)
    with traced() as autocast:
        with torch.autocast("cuda", dtype=HALF):
            with torch.autocast("cuda", dtype=HALF):
                first = weakref.ref(autocast.cast(HALF, weight))
                assert autocast.cast(HALF, weight) is first()
            gc.collect()
            assert first() is not None  # only the outermost exit drops it
            assert autocast.cast(HALF, weight) is first()
        assert first() is None


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(lambda: empty(4), id="without gradient"),
        pytest.param(lambda: empty(4, trains=True) * 2, id="not a leaf"),
        pytest.param(lambda: empty(4, dtype=FP16, trains=True), id="not float32"),
        pytest.param(lambda: empty(4)[:2].requires_grad_(), id="a view"),
    ],
)
def test_everything_else_is_cast_each_time(tensor: Callable[[], Tensor]) -> None:
    with traced() as autocast, torch.autocast("cuda", dtype=HALF):
        value = tensor()
        assert autocast.cast(HALF, value).dtype == HALF
        assert autocast.cast(HALF, value) is not autocast.cast(HALF, value)


def test_what_has_the_dtype_is_returned_itself() -> None:
    with traced() as autocast, torch.autocast("cuda", dtype=HALF):
        for value in (empty(2, dtype=HALF), empty(2, dtype=torch.float64), torch.ones(2), None, 3):
            assert autocast.cast(HALF, value) is value


def test_without_the_cache_a_weight_is_cast_each_time() -> None:
    weight = empty(3, 4, trains=True)
    with traced() as autocast, torch.autocast("cuda", dtype=HALF, cache_enabled=False):
        assert not torch.is_autocast_cache_enabled()
        assert autocast.cast(HALF, weight) is not autocast.cast(HALF, weight)
        with torch.autocast("cuda", dtype=HALF, cache_enabled=True):
            assert autocast.cast(HALF, weight) is autocast.cast(HALF, weight)
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


def test_the_cache_can_be_cleared_at_any_time() -> None:
    weight = empty(3, 4, trains=True)
    with traced() as autocast, torch.autocast("cuda", dtype=HALF):
        first = weakref.ref(autocast.cast(HALF, weight))
        torch.clear_autocast_cache()
        assert first() is None
        assert autocast.cast(HALF, weight) is autocast.cast(HALF, weight)


# --- nothing is left behind


def _state() -> dict[str, Any]:
    original = torch.amp.autocast_mode.autocast
    return {
        "start": original.__init__,
        "enter": original.__enter__,
        "leave": original.__exit__,
        "is_enabled": torch.is_autocast_enabled,
        "dtype": torch.get_autocast_dtype,
        "available": (torch.amp.is_autocast_available, torch.amp.autocast_mode.is_autocast_available),
        "scaler": torch.cuda.amp.common.amp_definitely_not_available,
        "key": torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.AutocastIPU),
        "ipu": torch.is_autocast_enabled("ipu"),
        "cache": (torch.is_autocast_cache_enabled(), torch.clear_autocast_cache),
        "operators": registered("AutocastIPU"),
        "cpu": F.linear(torch.ones(2, 4), torch.ones(3, 4)).dtype,
        "meta": product(),
    }


def test_everything_is_restored_and_a_second_run_does_the_same() -> None:
    before = _state()
    for _ in range(2):
        with traced(), torch.autocast("cuda", dtype=HALF):
            assert product() == HALF
        assert _state() == before
        with pytest.raises(ValueError, match="on the way"), traced(), torch.autocast("cuda", dtype=HALF):
            raise ValueError("on the way")
        assert _state() == before


def test_pytorchs_own_autocast_works_afterwards() -> None:
    with traced("cpu"), torch.autocast("cpu", dtype=HALF):
        assert product() == HALF
    with torch.autocast("cpu", dtype=HALF):
        assert F.linear(torch.ones(2, 4), torch.ones(3, 4)).dtype == HALF
        assert product() == FLOAT  # on meta PyTorch itself does nothing


def test_no_warning_on_a_machine_without_the_device() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with traced():
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda", dtype=FP16):
                nn.Linear(4, 3, device="meta")(empty(2, 4))
            assert scaler.is_enabled()


# --- torchvision's own operators


@pytest.mark.parametrize("dtype", [HALF, FP16])
def test_torchvisions_operators_run_in_float32_and_give_back_what_came(dtype: torch.dtype) -> None:
    # torchvision/csrc/ops/autocast/roi_align_kernel.cpp: both cast to float32, the result to the input's dtype
    from torchvision.ops import roi_align

    with traced(), torch.autocast("cuda", dtype=dtype):
        pooled = roi_align(empty(1, 3, 8, 8, dtype=dtype), empty(2, 5), output_size=4)
        assert pooled.dtype == dtype
        assert roi_align(empty(1, 3, 8, 8), empty(2, 5, dtype=dtype), output_size=4).dtype == FLOAT
    with pytest.raises(RuntimeError, match="same type"):
        roi_align(empty(1, 3, 8, 8, dtype=dtype), empty(2, 5), output_size=4)


def test_torchvisions_operators_on_the_cpu_do_the_same() -> None:
    from torchvision.ops import roi_align

    boxes = torch.tensor([[0.0, 0.0, 0.0, 4.0, 4.0]])
    with torch.autocast("cpu", dtype=HALF):
        there = roi_align(torch.ones(1, 3, 8, 8, dtype=HALF), boxes, output_size=4)
    with traced("cpu"), torch.autocast("cpu", dtype=HALF):
        here = roi_align(empty(1, 3, 8, 8, dtype=HALF), empty(1, 5), output_size=4)
    assert (here.dtype, here.shape) == (there.dtype, there.shape)

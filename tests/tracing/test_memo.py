"""Operators that answer from memory, against the meta kernels that they were asked of before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sizer.tracing.device import Device
from sizer.tracing.meta.memo import InPlaceMemo, Memo, makes_tensors, memoized
from sizer.tracing.recorder import Recorder
from sizer.tracing.values.known import tensors_of

aten = torch.ops.aten


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Counted:
    """An operator that counts how often it is asked."""

    def __init__(self, func: Any) -> None:
        self.func, self.calls = func, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.func(*args, **kwargs)


def looks(value: Any) -> Any:
    """All of a result but its memory."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.untyped_storage().nbytes()
    return type(value), [looks(item) for item in value] if isinstance(value, (list, tuple)) else value


HEADS = empty(2, 3, 8, 16, dtype=torch.bfloat16)
PICTURE, ROWS, IDS = empty(2, 3, 8, 8), empty(4, 6), empty(4, 6, dtype=torch.int64)
QUESTIONS = [
    (aten.mul.Tensor, (ROWS.t(), 2.5), {}),
    (aten.add.Tensor, (ROWS, ROWS.t().contiguous().t()), {"alpha": 2}),
    (aten.mean.dim, (ROWS, [-1], True), {"dtype": torch.float64}),
    (aten.cat.default, ([ROWS, ROWS], 1), {}),
    (aten.convolution.default, (PICTURE, empty(5, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}),
    (aten.embedding.default, (empty(10, 3), IDS), {}),
    (aten._to_copy.default, (ROWS,), {"dtype": torch.bfloat16}),
    (aten.native_layer_norm.default, (ROWS, [6], empty(6), empty(6), 1e-5), {}),
    (aten.max_pool2d_with_indices.default, (PICTURE, [2, 2]), {}),
    (aten.scalar_tensor.default, (2.5,), {"dtype": torch.bfloat16, "device": torch.device("meta")}),
    (aten._scaled_dot_product_flash_attention.default, (HEADS, HEADS, HEADS), {}),  # two of its results are lengths
    (
        aten.native_layer_norm_backward.default,  # (gradient of input, none of weight, none of bias)
        (ROWS, ROWS, [6], empty(4, 1), empty(4, 1), empty(6), empty(6), [True, False, False]),
        {},
    ),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), QUESTIONS, ids=[str(func) for func, *_ in QUESTIONS])
def test_the_second_answer_is_the_first_in_new_memory(func, args, kwargs):
    counted = Counted(func)
    memo = Memo(counted)
    first, second = memo(*args, **kwargs), memo(*args, **kwargs)
    assert counted.calls == 1
    assert looks(first) == looks(second) == looks(func(*args, **kwargs))
    places = [t.untyped_storage()._cdata for t in tensors_of([first, second])]
    assert len(places) == len(set(places))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((IDS, 1), (IDS, 1.0)),  # int64, float32
        ((empty(3, dtype=torch.bool), 1), (empty(3, dtype=torch.bool), True)),  # int64, bool
        ((ROWS, ROWS), (ROWS, empty(4, 1))),
        ((ROWS, ROWS), (ROWS.t().contiguous().t(),) * 2),  # rows, columns
        ((ROWS, ROWS), (ROWS.bfloat16(), ROWS.bfloat16())),
    ],
    ids=["numbers", "truth", "shapes", "strides", "dtypes"],
)
def test_questions_that_differ_are_asked_each(one, other):
    counted = Counted(aten.mul.Tensor)
    memo = Memo(counted)
    assert looks(memo(*one)) == looks(aten.mul.Tensor(*one))
    assert looks(memo(*other)) == looks(aten.mul.Tensor(*other))
    assert counted.calls == 2


def test_the_default_dtype_is_part_of_the_question():
    memo = Memo(aten.mul.Tensor)
    assert memo(IDS, 0.5).dtype == torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert memo(IDS, 0.5).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten._unsafe_view.default, (ROWS, [24])),  # its schema does not say that memory is shared
        (aten.mul.Tensor, (ROWS, torch.ones(()))),  # a tensor that holds a value
        (aten.mul.Tensor, (empty(3, dtype=torch.complex64), 2)),  # may be a conjugate
    ],
    ids=["shared memory", "a value", "complex"],
)
def test_what_shapes_do_not_decide_is_asked_each_time(func, args):
    counted = Counted(func)
    memo = Memo(counted)
    assert looks(memo(*args)) == looks(memo(*args))
    assert counted.calls == 2


def test_a_view_keeps_the_memory_of_its_own_argument():
    memo = Memo(aten._unsafe_view.default)
    for tensor in (empty(4, 6), empty(4, 6)):
        assert memo(tensor, [24]).untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_traces_for_one_kind_of_device_remember_together():
    one, other = Recorder(Device("cuda", (8, 0))), Recorder(Device("cpu"))
    ours, theirs = (recorder._plan(aten.mm.default).run for recorder in (one, Recorder(Device("cuda", (9, 0)))))
    assert ours is theirs
    assert other._plan(aten.mm.default).run is not ours


def test_results_beyond_the_most_take_the_place_of_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sizer.tracing.meta.memo.MOST_RESULTS", 2)
    counted = Counted(aten.mm.default)
    memo = Memo(counted)
    for size in (3, 4, 5, 5, 3):
        assert memo(empty(size, 2), empty(2, 2)).shape == (size, 2)
    assert counted.calls == 4, "that of 5 rows is remembered, that of 3 is not any more"


def test_errors_are_not_remembered():
    memo = Memo(aten.mm.default)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a and b must have same reduction dim"):
            memo(ROWS, ROWS)


@pytest.mark.parametrize(
    ("func", "makes"),
    [
        (aten.mm.default, True),
        (aten.cat.default, True),
        (aten.add_.Tensor, False),  # writes to its argument
        (aten.view.default, False),
        (aten.split.Tensor, False),  # views in a list
        (aten.add.out, False),
        (aten.arange.default, False),  # takes no tensor
        (torch.ops.prims.add.default, False),  # somebody else's
    ],
    ids=str,
)
def test_operators_that_make_tensors_by_their_schema(func, makes):
    assert makes_tensors(func) is makes


@pytest.mark.parametrize(
    ("func", "others"),
    [
        (aten.add_.Tensor, (empty(6),)),
        (aten.addcdiv_.default, (ROWS, ROWS)),
        (aten.lerp_.Scalar, (ROWS, 0.5)),
        (aten.relu_.default, ()),
    ],
    ids=str,
)
def test_in_place_an_operator_returns_the_tensor_itself(func, others):
    counted = Counted(func)
    memo = InPlaceMemo(counted)
    for tensor in (empty(4, 6), empty(4, 6)):
        before = looks(tensor)
        assert memo(tensor, *others) is tensor
        assert looks(tensor) == before == looks(func(empty(4, 6), *others))
    assert counted.calls == 1
    memo(empty(4, 6).t().contiguous().t(), *others)  # strides of another kind
    assert counted.calls == 2


def test_in_place_errors_are_not_remembered():
    memo = InPlaceMemo(aten.add_.Tensor)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broadcast shape"):
            memo(empty(6), ROWS)  # would have to grow


@pytest.mark.parametrize(
    ("func", "kind"),
    [
        (aten.mul_.Tensor, InPlaceMemo),
        (aten.mm.default, Memo),
        (aten.t_.default, type(aten.t_.default)),  # changes its argument's shape
        (aten.resize_.default, type(aten.resize_.default)),
        (aten.add.out, type(aten.add.out)),
    ],
    ids=str,
)
def test_what_is_remembered_of_an_operator(func, kind):
    assert type(memoized(func)) is kind

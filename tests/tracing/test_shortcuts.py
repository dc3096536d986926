"""Every shortcut against the meta kernel that it stands for: it declines, or it returns the same shapes, strides and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sizer.tracing.meta import shortcuts
from sizer.tracing.meta.shortcuts import COMPARISONS, FOREACH, IN_PLACE, POINTWISE, SHORTCUTS
from sizer.tracing.values.known import LARGEST_FLOATS

NUMBERS = {"weight": 0.5, "exponent": 2, "negative_slope": 0.1, "value": 2, "scalar": 2, "threshold": 0}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    """What broadcasts together, of every layout."""
    picture = empty(2, 3, 4, 4, dtype=dtype)
    return {
        "contiguous": picture,
        "channels last": picture.contiguous(memory_format=torch.channels_last),
        "channels last of one channel": empty(2, 1, 4, 4, dtype=dtype).contiguous(memory_format=torch.channels_last),
        "transposed": picture.transpose(2, 3),
        "sliced": empty(2, 3, 4, 8, dtype=dtype)[..., :4],
        "sliced inside": empty(2, 6, 4, 4, dtype=dtype)[:, 3:],
        "sliced column": empty(2, 3, 4, 8, dtype=dtype)[..., 3:4],
        "expanded": empty(1, 3, 4, 4, dtype=dtype).expand(2, 3, 4, 4),
        "row": empty(4, dtype=dtype),
        "per channel": empty(3, 1, 1, dtype=dtype),
        "one of each": empty(1, 1, 1, 1, dtype=dtype),
        "number": empty(dtype=dtype),
    }


FLOATS, HALVES = tensors(torch.float32), tensors(torch.bfloat16)
MIXED = {**FLOATS, **{f"{name}, half": HALVES[name] for name in ("contiguous", "row", "number")},
         "integers": empty(4, dtype=torch.int64)}  # fmt: skip


def by_schema(func: Any) -> Iterator[tuple]:
    """Positional arguments of a pointwise operator: every pair of layouts, dtypes mixed, numbers where they are asked for."""
    names = [a.name for a in func._schema.arguments if not a.kwarg_only]
    kinds = [str(a.type) for a in func._schema.arguments if not a.kwarg_only]
    count = kinds.count("Tensor")
    rest = tuple(_number(name, kind) for name, kind in zip(names[count:], kinds[count:], strict=True))
    pools = [list(HALVES.values())] if count > 1 else []
    for pool in (list(MIXED.values()), *pools):
        for chosen in product(pool, repeat=min(count, 2)):
            yield (*chosen, *rest)
            if count == 3:
                yield (*chosen[:1], *chosen[1:] * 2, *rest)
    if count == 3:
        for chosen in product([FLOATS[n] for n in ("contiguous", "row", "per channel", "transposed")], repeat=3):
            yield (*chosen, *rest)
    if count == 2 and len(names) == 2:
        yield (FLOATS["contiguous"], 2)
        yield (FLOATS["number"], 2.5)


def _number(name: str, kind: str) -> Any:
    return {"bool": False}.get(kind, NUMBERS.get(name, 1))


def of_lists(func: Any) -> Iterator[tuple]:
    """Arguments of a `_foreach_` operator: lists of two tensors, each with the number, numbers or tensor asked for."""
    arguments = [a for a in func._schema.arguments if not a.kwarg_only]
    lists = sum(str(a.type) == "List[Tensor]" for a in arguments)
    dense = [FLOATS["contiguous"], FLOATS["channels last"], FLOATS["transposed"], FLOATS["row"], FLOATS["number"]]
    strided = [FLOATS["sliced"], FLOATS["expanded"]]
    pairs = [[a, b] for a, b in product(dense, dense)] + [[s, FLOATS["row"]] for s in strided]
    pairs += [[HALVES["contiguous"], HALVES["row"]], [HALVES["contiguous"], FLOATS["row"]]]
    pairs += [[MIXED["integers"], FLOATS["row"]]]
    for pair in pairs:
        others = [pair, [HALVES["contiguous"], HALVES["row"]], [FLOATS["number"]] * 2]
        others += [[FLOATS[layout], pair[1]] for layout in ("sliced", "channels last")]
        for other in others if lists > 1 else [pair]:
            for single in (empty(), empty(dtype=torch.bfloat16)):
                yield (pair, *[other] * (lists - 1), *(_rest(a, single) for a in arguments[lists:]))


def _rest(argument: Any, single: Tensor) -> Any:
    if str(argument.type) == "Tensor":
        return torch.ones(2) if argument.name == "scalars" else single  # "scalars" are read on the CPU
    return [2.0, 3.0] if str(argument.type) == "List[number]" else NUMBERS.get(argument.name, 2)


def _normalized() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs [N, C, ..] of every layout with weight and bias [C], also float32 beside halves."""
    for pool in (FLOATS, HALVES):
        for name in ("contiguous", "channels last", "transposed", "sliced"):
            for dtype in (torch.float32, torch.bfloat16):
                yield pool[name], empty(3, dtype=dtype), empty(3, dtype=dtype)
    yield empty(8, 3), empty(3), empty(3)


def batch_norms(training: tuple[bool, ...] = (True, False)) -> Iterator[tuple]:
    for (x, weight, bias), trains in product(_normalized(), training):
        yield (x, weight, bias, empty(3), empty(3), trains, 0.1, 1e-5)


def batch_norms_without_weight() -> Iterator[tuple]:
    yield from batch_norms((True,))
    for x, _, _ in _normalized():
        yield (x, None, None, empty(3), empty(3), True, 0.1, 1e-5)


def cudnn_batch_norms_backward() -> Iterator[tuple]:
    for x, weight, _ in _normalized():
        rest = (weight, *[empty(3) for _ in range(4)], 1e-5, empty(0, dtype=torch.uint8))
        yield (x, x, *rest)
        yield (x, empty(*x.shape, dtype=x.dtype), *rest)


def batch_norms_backward() -> Iterator[tuple]:
    # The gradient of the input is always wanted here: the meta kernel makes it even where the mask does not want it.
    for (x, weight, _), wanted in product(_normalized(), ([True] * 3, [True, False, False], [True, False, True])):
        for affine in (weight, None):
            yield (x, x, affine, empty(3), empty(3), empty(3), empty(3), True, 1e-5, wanted)


def _layers() -> Iterator[tuple[Tensor, list[int], Tensor | None, Tensor | None]]:
    for x in (*FLOATS.values(), *HALVES.values()):
        if x.dim() and x.shape[-1] == 4:
            for dtype in (torch.float32, torch.bfloat16):
                yield x, [4], empty(4, dtype=dtype), empty(4, dtype=dtype)
            yield x, [4], None, None
            yield x, list(x.shape), empty(*x.shape, dtype=x.dtype), None
    yield empty(2, 4, dtype=torch.float64), [4], empty(4, dtype=torch.float64), None


def layer_norms() -> Iterator[tuple]:
    for x, shape, weight, bias in _layers():
        yield (x, shape, weight, bias, 1e-5)


def layer_norms_backward() -> Iterator[tuple]:
    for (x, shape, weight, bias), wanted in product(_layers(), ([True] * 3, [True, False, True], [False, True, False])):
        rows = empty(*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
        yield (x, x, shape, rows, rows, weight, bias, wanted)
        yield (empty(*x.shape, dtype=x.dtype), x, shape, rows, rows, weight, bias, wanted)


def dropouts() -> Iterator[tuple]:
    for x, train in product((*FLOATS.values(), *HALVES.values()), (True, False)):
        yield (x, 0.1, train)


def dropouts_backward() -> Iterator[tuple]:
    for x in (*FLOATS.values(), *HALVES.values()):
        yield (x, torch.empty_like(x, dtype=torch.bool), 1.1)


def zeros() -> Iterator[tuple]:
    for x in (*FLOATS.values(), *HALVES.values()):
        yield (x,)
    large = LARGEST_FLOATS + 2
    yield (empty(large),)
    yield (empty(large // 2, 2).t(),)
    yield (empty(large, dtype=torch.int64),)


def pictures(*options: object) -> Callable[[], Iterator[tuple]]:
    def arguments() -> Iterator[tuple]:
        shapes = (
            empty(2, 3, 4, 5),
            empty(1, 2, 2, 2, dtype=torch.bfloat16),
            empty(2, 3, 5, 4).transpose(2, 3),
            empty(2, 3, 4),
        )
        for x, size in product(shapes, ([8, 10], [1, 1], [3, 7])):
            yield (x, size, *options)

    return arguments


def choices() -> Iterator[tuple]:
    layouts = [FLOATS[name] for name in ("contiguous", "sliced", "transposed", "channels last", "number", "row")]
    for condition, left, right in product(layouts, repeat=3):
        yield (condition.to(torch.bool), left, right)
    for condition in ("sliced", "row"):
        yield (torch.empty_like(FLOATS[condition], dtype=torch.bool), FLOATS["contiguous"], HALVES["contiguous"])


def sums() -> Iterator[tuple]:
    for x in (*FLOATS.values(), *HALVES.values(), empty(3, 1, 2), empty(4, dtype=torch.int64)):
        for dims in ([0], [-1], [0, 1], [0, 2, 3], [1, 1], [7], []):
            yield from ((x, dims), (x, dims, True), (x, dims, False))


def lists_to_join() -> Iterator[tuple]:
    layouts = [
        *FLOATS.values(),
        HALVES["contiguous"],
        empty(0),
        empty(5, 1, 1, 1),
        empty(5, 3, 1, 1),
        empty(2, 3, 4, 7),
    ]
    for left, right in product(layouts, repeat=2):
        for dim in (0, 1, -1):
            yield ([left, right], dim)
    yield ([FLOATS["row"], FLOATS["row"]],)
    yield ([FLOATS["row"]], 0)


WRITTEN_OUT = {
    "where": choices,
    "sum": sums,
    "cat": lists_to_join,
    "upsample_nearest2d": pictures(),
    "upsample_bilinear2d": pictures(False),
    "upsample_bicubic2d": pictures(True),
    "cudnn_batch_norm": batch_norms,
    "cudnn_batch_norm_backward": cudnn_batch_norms_backward,
    "native_batch_norm": batch_norms,
    "_native_batch_norm_legit": batch_norms_without_weight,
    "native_batch_norm_backward": batch_norms_backward,
    "native_layer_norm": layer_norms,
    "native_layer_norm_backward": layer_norms_backward,
    "native_dropout": dropouts,
    "native_dropout_backward": dropouts_backward,
    "zeros_like": zeros,
}


def argument_sets(func: Any) -> Iterator[tuple]:
    name = func.overloadpacket.__name__
    if name in WRITTEN_OUT:
        return WRITTEN_OUT[name]()
    return of_lists(func) if name.startswith("_foreach_") else by_schema(func)


def looks(value: Any) -> Any:
    """Shape, stride and dtype of every tensor of a result."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device.type
    return [looks(v) for v in value] if isinstance(value, (list, tuple)) else value


def kernel_answer(func: Any, args: tuple) -> Any:
    """What the meta kernel returns, or what it raises (warnings are errors here) over arguments that do not fit."""
    try:
        return looks(func(*args))
    except (RuntimeError, IndexError, ValueError, UserWarning) as error:
        return error


def check(func: Any, shortcut: Any) -> int:
    """The number of argument sets that the shortcut answered, each like the meta kernel."""
    answered = 0
    for args in argument_sets(func):
        answer = shortcut(args)
        if answer is NotImplemented:
            continue
        expected = kernel_answer(func, args)
        if isinstance(expected, Exception):
            continue  # the caller's mistake: on a device the operator raises as well
        assert looks(answer) == expected, f"{func} {looks(args)}"
        answered += 1
    return answered


@pytest.mark.parametrize("func", SHORTCUTS, ids=str)
def test_shortcut_declines_or_agrees(func: Any) -> None:
    assert check(func, SHORTCUTS[func]) > 0


def test_every_name_is_in_the_table() -> None:
    # each name once; `_foreach_` names twice, as themselves and in place
    names = sum(len(names.split()) for names in (POINTWISE, COMPARISONS, IN_PLACE)) + 2 * len(FOREACH)
    assert len(SHORTCUTS) == len(shortcuts._OF_NORMS) + len(shortcuts._OTHERS) + names


@pytest.mark.parametrize("func", [f for f in SHORTCUTS if f.overloadpacket.__name__ in IN_PLACE], ids=str)
def test_in_place_returns_its_argument(func: Any) -> None:
    x = empty(2, 3)
    rest = (empty(2, 3),) if "other" in str(func._schema) or "src" in str(func._schema) else (2,)
    assert shortcuts.in_place((x, *rest)) is x


def test_batch_norm_backward_without_gradient_of_the_input_is_like_the_cpu_kernel() -> None:
    func = torch.ops.aten.native_batch_norm_backward.default
    wanted = [False, True, True]
    on_cpu = func(torch.ones(2, 3, 4), torch.ones(2, 3, 4), *[torch.ones(3) for _ in range(5)], True, 1e-5, wanted)
    on_meta = SHORTCUTS[func]((empty(2, 3, 4), empty(2, 3, 4), *[empty(3) for _ in range(5)], True, 1e-5, wanted))
    assert on_cpu[0] is None
    assert on_meta[0] is None
    assert [tuple(t.shape) for t in on_meta[1:]] == [tuple(t.shape) for t in on_cpu[1:]] == [(3,), (3,)]


def test_the_comparison_can_fail() -> None:
    add = torch.ops.aten.add.Tensor

    def wrong(args: tuple) -> Tensor:
        return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")

    with pytest.raises(AssertionError, match=r"aten\.add\.Tensor"):
        check(add, wrong)

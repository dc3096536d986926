"""Known values: followed through operators, forgotten when they become unknown, and replaced by stand-ins that are noted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from sizer.tracing.recorder import Recorder
from sizer.tracing.trace import recording
from sizer.tracing.values.known import LARGEST_FLOATS, LARGEST_INTEGERS, KnownValues
from sizer.tracing.values.twins import Twin, layout_of
from tests.tracing.known import known, under


def unknown(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Random numbers: what nobody can know."""
    return torch.rand(shape).mul(5).to(dtype)


# --- followed

FOLLOWED: list[tuple[str, Callable[[], Tensor], Any]] = [
    ("data", lambda: torch.tensor([1, 2, 3]), [1, 2, 3]),
    ("data with a tensor inside", lambda: torch.tensor([torch.tensor(4), 5]), [4, 5]),
    (
        "data on the CPU with a tensor inside",
        lambda: torch.tensor([torch.tensor(4), 5], device="cpu").to("meta"),
        [4, 5],
    ),
    ("one_hot", lambda: torch.nn.functional.one_hot(torch.tensor([2, 0])), [[0, 0, 1], [1, 0, 0]]),
    ("as_tensor", lambda: torch.as_tensor([1.5, 2.5]), [1.5, 2.5]),
    ("new_tensor", lambda: torch.zeros(1).new_tensor([7, 8]), [7.0, 8.0]),
    ("moved from the CPU", lambda: torch.ones(2, device="cpu").to("meta"), [1.0, 1.0]),
    ("arange", lambda: torch.arange(3), [0, 1, 2]),
    ("linspace", lambda: torch.linspace(0, 1, 3), [0.0, 0.5, 1.0]),
    ("zeros", lambda: torch.zeros(2, dtype=torch.int64), [0, 0]),
    ("full", lambda: torch.full((2,), 5), [5, 5]),
    ("comparison", lambda: torch.arange(4) > 1, [False, False, True, True]),
    ("logic", lambda: (torch.arange(3) > 0) & (torch.arange(3) < 2), [False, True, False]),
    ("view", lambda: torch.arange(6).view(2, 3)[1], [3, 4, 5]),
    ("transposed", lambda: torch.arange(4).view(2, 2).t(), [[0, 2], [1, 3]]),
    ("expanded", lambda: torch.tensor([3]).expand(3), [3, 3, 3]),
    ("step", lambda: torch.arange(6)[::2], [0, 2, 4]),
    ("nonzero", lambda: (torch.arange(4) % 2).nonzero(), [[1], [3]]),
    ("where of one", lambda: torch.where(torch.arange(4) > 1)[0], [2, 3]),
    ("boolean index", lambda: torch.arange(4)[torch.tensor([True, False, False, True])], [0, 3]),
    ("masked_select", lambda: torch.arange(4).masked_select(torch.arange(4) > 1), [2, 3]),
    ("integer index", lambda: torch.arange(4)[torch.tensor([3, 1])], [3, 1]),
    ("unique", lambda: torch.unique(torch.tensor([3, 1, 3])), [1, 3]),
    ("unique_consecutive", lambda: torch.unique_consecutive(torch.tensor([1, 1, 3, 1])), [1, 3, 1]),
    ("bincount", lambda: torch.bincount(torch.tensor([0, 2, 2])), [1, 0, 2]),
    ("repeat_interleave", lambda: torch.repeat_interleave(torch.tensor([5, 6]), torch.tensor([1, 2])), [5, 6, 6]),
    ("cumsum", lambda: torch.arange(4).cumsum(0), [0, 1, 3, 6]),
    ("argmax", lambda: torch.tensor([1, 9, 3]).argmax(), 1),
    ("sort", lambda: torch.tensor([3, 1, 2]).sort()[0], [1, 2, 3]),
    ("max with indices", lambda: torch.tensor([3, 9]).max(0)[1], 1),
    ("split", lambda: torch.arange(4).split([1, 3])[1], [1, 2, 3]),
    ("cat", lambda: torch.cat([torch.arange(2), torch.arange(1)]), [0, 1, 0]),
    ("floats", lambda: torch.arange(2) * 0.5, [0.0, 0.5]),
    ("cast", lambda: torch.arange(2).to(torch.float16), [0.0, 1.0]),
]


@pytest.mark.parametrize(("name", "code", "expected"), FOLLOWED, ids=[case[0] for case in FOLLOWED])
def test_followed(recorder: Recorder, name: str, code: Callable[[], Tensor], expected: Any) -> None:
    tensor = under(recorder, code)
    assert known(recorder, tensor) == expected
    assert list(tensor.shape) == list(torch.tensor(expected).shape)
    assert not recorder.notes  # nothing had to be assumed


def test_integers_without_values_are_followed_while_constructors_go_to_meta() -> None:
    values = KnownValues()
    with torch.device("meta"):  # in force where C++ calls an operator, too: no function mode has been taken off for it
        made = torch.empty(2, dtype=torch.int64)
        values.follow(torch.ops.aten.empty.memory_format, ([2],), {"dtype": torch.int64}, made)
    assert values.get(made).tolist() == [0, 0]


ANSWERED: list[tuple[str, Callable[[], Any], Any]] = [
    ("item", lambda: torch.arange(4)[2].item(), 2),
    ("tolist", lambda: torch.arange(3).tolist(), [0, 1, 2]),
    ("nested tolist", lambda: torch.arange(4).view(2, 2).tolist(), [[0, 1], [2, 3]]),
    ("bool", lambda: bool((torch.arange(3) == 1).any()), True),
    ("int", lambda: int(torch.arange(4).sum()), 6),
    ("float", lambda: float(torch.linspace(0, 1, 5)[1]), 0.25),
    ("cpu", lambda: torch.arange(2).cpu().tolist(), [0, 1]),
    ("numpy", lambda: torch.arange(2).cpu().numpy().tolist(), [0, 1]),
    ("equal", lambda: torch.equal(torch.arange(2), torch.arange(2)), True),
    ("not equal", lambda: torch.equal(torch.arange(2), torch.zeros(2, dtype=torch.int64)), False),
    ("allclose", lambda: torch.allclose(torch.ones(2), torch.ones(2) * 2), False),
    ("index", lambda: [10, 20, 30][torch.tensor(1)], 20),
]


@pytest.mark.parametrize(("name", "code", "expected"), ANSWERED, ids=[case[0] for case in ANSWERED])
def test_answered(recorder: Recorder, name: str, code: Callable[[], Any], expected: Any) -> None:
    answer = under(recorder, code)
    assert (answer, type(answer)) == (expected, type(expected))
    assert not recorder.notes


# --- written in place


def test_a_write_is_seen_through_every_view(recorder: Recorder) -> None:
    def code() -> tuple[Tensor, Tensor, Tensor]:
        whole = torch.zeros(2, 3, dtype=torch.int64)
        row, column = whole[1], whole[:, 0]
        row.fill_(5)
        column += 1
        whole[0, 2] = 9
        return whole, row, column

    whole, row, column = under(recorder, code)
    # rows [0 0 0] [5 5 5]; plus 1 in the first column; 9 at the end of the first row
    assert known(recorder, whole) == [[1, 0, 9], [6, 5, 5]]
    assert known(recorder, row) == [6, 5, 5]
    assert known(recorder, column) == [1, 6]


def test_masked_writes(recorder: Recorder) -> None:
    def code() -> list[Tensor]:
        filled, indexed, scattered = torch.arange(4), torch.arange(4), torch.zeros(3, dtype=torch.int64)
        filled.masked_fill_(filled > 1, 0)
        indexed[indexed > 2] = 7
        scattered.scatter_(0, torch.tensor([1]), 4)
        return [filled, indexed, scattered]

    assert [known(recorder, t) for t in under(recorder, code)] == [[0, 1, 0, 0], [0, 1, 2, 7], [0, 4, 0]]


def test_an_unknown_tensor_is_known_once_it_is_overwritten(recorder: Recorder) -> None:
    def code() -> list[Tensor]:
        filled, copied, zeroed, parts = (unknown(3) for _ in range(4))
        filled.fill_(2)
        copied.copy_(torch.arange(3))
        zeroed.zero_()
        parts[0] = 1
        return [filled, copied, zeroed, parts]

    assert [known(recorder, t) for t in under(recorder, code)] == [[2, 2, 2], [0, 1, 2], [0, 0, 0], None]


# --- forgotten

FORGOTTEN: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("unknown added", lambda t: t.add_(unknown(3))),
    ("unknown copied", lambda t: t.copy_(unknown(3))),
    ("unknown copied into a view", lambda t: t[:1].copy_(unknown(1))),
    ("unknown index written", lambda t: t.scatter_(0, unknown(1), 4)),
    ("unknown mask written", lambda t: t.masked_fill_(unknown(3, dtype=torch.bool), 4)),
    ("random", lambda t: t.random_(5)),
]


@pytest.mark.parametrize(("name", "write"), FORGOTTEN, ids=[case[0] for case in FORGOTTEN])
def test_forgotten(recorder: Recorder, name: str, write: Callable[[Tensor], Any]) -> None:
    def code() -> tuple[Tensor, Tensor]:
        tensor = torch.arange(3)
        view = tensor[1:]
        assert known(recorder, view) == [1, 2]
        write(tensor)
        return tensor, view

    assert [known(recorder, t) for t in under(recorder, code)] == [None, None]


NEVER_KNOWN: list[tuple[str, Callable[[], Tensor]]] = [
    ("empty", lambda: torch.empty(3)),
    ("empty_like", lambda: torch.empty_like(torch.zeros(3))),
    ("rand", lambda: torch.rand(3)),
    ("randn", lambda: torch.randn(3)),
    ("randint", lambda: torch.randint(0, 5, (3,))),
    ("bernoulli", lambda: torch.bernoulli(torch.ones(3))),
    ("dropout", lambda: torch.dropout(torch.ones(3), 0.5, True)),
    ("normal in place", lambda: torch.zeros(3).normal_()),
    ("from an unknown", lambda: torch.arange(3) + unknown(3)),
    ("compared with an unknown", lambda: unknown(3) > 1),
    ("too many integers", lambda: torch.zeros(LARGEST_INTEGERS + 1, dtype=torch.bool)),
    ("too many floats", lambda: torch.zeros(LARGEST_FLOATS + 1)),
]


@pytest.mark.parametrize(("name", "code"), NEVER_KNOWN, ids=[case[0] for case in NEVER_KNOWN])
def test_never_known(recorder: Recorder, name: str, code: Callable[[], Tensor]) -> None:
    assert known(recorder, under(recorder, code)) is None


# --- stand-ins


def boxes_and_scores() -> tuple[Tensor, Tensor]:
    return unknown(5, 4, dtype=torch.float32), unknown(5, dtype=torch.float32)


STAND_INS: list[tuple[str, Callable[[], Any], Any, str]] = [
    ("item of an integer", lambda: unknown().item(), 0, "value of a tensor was taken as 0"),
    ("item of a boolean", lambda: bool(unknown(3, dtype=torch.bool).any()), False, "value of a tensor was taken as False"),
    ("item of a float", lambda: unknown(dtype=torch.float32).item(), 1.0, "value of a tensor was taken as 1.0"),
    ("equal", lambda: torch.equal(unknown(3), unknown(3)), True, "taken as equal"),
    ("equal of other shapes", lambda: torch.equal(unknown(3), unknown(2)), False, "taken as equal"),
    ("nonzero", lambda: unknown(2, 3).nonzero(), (6, 2), "nonzero of unknown values was taken"),
    ("masked_select", lambda: unknown(4).masked_select(unknown(4, dtype=torch.bool)), (4,), "masked_select with an unknown mask"),
    ("boolean index", lambda: unknown(4, 2)[unknown(4, dtype=torch.bool)], (4, 2), "an unknown boolean mask was taken"),
    ("unique", lambda: unknown(5).unique(), (5,), "unique of unknown values was taken to find no duplicates"),
    ("unique_consecutive", lambda: torch.unique_consecutive(unknown(5)), (5,), "no duplicates"),
    ("bincount", lambda: torch.bincount(unknown(5), minlength=3), (3,), "bincount of unknown values"),
    ("repeat_interleave", lambda: torch.repeat_interleave(unknown(2), unknown(2)), (2,), "repeat_interleave with unknown"),
    ("to the CPU", lambda: unknown(2).tolist(), [0, 0], "values copied to the CPU were taken as zeros"),
    ("non-maximum suppression", lambda: torchvision.ops.nms(*boxes_and_scores(), 0.5),
     (5,), "suppression of unknown boxes was taken to keep every box"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "code", "expected", "note"), STAND_INS, ids=[case[0] for case in STAND_INS])
def test_stand_in(recorder: Recorder, name: str, code: Callable[[], Any], expected: Any, note: str) -> None:
    answer = under(recorder, code)
    assert (tuple(answer.shape) if isinstance(answer, Tensor) else answer) == expected
    assert len(recorder.notes) == 1
    assert note in next(iter(recorder.notes))


def test_a_stand_in_names_the_module_that_asked_once(recorder: Recorder) -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[: int(x.sum().item()) + 1]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Router(), Router()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(self.first(x)))

    def code() -> Tensor:
        model = Model()
        recorder.paths.name(model)
        return model(unknown(3))

    assert under(recorder, code).shape == (1,)
    assert list(recorder.notes) == [f"the value of a tensor was taken as 0 (in {path})" for path in ("first", "second")]


def test_known_boxes_are_suppressed_for_real(recorder: Recorder) -> None:
    def code() -> Tensor:
        boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9], [5, 5, 6, 6]])
        return torchvision.ops.nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5)

    # the second box overlaps the first by 1.9/2 of their union
    assert known(recorder, under(recorder, code)) == [0, 2]
    assert not recorder.notes


# --- twins


def test_a_twin_lives_as_long_as_its_storage(recorder: Recorder) -> None:
    with recording(recorder), torch.device("meta"):
        tensor = torch.arange(4)
        view = tensor[2:]
        assert len(recorder.values._twins) == 1
        del tensor
        assert known(recorder, view) == [2, 3]
        del view
        assert not recorder.values._twins


def test_what_nobody_asks_for_is_not_computed_and_else_from_what_it_was_made_of(recorder: Recorder) -> None:
    values = recorder.values
    with recorder, torch.device("meta"):
        angles = torch.arange(4096.0)[:, None] * torch.full((2,), 2.0)
        turned = torch.cat((angles, angles), dim=-1).cos().to(torch.bfloat16)
        assert len(values._waiting) == 4
        angles.add_(1.0)  # what was made of them before stays as it was
    expected = (2 * torch.arange(4096.0)).cos().to(torch.bfloat16)
    assert torch.equal(values.get(turned), expected[:, None].expand(4096, 4))
    assert torch.equal(values.get(angles[:, 0]), 2 * torch.arange(4096.0) + 1)
    del angles, turned
    assert not values._twins and not values._waiting


def test_a_twin_gives_the_same_view_until_somebody_changes_it() -> None:
    twin = Twin(torch.arange(4.0).untyped_storage())
    layout = layout_of(torch.empty(2, 2))
    view = twin.view(layout)
    assert twin.view(layout) is view
    assert twin.view(layout_of(torch.empty(4))).tolist() == [0, 1, 2, 3]
    twin.view(layout).t_()
    assert twin.view(layout).tolist() == [[0, 1], [2, 3]]
    twin.view(layout).set_(torch.zeros(2, 2))
    assert twin.view(layout).tolist() == [[0, 1], [2, 3]]
    with torch.inference_mode():
        twin.view(layout_of(torch.empty(4)))
    assert twin.view(layout_of(torch.empty(4))).add_(1).tolist() == [1, 2, 3, 4]


def test_known_values_cost_the_traced_device_nothing(recorder: Recorder) -> None:
    tensor = under(recorder, lambda: torch.arange(4) > 1)
    # arange 4*8 bytes, released; the comparison 4*1
    assert recorder.log.sizes == [32, 4]
    assert recorder.log.alive() == [recorder.block_of(tensor)] == [1]


def test_constructors_go_to_meta_as_before_in_a_process_that_traced_first() -> None:
    # torch/utils/_device.py keeps its list of constructors from its first use on
    code = (
        "import torch\n"
        "from sizer.tracing.device import Device\n"
        "from sizer.tracing.recorder import Recorder\n"
        "from sizer.tracing.trace import recording\n"
        "with recording(Recorder(Device('cuda', (8, 0)))), torch.device('meta'):\n"
        "    torch.zeros(1)\n"
        "with torch.device('meta'):\n"
        "    print(torch.tensor(0).device)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "meta"

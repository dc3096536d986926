"""Views that no dispatch mode sees: the tapes are those of a trace whose mode sees each of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import sizer.tracing.trace
from sizer.architecture.blueprint import Blueprint, Example
from sizer.catalogue.gpus import GPUS
from sizer.estimating.work import work_of
from sizer.query.text import parse_query
from sizer.tape.tape import Tape
from sizer.tracing.device import Device
from sizer.tracing.meta.composite import HANDLERS
from sizer.tracing.meta.views import views_unseen
from sizer.tracing.trace import build, trace

aten = torch.ops.aten
DEVICES = {
    "cuda": lambda: Device("cuda", GPUS["a100-40gb"].capability),
    "cpu": lambda: Device("cpu"),
    "mps": lambda: Device("mps"),
}


class _Sliced(nn.Module):
    """Has views of all kinds, in whose backward pass zeros are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 128)

    @staticmethod
    @lru_cache(maxsize=4)
    def table(rows: int, device: torch.device) -> Tensor:
        return torch.arange(rows, device=device).float()[:, None] * 2

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.mix(x.view(-1, 4, 64)).transpose(1, 2).split(64, dim=1)
        table = self.table(64, x.device).squeeze(1).expand(4, 64).t()
        whole = torch.stack([one[:, at] * other.select(1, at) for at in range(8)], dim=1) + table[:8]
        return (whole.unsqueeze(1) @ whole.mT.unsqueeze(1)).diagonal(dim1=-2, dim2=-1).permute(1, 0, 2)[0, 1:]


def blueprint(make: Callable[[], nn.Module] = _Sliced) -> Blueprint:
    return Blueprint(
        name="sliced",
        class_name="sliced",
        build=make,
        example=lambda batch, training: Example(args=(torch.zeros(batch, 4, 64),)),
        loss=lambda module, example: module(*example.args).square().sum(),
        predict=lambda module, example: module(*example.args),
    )


def tape(device: Device, make: Callable[[], nn.Module] = _Sliced, *, batch: int = 3) -> Tape:
    work = work_of(parse_query("arch=torchvision:resnet18"), "float32")
    described = blueprint(make)
    return trace(described, build(described), work, batch=batch, device=device)


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", DEVICES)
def test_tapes_are_those_of_a_mode_that_sees_views(kind: str, monkeypatch):
    unseen = tape(DEVICES[kind]())
    monkeypatch.setattr(sizer.tracing.trace, "views_unseen", lambda *given: nullcontext())
    assert tape(DEVICES[kind]()) == unseen


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_gradient_of_a_view_is_what_its_operators_make(kind: str, monkeypatch):
    """zeros, select and copy_ of native/TensorShape.cpp, run one by one."""
    whole, asked = tape(DEVICES[kind]()), []
    for func in (aten.select_backward.default, aten.slice_backward.default, aten.diagonal_backward.default):
        monkeypatch.setitem(HANDLERS, func, lambda *given: asked.append(given[1]) or NotImplemented)
    monkeypatch.setattr("sizer.tracing.device_rules._rules", sizer.tracing.device_rules._rules.__wrapped__)
    assert tape(DEVICES[kind]()) == whole
    assert {*asked} == {aten.select_backward.default, aten.slice_backward.default, aten.diagonal_backward.default}


def test_modes_see_views_again_after_the_context():
    x, module = torch.empty(4, 4, device="meta"), nn.Linear(2, 2)
    with _Seen() as seen:
        with views_unseen(module, lambda func: func is not aten.t.default):
            x.view(16)
            x.t()
        x.view(16)
    assert seen.operators == [aten.t.default, aten.view.default]


def test_a_tensor_that_takes_operators_itself_sees_its_views():
    x = torch.ones(4, 4)
    with _Seen() as seen, views_unseen(nn.Linear(2, 2), lambda func: True):
        x.view(16)
        pair = TwoTensor(x, 2 * x)
        assert torch.equal(pair.view(16).b, 2 * x.view(16))
    assert aten.view.default in seen.operators
    with _Seen() as seen, views_unseen(nn.Linear(2, 2), lambda func: True):
        nn.Parameter(x).view(16)
    assert aten.view.default not in seen.operators


def test_a_module_of_such_tensors_keeps_its_views_seen():
    module = nn.Module()
    module.weight = nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)))
    with _Seen() as seen, views_unseen(module, lambda func: True):
        torch.ones(4, 4).view(16)
    assert aten.view.default in seen.operators


def test_what_static_methods_cache_is_made_anew_by_each_trace():
    """A second trace of one module holds the table as the first one does, not as a view of what is there."""
    work = work_of(parse_query("arch=torchvision:resnet18"), "float32")
    described = blueprint()
    module = build(described)
    first, second = (trace(described, module, work, batch=3, device=DEVICES["cuda"]()) for _ in range(2))
    assert first == second
    assert "aten.arange.default" in first.op_names

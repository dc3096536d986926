"""Calls of `torch.cuda.empty_cache()` in traced code give free memory back in the replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sizer.estimating.custom import size_module, size_step
from sizer.tape.affine import fit_affine
from sizer.tape.archive import Traced, pack, unpack
from sizer.tape.family import TapeFamily
from sizer.tracing.device import Device
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace
from tests.device.blueprints import blueprint

MIB = 2**20


def loading(empty: Callable[[], None]) -> Callable[[], Callable[[], None]]:
    """A setup that makes 64 MiB and drops them, then calls `empty`."""

    def setup() -> Callable[[], None]:
        model = nn.Linear(8, 4).cuda()
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        empty()
        x = torch.zeros(2, 8, device="cuda")
        return lambda: model(x).sum().backward()

    return setup


def reserved_at_load(empty: Callable[[], None], gpu: str = "a100-80gb") -> int:
    return size_step(loading(empty), gpu=gpu).estimates[0].phases[0].reserved_bytes


@pytest.mark.parametrize(
    "empty", ["torch.cuda.empty_cache()", "torch.accelerator.empty_cache()", "torch.xpu.empty_cache()"]
)
def test_it_gives_free_segments_back(empty: str) -> None:
    assert reserved_at_load(lambda: None) == (64 + 2) * MIB
    assert reserved_at_load(lambda: eval(empty)) == 2 * MIB


def test_each_device_has_its_own() -> None:
    assert reserved_at_load(lambda: torch.cuda.empty_cache(), gpu="m2-ultra-64gb") == (1024 + 8) * MIB
    assert reserved_at_load(lambda: torch.mps.empty_cache(), gpu="m2-ultra-64gb") == 8 * MIB


class Emptying(nn.Linear):
    """A layer that empties the cache in its forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.empty_cache()
        return super().forward(x)


def test_it_comes_again_at_every_batch_size_and_in_every_step() -> None:
    made = blueprint(lambda: nn.Sequential(Emptying(64, 64), nn.ReLU(), Emptying(64, 8)), 64)
    module, work, device = build(made), Work(mode="training", dtype="float32"), Device("cuda", (8, 0))
    first = trace(made, module, work, batch=2, device=device)
    line = fit_affine(first, trace(made, module, work, batch=3, device=device, short=True))
    line.check(trace(made, module, work, batch=5, device=device))
    assert len(first.empties()) == 4
    family = TapeFamily(lines=((1, line),))
    assert unpack(pack(Traced(family=family))).family.evaluate(7).empties() == first.empties()


def test_nothing_is_emptied_on_the_cpu() -> None:
    report = size_module(lambda: Emptying(8, 4), (torch.zeros(2, 8),), gpu="cpu")
    assert all(use.reserved_bytes == use.allocated_bytes for use in report.estimates[0].phases)

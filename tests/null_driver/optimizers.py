"""Two steps of every optimizer in every implementation over the null driver: PyTorch's own peaks, as JSON.

python -m tests.null_driver.optimizers
"""

from __future__ import annotations

import inspect
import json
import os
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import pairwise
from unittest import mock

import torch
from torch import nn

from sizer.architecture.blueprint import Blueprint
from sizer.catalogue.optimizers import BITSANDBYTES, OPTIMIZERS
from sizer.tracing.steps import Steps, Work
from sizer.tracing.trace import repeatable
from tests.device.blueprints import blueprint
from tests.null_driver.emptied import empty_the_allocator

WIDTHS = (96, 160, 640)  # the larger matrix has as many elements as are paged


def layers() -> nn.Module:
    """Matrices and vectors of several sizes: Muon takes the former alone."""
    pairs = pairwise(WIDTHS)
    return nn.Sequential(*[part for a, b in pairs for part in (nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU())])


def plan() -> Blueprint:
    """The blueprint of these layers."""
    return blueprint(layers, WIDTHS[0])


def works(dtype: str) -> list[Work]:
    """One for each optimizer and implementation that PyTorch has on CUDA, its own choice among them."""
    found = [
        Work(mode="training", dtype=dtype, optimizer=name, optimizer_impl=implementation)
        for name, row in OPTIMIZERS.items()
        if name != "none" and find_spec(row.package)
        for implementation in (None, *row.implementations)
    ]
    # torch/optim/adagrad.py: up to 2.11 at least `cuda_unsupported=True`, in 2.15 no more
    fused = "cuda_unsupported=True" not in inspect.getsource(inspect.getmodule(torch.optim.Adagrad))
    return [one for one in found if fused or (one.optimizer, one.optimizer_impl) != ("adagrad", "fused")]


def peaks(work: Work) -> list[int]:
    """The most bytes allocated and reserved in two steps, from an empty allocator on."""
    empty_the_allocator()
    made = plan()
    # what torchao compiles is no kernel without a GPU; its states are made before
    compiled = mock.patch.object(torch, "compile", lambda function, **options: lambda *args: None)
    with repeatable(), compiled if OPTIMIZERS[work.optimizer].compiled else nullcontext():
        module = made.build().to("cuda")
        for _ in Steps(made, module, made.example(8, True), work, device=torch.device("cuda")).run():
            pass
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: object = None) -> torch.Tensor:
    """Managed memory, which no driver is there to give: the host's."""
    pages = torch.empty(shape, dtype=dtype, device="cpu")
    pages.is_paged, pages.page_deviceid = True, 0
    return pages


if __name__ == "__main__":
    torch.cuda.init()
    if find_spec(BITSANDBYTES):
        from bitsandbytes import functional

        functional.get_paged = get_paged
    print(json.dumps([peaks(work) for work in works("float32")]), flush=True)
    os._exit(0)  # nothing to take down: the device is none

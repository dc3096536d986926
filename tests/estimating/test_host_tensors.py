"""Trace your own steps whose host tensors are made, moved or grouped by other processes or by PyTorch."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from sizer.estimating.custom import size_step

of_2_15 = pytest.mark.skipif(torch.__version__ < "2.15", reason="the right values are those of PyTorch 2.15")

# 8 images of 3 × 224 × 224 in float32 take 4,816,896 B, those of 3 × 32 × 32 98,304. A step that copies a batch to the device and
# adds 1 holds the copy and the sum on the device. The batch stays on the host.
# A worker of PyTorch 2.11 fails as it stacks samples.
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=of_2_15)])
@pytest.mark.parametrize("pixels", [32, 224])
def test_batches_of_a_loader_are_on_the_host(pixels: int, workers: int, pinned: bool) -> None:
    seen: list = []

    def setup() -> Callable[[], None]:
        data = TensorDataset(torch.zeros(32, 3, pixels, pixels))
        batches = iter(DataLoader(data, batch_size=8, num_workers=workers, pin_memory=pinned))
        torch.zeros(1, device="cuda")

        def step() -> None:
            (batch,) = next(batches)
            seen.append((batch.device.type, batch.is_cuda, batch.is_pinned()))
            batch.cuda(non_blocking=True) + 1

        return step

    estimate = size_step(setup, gpu="h100-80gb").estimates[0]
    assert seen == [("cpu", False, pinned)] * 2
    assert estimate.peak_allocated_bytes == 2 * 8 * 3 * pixels**2 * 4


def test_pinned_tensors_say_so() -> None:
    seen: dict[str, bool] = {}

    def setup() -> Callable[[], None]:
        small, large = torch.zeros(5), torch.zeros(2**19)
        made = {"small": small.pin_memory(), "large": large.pin_memory()}
        made["made"] = torch.empty(5, pin_memory=True)
        made["made large"], made["view"] = torch.empty(2**19, pin_memory=True), made["large"][1:]
        made["again"] = made["small"].pin_memory()
        made |= {"not": small, "not large": large, "device": made["small"].cuda()}
        seen.update({name: tensor.is_pinned() for name, tensor in made.items()})
        assert made["again"] is made["small"]
        return lambda: None

    size_step(setup, gpu="h100-80gb")
    assert {name for name, pinned in seen.items() if not pinned} == {"not", "not large", "device"}


# Weights and gradients of the device, and the workspace of 8.1 MiB while matrices are multiplied. The average takes nothing there.
# The null driver of an RTX 4090 takes as many bytes.
@of_2_15
@pytest.mark.parametrize(
    ("model", "settings", "bytes_"),
    [
        (lambda: nn.Linear(4096, 4096, bias=False), {"multi_avg_fn": get_ema_multi_avg_fn(0.99)}, 143_000_576),
        (lambda: nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024)), {"use_buffers": True}, 17_004_032),
    ],
    ids=["weights", "buffers"],
)
def test_an_average_on_the_host_is_updated_there(
    model: Callable[[], nn.Module], settings: dict[str, Any], bytes_: int
) -> None:
    def setup() -> Callable[[], None]:
        made = model().cuda()
        average = AveragedModel(made, device="cpu", **settings)
        x = torch.randn(8, next(made.parameters()).shape[1])

        def step() -> None:
            made(x.cuda()).sum().backward()
            made.zero_grad()
            average.update_parameters(made)

        return step

    assert size_step(setup, gpu="rtx-4090").estimates[0].peak_allocated_bytes == bytes_


def test_gradients_on_the_host_are_clipped_there() -> None:
    seen: list[str] = []

    def setup() -> Callable[[], None]:
        weights = [torch.zeros(1024, 1024, requires_grad=True), torch.zeros(10, requires_grad=True)]
        device = torch.zeros(1024, 1024, device="cuda")

        def step() -> None:
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            seen.append(clip_grad_norm_(weights, 1.0).device.type)
            device.copy_(weights[0].detach())

        return step

    estimate = size_step(setup, gpu="rtx-4090").estimates[0]
    assert seen == ["cpu", "cpu"]
    assert estimate.peak_allocated_bytes == 4 * 2**20


def test_nested_tensors_move_to_the_device() -> None:
    def setup() -> Callable[[], None]:
        rows = torch.nested.nested_tensor([torch.zeros(5, 64), torch.zeros(9, 64)], layout=torch.jagged)
        seen.extend(moved.values().is_cuda for moved in (rows.cuda(), rows.to("cuda"), rows.to("cuda", torch.bfloat16)))
        return lambda: None

    seen: list[bool] = []
    size_step(setup, gpu="h100-80gb")
    assert seen == [True, True, True]


@pytest.mark.parametrize("saves", ["state", "module", "safetensors", "host values", "host values by safetensors"])
def test_a_checkpoint_is_not_replaced_by_one_without_values(tmp_path: Path, saves: str) -> None:
    path = tmp_path / "best.pt"
    path.write_bytes(b"weeks of work")

    def save(model: nn.Module) -> None:
        state = model.state_dict()
        if saves == "safetensors":
            save_file({name: tensor.cpu() for name, tensor in state.items()}, path)
        elif saves == "host values by safetensors":
            save_file({"losses": torch.zeros(3)}, path)
        elif saves == "host values":
            torch.save({"losses": torch.zeros(3)}, path)
        else:
            torch.save(model if saves == "module" else {"model": state}, path)

    def setup() -> Callable[[], None]:
        model = nn.Linear(1024, 1024).cuda()

        def step() -> None:
            model(torch.randn(8, 1024, device="cuda")).sum().backward()
            save(model)

        return step

    report = size_step(setup)
    told = [text for text in report.uncounted if "best.pt" in text]
    if saves.startswith("host values"):
        load = load_file if saves.endswith("safetensors") else torch.load
        assert load(path)["losses"].tolist() == [0, 0, 0] and not told
    else:
        assert path.read_bytes() == b"weeks of work" and len(told) == 1
    # weights and gradients, of 4 x (1024 x 1024 + 1024) bytes each, are what lasts
    assert report.estimates[0].weights_bytes == 4 * (1024 * 1024 + 1024)


def test_a_checkpoint_in_memory_is_read_again() -> None:
    def setup() -> Callable[[], None]:
        model = nn.Linear(8, 8).cuda()

        def step() -> None:
            buffer = io.BytesIO()
            torch.save(model.state_dict(), buffer)
            buffer.seek(0)
            model.load_state_dict(torch.load(buffer))

        return step

    assert size_step(setup).estimates[0].weights_bytes == 4 * (8 * 8 + 8)

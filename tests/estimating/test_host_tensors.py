"""Host tensors of a step of one's own, which other processes or PyTorch's own code make, move or group."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from sizer.estimating.custom import size_step

of_2_15 = pytest.mark.skipif(torch.__version__ < "2.15", reason="the right values are those of PyTorch 2.15")

# 8 images of 3 × 224 × 224 in float32 take 4,816,896 B, those of 3 × 32 × 32 98,304. A step that copies a batch to the device and
# adds to it holds the copy and the sum; the batch itself stays on the host, whoever made it.
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


# A weight of 64 MiB on the device, its gradient, and while it is multiplied a workspace of 8.1 MiB. The average takes nothing.
# The null driver of an RTX 4090 takes as many bytes.
@of_2_15
def test_an_average_of_weights_on_the_host_is_updated_there() -> None:
    def setup() -> Callable[[], None]:
        model = nn.Linear(4096, 4096, bias=False).cuda()
        average = AveragedModel(model, device="cpu", multi_avg_fn=get_ema_multi_avg_fn(0.99))
        x = torch.randn(8, 4096)

        def step() -> None:
            model(x.cuda()).sum().backward()
            model.zero_grad()
            average.update_parameters(model)

        return step

    assert size_step(setup, gpu="rtx-4090").estimates[0].peak_allocated_bytes == 143_000_576


# 17,004,032 B over the null driver: 4 MiB of weights and of gradients, and a workspace of 8.1 MiB.
@of_2_15
def test_an_average_with_buffers_is_updated_on_the_host() -> None:
    def setup() -> Callable[[], None]:
        model = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024)).cuda()
        average = AveragedModel(model, device="cpu", use_buffers=True)
        x = torch.randn(8, 1024)

        def step() -> None:
            model(x.cuda()).sum().backward()
            model.zero_grad()
            average.update_parameters(model)

        return step

    assert size_step(setup, gpu="rtx-4090").estimates[0].peak_allocated_bytes == 17_004_032


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


@pytest.mark.parametrize("saves", ["state", "module", "safetensors", "of the host"])
def test_a_checkpoint_is_not_replaced_by_one_without_values(tmp_path: Path, saves: str) -> None:
    path = tmp_path / "best.pt"
    path.write_bytes(b"weeks of work")

    def save(model: nn.Module) -> None:
        state = model.state_dict()
        if saves == "safetensors":
            save_file({name: tensor.cpu() for name, tensor in state.items()}, path)
        elif saves == "of the host":
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
    if saves == "of the host":
        assert torch.load(path)["losses"].tolist() == [0, 0, 0] and not told
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

"""What FSDP2 offloads is on the host: the device holds none of it, and the host's bytes are those of its tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn, zeros
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.optim import AdamW

import sizer


def offloading(width: int, implementation: str, *, pinned: bool = True) -> Callable[[], Callable[[], None]]:
    """A step of one layer, written as for a GPU."""

    def setup() -> Callable[[], None]:
        layer = nn.Linear(width, width, bias=False, device="cuda")
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=pinned))
        optimizer = AdamW(layer.parameters(), **{implementation: True} if implementation != "loop" else {})
        x = zeros(2, width, device="cuda")

        def step() -> None:
            layer(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return setup


@pytest.mark.parametrize(
    ("implementation", "temporaries"),
    [("loop", 2), ("fused", 0), ("foreach", 1)],  # the root of the second moment, divided into another one or not
)
def test_the_host_holds_what_is_offloaded(implementation: str, temporaries: int) -> None:
    (found,) = sizer.size_step(offloading(256, implementation), gpu="h100-80gb", world=2).estimates
    shard = 4 * 128 * 256
    step = 4 if implementation == "fused" else 0  # a tensor on the parameter's device; elsewhere on the CPU by name
    # parameter, gradient, two moments, and what the step holds; all are powers of two
    assert found.host_bytes == (1 + 1 + 2 + temporaries) * shard + step
    assert (found.weights_bytes, found.gradients_bytes, found.optimizer_bytes) == (0, 0, 0)


@pytest.mark.parametrize("pinned", [True, False])
def test_what_is_pinned_comes_in_powers_of_two(pinned: bool) -> None:
    (found,) = sizer.size_step(offloading(192, "fused", pinned=pinned), gpu="h100-80gb", world=2).estimates
    shard = 4 * 96 * 192  # 73,728
    assert found.host_bytes == (2 * 131_072 if pinned else 2 * shard) + 2 * shard + 4

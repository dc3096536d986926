"""torch.cuda as it answers on a machine with as many GPUs as a host has, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

PER_HOST = 8  # GPUs of one machine; a launcher sets LOCAL_RANK to a rank's number among them


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """What code may ask of the GPUs: compute capability, memory in bytes and name, of which the last two may be unknown."""

    capability: tuple[int, int]
    total_bytes: int | None = None
    name: str | None = None


@contextmanager
def devices_answer(gpu: Accelerator, local_rank: int) -> Iterator[None]:
    """Within the context torch.cuda and torch.accelerator answer for a host with GPUs of a kind; streams are the trace's own.

    `torch.meta`, which PyTorch looks for as the module of the devices of a mesh over meta tensors (`_get_device_handle` of
    torch/distributed/device_mesh.py), is torch.cuda.
    """
    device = torch.device("cuda", local_rank)

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    major, minor = gpu.capability
    told = {"major": major, "minor": minor, "name": gpu.name, "total_memory": gpu.total_bytes}
    properties = SimpleNamespace(**{name: value for name, value in told.items() if value is not None})
    of_accelerators = {
        "is_available": lambda: True,
        "device_count": lambda: PER_HOST,
        "synchronize": nothing,
        "current_device_index": lambda: local_rank,
        "set_device_index": nothing,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_stream": lambda device=None: torch.cuda.current_stream(device),
    }
    of_cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": nothing,
        "_lazy_init": nothing,
        "device_count": lambda: PER_HOST,
        "current_device": lambda: local_rank,
        "set_device": nothing,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: gpu.capability,
        "is_bf16_supported": lambda *args, **kwargs: gpu.capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": nothing,
    }
    # what `torch.cuda.device` and `torch.accelerator.device_index` call as contexts
    of_cuda |= dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), lambda index: local_rank)
    of_bindings = {
        "_get_accelerator": lambda *args: device,
        "_accelerator_exchangeDevice": lambda index: local_rank,
        "_accelerator_maybeExchangeDevice": lambda index: local_rank,
    }
    with ExitStack() as stack:
        for module, answers in ((torch.cuda, of_cuda), (torch.accelerator, of_accelerators), (torch._C, of_bindings)):
            for name, answer in answers.items():
                stack.enter_context(mock.patch.object(module, name, answer))
        stack.enter_context(mock.patch.object(torch, "meta", torch.cuda, create=True))
        yield

"""Answers of torch.cuda to PyTorch's compiler for the described device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from sizer.catalogue.hardware import Hardware
from sizer.distributed.described_gpus import properties_of


class NoGuard:
    """Replacement of torch.cuda._DeviceGuard, which Inductor's wrapper enters."""

    def __init__(self, index: int) -> None:
        pass

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


class Generator(torch.Generator):
    """Replacement of the device's generator, with a state on the host (aten/src/ATen/cuda/CUDAGeneratorImpl.h, 2.15)."""

    @property
    def device(self) -> torch.device:
        """Return the described device."""
        return torch.device("cuda", 0)

    def clone_state(self) -> Generator:
        """Return another generator of the device."""
        return Generator()


@contextmanager
def compiler_answers(device: Hardware) -> Iterator[None]:
    """Make torch.cuda, and copies of its functions in Dynamo and Inductor, answer for the device within the context."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._dynamo.variables import torch as folding

    properties, total = properties_of(device), device.gpu.total_bytes

    def nothing() -> Callable[..., None]:
        return lambda *args, **kwargs: None  # a separate function for each name: Dynamo's rules require it

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": nothing(),
        "device_count": torch.cuda.device_count,
        "current_device": torch.cuda.current_device,
        "set_device": nothing(),
        "synchronize": nothing(),
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "mem_get_info": lambda device=None: (total, total),
        "is_bf16_supported": lambda *args, **kwargs: device.capability >= (8, 0),
        "memory_allocated": lambda device=None: 0,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
    }
    bound = {name.lstrip("_"): answer for name, answer in answers.items()} | {"get_raw_stream": lambda index: 0}
    folded = {
        answers[name]: None for name in ("is_available", "get_device_properties", "is_initialized", "current_device")
    }
    # a dry run answers these by a replay
    replayed = not torch.cuda.memory_stats.__module__.startswith("torch.")
    counted: tuple[str, ...] = ("mem_get_info", "memory_allocated") if replayed else ()
    # the trace's own (sizer.tracing.meta.autocast), which Dynamo recognizes by the names of the bindings
    autocast = {name: getattr(torch, name) for name in ("is_autocast_enabled", "get_autocast_dtype")}
    folded |= dict.fromkeys(autocast.values())
    with ExitStack() as stack:
        for name, answer in autocast.items():
            stack.enter_context(mock.patch.object(torch._C, name, answer))
        for name, answer in answers.items():
            if name not in counted:
                stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for name, answer in bound.items():
            if name in vars(CudaInterface):
                stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(answer)))
        worker = staticmethod(answers["get_device_properties"])
        stack.enter_context(mock.patch.object(CudaInterface.Worker, "get_device_properties", worker))
        stack.enter_context(mock.patch.dict(folding.constant_fold_functions, folded))
        stack.enter_context(mock.patch.object(torch.cuda, "_DeviceGuard", NoGuard))
        stack.enter_context(mock.patch.object(torch.cuda, "default_generators", (Generator(),)))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True))
        yield

"""`F.linear_cross_entropy` with options: PyTorch's Python code, which chooses its buffers by the tensors' device.

On CUDA a product of 16-bit matrices gives float32 logits, elsewhere copies in float32 are multiplied
(torch/nn/modules/linear_cross_entropy.py, `_ChunkContext.build`, 2.15).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sizer.tracing.device import Device
from sizer.tracing.meta.accelerators import OnMeta

_ACCUMULATOR = "_linear_cross_entropy_batch_chunked_accumulator"


@contextmanager
def chunked_loss_on(device: Device) -> Iterator[None]:
    """Within the context the chunked loss takes the path of a device. It stays on meta otherwise, with a device of its own."""
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None:  # before PyTorch 2.15
        yield
        return
    told, adjust = torch.device(device.kind), options._adjust
    patches = ExitStack()

    def adjusted(self: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.nn.modules import linear_cross_entropy as module

        accumulate = getattr(module, _ACCUMULATOR)
        if not isinstance(accumulate, _OnDevice):
            patches.enter_context(mock.patch.object(module, _ACCUMULATOR, _OnDevice(accumulate, told)))
        if kwargs["device"].type != "meta":
            return adjust(self, *args, **kwargs)
        with _capability_told(device) if device.kind == "cuda" else nullcontext():
            return adjust(self, *args, **kwargs | {"device": told})

    with patches, mock.patch.object(options, "_adjust", adjusted):
        yield


class _OnDevice:
    """PyTorch's loop over chunks, whose tensors say that they are on a device, and whose buffers are made on meta."""

    def __init__(self, accumulate: Any, told: torch.device) -> None:
        self._accumulate, self._told = accumulate, told

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._told.type == "cpu" or args[0].device.type != "meta":  # on the CPU it does what it does on meta
            return self._accumulate(*args, **kwargs)
        read, name = Tensor.device.__get__, self._accumulate.__module__

        def device_of(tensor: Tensor) -> torch.device:
            return self._told if sys._getframe(1).f_globals.get("__name__") == name else read(tensor)

        with mock.patch.object(Tensor, "device", property(device_of), create=True), OnMeta():
            return self._accumulate(*args, **kwargs)


def _capability_told(device: Device) -> Any:
    return mock.patch.multiple(
        torch.cuda, is_available=lambda: True, get_device_capability=lambda index=None: (device.capability[0], 0)
    )

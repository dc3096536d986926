"""Random draws on the host that a trace leaves out, so that later draws of a script equal those of a device's run.

A large weight of the host is on meta in a trace, so its initial values need not be drawn. But code that draws lengths or crops
after it has created its model would then draw other numbers than over the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

LARGEST_DRAW = 2**26  # elements of a tensor with drawn values, in memory that is freed at once
MOST_DRAWN = 2**28  # elements of all such tensors: some seconds; later numbers then differ


LEFT_OUT = (
    "initial values of large weights were not drawn on the host: sizes that the script draws there afterwards, such as random "
    "lengths, may differ from those of route driver"
)


class HostDraws:
    """Draws for operators over meta tensors that represent tensors of the host."""

    def __init__(self, is_on_host: Callable[[Tensor], bool], note: Callable[[str], None]) -> None:
        """Draw for the tensors for which `is_on_host` is True; call `note` once if the draws end."""
        self._is_on_host, self._note = is_on_host, note
        self._left = MOST_DRAWN

    def draw(self, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Call a function that draws in place for a tensor of the host, and drop the values."""
        count = tensor.numel()
        if count > min(self._left, LARGEST_DRAW):
            self._left = 0
            self._note(LEFT_OUT)
            return
        self._left -= count
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            function(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"), *args, **kwargs)

    @contextmanager
    def rounds_drawn(self) -> Iterator[None]:
        """Repeat `trunc_normal_`'s draws on the host within the context, as long as values are out of bounds."""
        init = nn.init._no_grad_trunc_normal_

        def drawn(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self._left and tensor.device.type == "meta" and self._is_on_host(tensor):
                self.draw(init, tensor, *args, **kwargs)
                return tensor
            return init(tensor, *args, **kwargs)

        with mock.patch.object(nn.init, "_no_grad_trunc_normal_", drawn):
            yield

    def follow(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Draw for an operator that has drawn in place, such as `uniform_`."""
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if self._left and tensor is not None and tensor.device.type == "meta" and self._is_on_host(tensor):
            self.draw(func, tensor, *args[1:], **kwargs)

"""Handlers in place of operators whose meta kernels are not enough, and their requests to the recorder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.values.known import KnownValues, tensors_of


class HandlerContext(AbstractContextManager, Protocol):
    """The recorder as handlers see it; as a context it logs what the handler runs."""

    device: Device
    values: KnownValues
    batch_size: int  # what is spread over unknown places is spread alike within each sample
    crowded: bool  # whether all other ranks are taken to send this one all that they have
    mask_limit: int | None  # elements that an unknown mask is taken to find; None for all
    taken_apart: Any  # the latest operator over a tensor subclass, which runs others on its inner tensors
    unawaited: dict[int, tuple[Tensor, ...]]  # by the storage of a collective's result: what is held until it is waited for
    barriers: dict[str, Tensor]  # by the name of a group: the buffer of its barriers
    sees_inputs: bool  # whether operators are watched by their arguments, too: those of the host, or of streams
    engine_use_count: int  # the use count of a gradient that autograd's engine alone holds

    def stand_in(self, text: str) -> None:
        """Note an assumption about an unknown value, with the module that asked."""

    def see_new(self, tensor: Tensor, made_by: str) -> None:
        """Log a tensor that was made where no dispatch mode sees it."""

    def deferring(self, query: Callable[[int], DeferredSize]) -> AbstractContextManager[None]:
        """Within the context the blocks that come and go are left to size queries, which `query` makes of their bytes."""

    def keep(self, size: DeferredSize) -> None:
        """Log what a library keeps from its first call on."""

    def block_of(self, tensor: Tensor) -> int | None:
        """The block that holds the tensor, or None if it was never logged."""

    def run_kernel(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return what an operator's meta kernel returns, from memory if it can be remembered."""

    def run_logged(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return what an operator returns, logged as if the dispatcher had called it."""

    def corrected(self, func: Any, args: tuple, out: Any) -> Any:
        """Return an operator's result as the device has it, by the table RESULTS."""

    def is_unshared(self, tensor: Tensor) -> bool:
        """Return whether nothing but the caller of the running operator holds this tensor's storage."""


Handler = Callable[[HandlerContext, Any, tuple, dict], Any]
"""Takes the context, the operator and its arguments; returns the operator's result, or NotImplemented to decline."""


def on_meta(real: Any, recorder: HandlerContext, assumption: str | None = None) -> Any:
    """Meta tensors of the shapes of real results, their values remembered, as assumed ones where `assumption` says so."""
    if isinstance(real, (list, tuple)):
        return type(real)(on_meta(r, recorder, assumption) for r in real)
    if not isinstance(real, Tensor):
        return real
    out = torch.empty(real.shape, dtype=real.dtype, device="meta")
    if assumption is None:
        recorder.values.remember(out, real.contiguous())
    else:
        recorder.values.assume(out, real.contiguous(), assumption)
    return out


def note_assumption(recorder: HandlerContext, tensors: list[Tensor]) -> None:
    """Note what the values of these tensors were assumed to be, now that something depends on them."""
    if (text := recorder.values.assumption(tensors)) is not None:
        recorder.stand_in(text)


def involves_meta(args: tuple, kwargs: dict) -> bool:
    return any(t.device.type == "meta" for t in tensors_of(args) + tensors_of(kwargs.values()))

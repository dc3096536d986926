"""Handlers of operators for which meta kernels are not enough, and their requests to the recorder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.values.known import KnownValues, is_meta, tensors_of


class HandlerContext(AbstractContextManager, Protocol):
    """Recorder as handlers see it; as a context it logs the operators that the handler runs."""

    device: Device
    values: KnownValues
    batch_size: int  # assumed positions are spread equally within each sample
    crowded: bool  # whether all other ranks are assumed to send all of their data to this one
    mask_limit: int | None  # elements that an unknown mask is assumed to select; None for all
    taken_apart: Any  # the latest operator over a tensor subclass, which runs other operators on its inner tensors
    unawaited: dict[int, tuple[Tensor, ...]]  # by the storage of a collective's result: tensors held until the wait
    barriers: dict[str, Tensor]  # by the name of a group: the buffer of its barriers
    notes: dict[str, None]  # what the answer says of the trace
    sees_inputs: bool  # whether arguments of operators are watched too: host tensors, or streams
    engine_use_count: int  # the use count of a gradient held only by autograd's engine

    def stand_in(self, text: str) -> None:
        """Note an assumption about an unknown value, with the module that used it."""

    def see_new(self, tensor: Tensor, made_by: str) -> None:
        """Log a tensor that was made where no dispatch mode sees it."""

    def deferring(self, query: Callable[[int], DeferredSize]) -> AbstractContextManager[None]:
        """Make the sizes of blocks within the context size queries, which `query` makes from their bytes."""

    def keep(self, size: DeferredSize) -> None:
        """Log memory that a library keeps from its first call on."""

    def block_of(self, tensor: Tensor) -> int | None:
        """Return the block that holds the tensor, or None if it was never logged."""

    def leave(self, tensor: Tensor) -> None:
        """Log that a tensor's memory has left the device; the tensor itself stays alive."""

    def run_kernel(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return the result of an operator's meta kernel, memoized if possible."""

    def run_logged(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return an operator's result, logged as if the dispatcher had called it."""

    def unlogged(self) -> AbstractContextManager[Any]:
        """Return a context in which operators run by the same rules and known values, and nothing is logged."""

    def corrected(self, func: Any, args: tuple, out: Any) -> Any:
        """Return an operator's result as on the device, by the table RESULTS."""

    def is_unshared(self, tensor: Tensor) -> bool:
        """Return whether only the caller of the running operator holds this tensor's storage."""

    def is_of_node(self, tensor: Tensor) -> bool:
        """Return True if autograd's current node has made the tensor."""


Handler = Callable[[HandlerContext, Any, tuple, dict], Any]
"""Takes the context, the operator and its arguments; returns the operator's result, or NotImplemented to decline."""


def on_meta(real: Any, recorder: HandlerContext, assumption: str | None = None) -> Any:
    """Return meta tensors of the shapes of real results, with their values, which are assumed if `assumption` is given."""
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
    """Note the assumption behind the values of these tensors, now that a result depends on them."""
    if (text := recorder.values.assumption(tensors)) is not None:
        recorder.stand_in(text)


def involves_meta(args: tuple, kwargs: dict) -> bool:
    return any(map(is_meta, tensors_of(args))) or any(map(is_meta, tensors_of(kwargs.values())))

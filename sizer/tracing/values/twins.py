"""Real twin of a meta storage: its bytes, or the computation of them at their first use.

Rotary embeddings and attention masks have known values, and are rarely read. To compute them at once took a third of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
# Operators that the CPU supports for all these dtypes, so that their later computation cannot fail
_LATER = {
    *(_aten.cos.default, _aten.sin.default, _aten.mul.Tensor, _aten.cat.default, _aten._to_copy.default, _aten.clone.default),
    *(_aten.add.Tensor, _aten.sub.Tensor, _aten.neg.default, _aten.where.self),
    *(_aten.bitwise_and.Tensor, _aten.bitwise_or.Tensor, _aten.bitwise_not.default),
    *(_aten.logical_and.default, _aten.logical_or.default, _aten.logical_not.default),
    *(getattr(_aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    *(getattr(_aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge")),
}
_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool}
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_FEWEST = 2**12  # fewest elements of a deferred tensor
DEEPEST = 64  # largest chain of deferred twins

Layout = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]  # dtype, offset, shape and strides in elements


class Twin:
    """CPU storage with the values of a meta storage: `storage`, or the result of `compute` at its first use.

    `sources` are the twins from which it is computed; they must not change until then. `depth` is the number of uncomputed
    twins in a chain up to this one, 0 if it is computed.
    """

    __slots__ = ("__weakref__", "_compute", "_storage", "_view", "depth", "sources")

    def __init__(
        self,
        storage: torch.UntypedStorage | None = None,
        *,
        compute: Callable[[], torch.UntypedStorage] | None = None,
        sources: Collection[Twin] = (),
    ) -> None:
        self._storage, self._compute, self.sources = storage, compute, sources
        self._view: Tensor | None = None  # the latest
        self.depth: int = 0 if compute is None else 1 + max((one.depth for one in sources), default=0)

    @property
    def storage(self) -> torch.UntypedStorage:
        """Storage, computed at its first use."""
        self.settle()
        assert self._storage is not None, "it is settled"
        return self._storage

    def settle(self) -> None:
        """Compute the storage now, because its sources may change."""
        if self._storage is None:
            assert self._compute is not None, "a twin has a storage, or what computes it"
            with _disable_current_modes(), torch.no_grad():
                self._storage = self._compute()
            self._compute, self.sources, self.depth = None, (), 0

    def view(self, layout: Layout) -> Tensor:
        """Return a tensor over the storage with a layout."""
        view, storage = self._view, self.storage
        if view is None or layout_of(view) != layout or view.untyped_storage()._cdata != storage._cdata:
            dtype, *places = layout
            view = torch.empty(0, dtype=dtype, device="cpu").set_(storage, *places)
            self._view = None if view.is_inference() else view  # no operator may change one outside of inference mode
        return view


def layout_of(tensor: Tensor) -> Layout:
    """Return a tensor's dtype, storage offset, shape and stride."""
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


class Held(NamedTuple):
    """Tensor without its meta storage, which it would keep alive."""

    twin: Twin
    layout: Layout


def hold(value: Any, held: Mapping[int, Held]) -> Any:
    """Return an operator's argument with its tensors replaced by their `Held`, by id; devices become the CPU."""
    if isinstance(value, Tensor):
        return held[id(value)]
    if isinstance(value, (list, tuple)):
        return type(value)([hold(one, held) for one in value])
    return on_cpu(value)


def run_on_held(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> torch.UntypedStorage:
    """Return the storage of an operator's result for arguments of `hold`."""
    result = func(*map(_real, args), **{name: _real(value) for name, value in kwargs.items()})
    return result.contiguous().untyped_storage()


def run_on_cpu(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a function on tensors of the CPU that writes to none; integers in float64 if it has no kernel for them.

    Raises what the function raises.
    """
    try:
        return func(*args, **kwargs)
    except NotImplementedError as error:  # such as torch.histc, which CUDA has for integers
        wide, named = tree_map_only(Tensor, _widened, (args, dict(kwargs)))
        try:
            return func(*wide, **named)
        except (RuntimeError, IndexError, TypeError):
            raise error from None


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype in _INTEGERS else tensor


def _real(value: Any) -> Any:
    if isinstance(value, Held):
        return value.twin.view(value.layout)
    return type(value)([_real(one) for one in value]) if isinstance(value, (list, tuple)) else value


def on_cpu(value: Any) -> Any:
    """Return an operator's argument on meta, other than a tensor, as for the CPU."""
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous and its storage has no other elements."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def can_wait(func: Any, inputs: Collection[Tensor], out: Any) -> bool:
    """Return whether an operator's result may be computed later; all its inputs are known."""
    return (
        isinstance(out, Tensor)
        and out.numel() >= _FEWEST
        and func in _LATER  # late, since its hash runs Python code
        and is_whole(out)
        and all(tensor.is_meta and tensor.dtype in _DTYPES for tensor in (out, *inputs))
    )

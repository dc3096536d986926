"""Small values on a device that computes nothing: what kernels would have written is computed on the CPU and put there.

Model code asks tensors ("is the mask all ones?") and takes another way by the answer. On the null driver a device holds zeros,
so under this mode every function whose tensors are all small and known is done again on the CPU, over the device's own memory,
which the host can read and write. A function mode sits above autograd and the dispatcher: unlike a dispatch mode it changes
nothing of what PyTorch allocates.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

LARGEST = 2**21  # elements; token ids, masks, positions and boxes are smaller
_FACTORIES = frozenset(
    {torch.arange, torch.ones, torch.zeros, torch.full, torch.tensor, torch.as_tensor, torch.linspace, torch.eye,
     torch.tril_indices, torch.triu_indices, torch.scalar_tensor, torch.from_numpy, torch.asarray}
)  # fmt: skip

# Their results have as many elements as values say, which the device's own kernel would have counted.
_COUNTED = frozenset(
    {torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.masked_select, Tensor.masked_select,
     torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive, torch.bincount, Tensor.bincount,
     torch.repeat_interleave, Tensor.repeat_interleave, torch.nn.functional.one_hot}
)  # fmt: skip

# What a kernel computed is a finite number. A device that holds zeros says that it is none, and code mends what is not broken.
_FINITE = frozenset({torch.isfinite, Tensor.isfinite})


class KnownValues(TorchFunctionMode):
    """Within the mode, small tensors on the null device hold what a real one would have computed."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()  # addresses of storages whose bytes are true

    def tell(self, tensor: Tensor, value: float) -> None:
        """Write a value into a small tensor, and take it for known: what operators of a DTensor's parts have left there."""
        on_host(tensor).fill_(value)
        self._known.add(_address(tensor))

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if active_fake_mode() is not None or any(map(is_traceable_wrapper_subclass, _tensors((args, kwargs)))):
            return func(
                *args, **kwargs
            )  # nothing is computed, or by operators of a DTensor's parts, which no function mode sees
        if func in _COUNTED and all(self._is_known(t) for t in _tensors((args, kwargs))):
            return self._counted(func, args, kwargs)
        out = func(*args, **kwargs)
        if any(map(is_traceable_wrapper_subclass, _tensors(out))):
            return out
        results = [t for t in _tensors(out) if t.is_cuda]
        given = _tensors((args, kwargs))
        if func in _FINITE and not all(self._is_known(t) for t in given):
            self._write(out, torch.ones(out.shape, dtype=torch.bool), results)
            return out
        if results or any(t.is_cuda for t in given):
            self._follow(func, args, kwargs, out, given, results)
        return out

    def _follow(
        self, func: Any, args: tuple, kwargs: dict, out: Any, given: list[Tensor], results: list[Tensor]
    ) -> None:
        fresh = [t for t in results if not any(_address(t) == _address(g) for g in given if g.is_cuda)]
        if (given or func in _FACTORIES) and all(self._is_known(t) for t in given) and _is_small(results):
            try:
                with torch.no_grad():
                    mirrored = func(*_to_host(args), **_to_host(kwargs))
            except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError):
                mirrored = None  # not for the CPU: unknown
            if mirrored is not None:
                self._write(out, mirrored, fresh)
                return
        for tensor in results:
            self._known.discard(_address(tensor))

    def _counted(self, func: Any, args: tuple, kwargs: dict) -> Any:
        (device,) = {t.device for t in _tensors((args, kwargs))}
        with torch.no_grad():
            out = pytree.tree_map_only(Tensor, lambda t: t.to(device), func(*_to_host(args), **_to_host(kwargs)))
        self._known.update(_address(t) for t in _tensors(out) if t.is_cuda and t.numel())
        return out

    def _write(self, out: Any, mirrored: Any, fresh: list[Tensor]) -> None:
        ours = {id(t) for t in fresh}
        for tensor, value in zip(_tensors(out), _tensors(mirrored), strict=False):
            if id(tensor) in ours and tensor.numel():
                on_host(tensor).copy_(value)
                self._known.add(_address(tensor))

    def _is_known(self, tensor: Tensor) -> bool:
        if not _is_small([tensor]):
            return False
        return not tensor.is_cuda or not tensor.numel() or _address(tensor) in self._known


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_small(tensors: list[Tensor]) -> bool:
    return all(
        t.layout == torch.strided and t.numel() <= LARGEST and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        for t in tensors
    )


def _address(tensor: Tensor) -> int:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    # not by the storage's Python object: with one a storage counts as shared, and no gradient is added to it in place
    return torch._C._data_address(tensor)


def on_host(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of a tensor on the null device."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = torch.frombuffer((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
    return torch.as_strided(raw.view(tensor.dtype), tensor.shape, tensor.stride(), tensor.storage_offset())


def _to_host(value: Any) -> Any:
    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return on_host(leaf.detach()) if leaf.is_cuda else leaf.detach()
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.startswith("cuda")):
            return torch.device("cpu")
        return leaf

    return pytree.tree_map(convert, value)

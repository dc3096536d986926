"""Refuse user code that a trace cannot follow; read checkpoints and write none; receive and group host tensors."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils.data._utils import pin_memory as pinning

from sizer.base.errors import TraceError
from sizer.tracing.meta.host_memory import HostMemory


@contextmanager
def compiling_refused() -> Iterator[None]:
    """Refuse within the context to call code that `torch.compile` has compiled."""
    compile_ = torch.compile
    with ExitStack() as stack:

        def watch() -> None:
            frames = sys.modules["torch._dynamo.eval_frame"]
            own = frames._callback_from_stance
            if own is not refuse:
                callbacks.append(own)
                stack.enter_context(mock.patch.object(frames, "_callback_from_stance", refuse))

        def refuse(callback: Any) -> Any:
            # None and False mean no compiler: `torch.compiler.disable`, and the value restored after a call
            if callable(callback) and sys._getframe(1).f_code.co_name != "__exit__" and not _is_eager(callback):
                function = sys._getframe(1).f_locals.get("fn")
                name = getattr(function, "__qualname__", None) or "a function"
                raise TraceError(
                    f"torch.compile has compiled {name}, which the step calls: compiled code cannot be traced",
                    todo="call it without torch.compile; the figures are then those of eager mode",
                )
            return callbacks[-1](callback)

        def compile_and_watch(*args: Any, **kwargs: Any) -> Any:
            compiled = compile_(*args, **kwargs)
            if "torch._dynamo.eval_frame" in sys.modules:
                watch()
            return compiled

        callbacks: list[Callable[[Any], Any]] = []
        if "torch._dynamo.eval_frame" in sys.modules:
            watch()
        stack.enter_context(mock.patch.object(torch, "compile", compile_and_watch))
        yield


def _is_eager(callback: Any) -> bool:
    """Return True if a compiler's callback runs operators eagerly (backend="eager"), which a trace can follow."""
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    compiler = getattr(callback, "compiler_fn", callback)
    return getattr(compiler, "__name__", "") == "eager"


def refuse_low_bits(parameters: Iterable[nn.Parameter | None]) -> None:
    """Raise TraceError if bitsandbytes would quantise a parameter on its way to the device, and has not done so yet."""
    if "bitsandbytes" not in sys.modules:
        return
    from bitsandbytes.nn import Int8Params, Params4bit

    for one in parameters:
        eight = isinstance(one, Int8Params) and not one.has_fp16_weights and one.CB is None
        if eight or (isinstance(one, Params4bit) and not one.bnb_quantized):
            kind, key = ("8-bit", "int8") if eight else ("4-bit", "nf4")
            raise TraceError(
                f"bitsandbytes' {kind} layers in code of your own cannot be traced: their weights are quantised on the device",
                given=type(one).__name__,
                todo=f"ask for the model by a query with weights={key}",
            )


def refuse_paged(optimizer: object) -> None:
    """Raise TraceError for a paged optimizer of bitsandbytes: its memory comes from the CUDA driver, which ends the process."""
    if getattr(optimizer, "is_paged", False):
        raise TraceError(
            "paged optimizers are not traced",
            given=type(optimizer).__name__,
            allowed="the same optimizer without Paged",
            todo="run the script with `sizer run --route driver`",
        )


# --------------------------------------------------------------------------------------------------------- checkpoints


@contextmanager
def checkpoints_read_at_once() -> Iterator[None]:
    """Make transformers load weight by weight within the context, through its environment variable.

    Source: transformers/core_model_loading.py, read in 5.17 and 5.23.
    """
    with mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "true"}):
        yield


@contextmanager
def checkpoints_not_written(told: Callable[[str], None]) -> Iterator[None]:
    """Make `torch.save` and safetensors write no file of tensors on meta within the context, as these have no values.

    Such a file would replace one of the user's. `told` is called with a sentence for each skipped file. Copies to the host are
    traced. `torch.save` to a buffer and files of host tensors with values are written as usual.
    """
    save = torch.save

    def has_values(obj: object, filename: Any, library: str) -> bool:
        if not any(tensor.is_meta for tensor in _tensors_in(obj)):
            return True
        told(f"{library} writes no file ({os.path.basename(os.fspath(filename))}): a trace has no values")
        return False

    @functools.wraps(save)
    def save_values(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(f, "write") or has_values(obj, f, "torch.save"):
            save(obj, f, *args, **kwargs)

    with ExitStack() as stack:
        for place in (torch, torch.serialization):
            stack.enter_context(mock.patch.object(place, "save", save_values))
        if importlib.util.find_spec("safetensors") is not None:
            files = importlib.import_module("safetensors.torch")
            serialize = files.serialize_file

            def serialize_file(written: object, filename: Any, *args: Any, **kwargs: Any) -> None:
                # `save_file` only gets addresses (safetensors/torch.py, 0.8); its argument `tensors` has the tensors
                if has_values(sys._getframe(1).f_locals.get("tensors"), filename, "safetensors"):
                    serialize(written, filename, *args, **kwargs)

            stack.enter_context(mock.patch.object(files, "serialize_file", serialize_file))
        yield


def _tensors_in(obj: object) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(obj):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, nn.Module):
            yield from (*nn.Module.parameters(leaf), *nn.Module.buffers(leaf))


# --------------------------------------------------------------------------------------------------------- host tensors


_PIN = pinning.pin_memory


@contextmanager
def host_tensors_told(host: HostMemory) -> Iterator[None]:
    """Make C++ and other processes distinguish tensors of the host from those of the device within the context.

    Both are on meta. A DataLoader's worker sends batches of the host (torch/multiprocessing/reductions.py, 2.15), which a
    thread without modes may receive and pin (torch/utils/data/_utils/pin_memory.py). Averages of weights and optimizers group
    tensors by device (torch/utils/_foreach_utils.py, 2.15).
    """
    rebuild, group = reductions.rebuild_meta_tensor, torch._C._group_tensors_by_device_and_dtype

    @functools.wraps(rebuild)
    def rebuild_meta_tensor(*args: Any) -> Tensor:
        if _get_current_function_mode_stack():
            with host.told(True):
                return rebuild(*args)
        received = rebuild(*args)
        host.take(received)
        return received

    def pin_memory(data: Any, device: str | None = None) -> Any:
        if isinstance(data, Tensor):
            return host.pin(data)
        pins_itself = hasattr(data, "pin_memory")  # its own method queries tensors, and in a thread without modes the driver
        return data if pins_itself and not _get_current_function_mode_stack() else _PIN(data, device)

    def group_tensors(lists: list[list[Tensor | None]], with_indices: bool = False) -> dict:
        if not any(first is not None and first in host for first in lists[0]):
            return group(lists, with_indices)
        found: dict[tuple[torch.device | None, torch.dtype | None], tuple[list[list], list[int]]] = {}
        for number, first in enumerate(lists[0]):
            place = None if first is None else torch.device("cpu") if first in host else first.device
            key = place, None if first is None else first.dtype
            kept, numbers = found.setdefault(key, ([[] for _ in lists], []))
            for one, tensors in zip(kept, lists, strict=True):
                one.extend(tensors[number : number + 1])
            numbers.extend([number] if with_indices else [])
        return found

    with (
        mock.patch.object(reductions, "rebuild_meta_tensor", rebuild_meta_tensor),
        mock.patch.object(pinning, "pin_memory", pin_memory),
        mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", group_tensors),
    ):
        yield

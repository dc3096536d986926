"""Accelerators that code names: their tensors become meta tensors. Tensors without a device are on the host."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from sizer.base.errors import TraceError
from sizer.tracing.meta import composite
from sizer.tracing.meta.deferred import Deferred
from sizer.tracing.meta.host_memory import HostMemory, steps_on
from sizer.tracing.meta.in_place import isclose

_ACCELERATOR = torch.device("cuda")
_TOLD = {"cuda": torch.device("cuda", 0), "mps": torch.device("mps", 0), "cpu": torch.device("cpu")}  # by kind of device
_CPU = torch.device("cpu")
_INITIALIZERS = "torch.nn.init"  # some functions return at once for meta tensors, which represent device tensors here
_OURS = ("torch", "sizer")
_MODULE = "torch.nn.modules.module"
_HOLDERS = (_MODULE, "bitsandbytes.functional")  # `to` moves the contents of modules there: weights, and scales of 4-bit weights
_INPUTS = "torch.distributed.utils"  # _recursive_to, which DDP and FSDP2 use to move inputs
# Modules of PyTorch that move tensors to the device of other tensors. They see which tensors are on the host.
_MOVERS = frozenset(
    {"torch.optim.swa_utils", "torch.nn.utils.clip_grad", "torch.nn.utils.convert_parameters", "torch.amp.grad_scaler"}
)
# Modules of PyTorch that refuse or replace meta tensors by their device.
_ASKERS = frozenset({"torch.nn.attention.flex_attention", "torch.distributed.checkpoint.planner_helpers"})
_UNFILLED = (torch.empty, torch.empty_like, torch.empty_strided)  # tensors without values
_SET_DATA = Tensor.data.__set__
_SPARSE = frozenset(
    {getattr(torch, f"sparse_{layout}_tensor") for layout in ("coo", "csr", "csc", "bsr", "bsc", "compressed")}
    | {getattr(Tensor, f"to_sparse{layout}") for layout in ("", "_coo", "_csr", "_csc", "_bsr", "_bsc")}
)
_MOVES = frozenset({Tensor.cuda, Tensor.xpu, Tensor.to})
_DENSE = (torch.strided, torch.jagged)
_TO_NUMPY = frozenset({Tensor.numpy, Tensor.__array__})
_NO_NUMPY = "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
_CLOSE = frozenset({torch.isclose, Tensor.isclose})
_ATTENTION = nn.functional.scaled_dot_product_attention
_CAN_USE = ("can_use_flash_attention", "can_use_efficient_attention", "can_use_cudnn_attention")
_PYTHON = torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot  # keys of dispatch modes
_NUMBERS: dict[Any, type] = {Tensor.__float__: float, Tensor.__int__: int, Tensor.__bool__: bool}
LARGE = 2**20  # bytes from which a host tensor is a meta tensor, without memory, in a trace


class _OfDevice(type):
    """Type of `torch.cuda.FloatTensor` and similar classes, which create tensors on the device.

    Source: torch/csrc/utils/tensor_new.cpp.
    """

    dtype: torch.dtype

    def __call__(cls, *args: Any, device: object = None) -> Tensor:
        """Make a tensor of a size, of data or of another tensor."""
        first = args[0] if len(args) == 1 else None
        if isinstance(first, Tensor):
            return first.view_as(first)
        if first is None or isinstance(first, (int, torch.Size)):
            return torch.empty(first if isinstance(first, torch.Size) else args or (0,), dtype=cls.dtype, device=_ACCELERATOR)
        return torch.tensor(first, dtype=cls.dtype, device=_ACCELERATOR)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Tensor) and value.is_meta and value.dtype == cls.dtype


_LEGACY = {
    torch.float32: "FloatTensor", torch.float64: "DoubleTensor", torch.float16: "HalfTensor", torch.bfloat16: "BFloat16Tensor",
    torch.uint8: "ByteTensor", torch.int8: "CharTensor", torch.int16: "ShortTensor", torch.int32: "IntTensor",
    torch.int64: "LongTensor", torch.bool: "BoolTensor",
}  # fmt: skip
_TYPES: dict[str, Any] = {name: _OfDevice(name, (), {"dtype": dtype}) for dtype, name in _LEGACY.items()}


def _type_named(given: object) -> tuple[torch.device, torch.dtype] | None:
    """Return the device and the dtype of a type of tensors, such as "torch.cuda.FloatTensor"; None for other values."""
    if isinstance(given, _OfDevice):
        return _ACCELERATOR, given.dtype
    text = given if isinstance(given, str) else f"{getattr(given, '__module__', '')}.{getattr(given, '__name__', '')}"
    place, _, name = text.rpartition(".")
    if name not in _TYPES or place not in ("torch", "torch.cuda"):
        return None
    return _CPU if place == "torch" else _ACCELERATOR, _TYPES[name].dtype


def _read(tensor: Tensor) -> int | float | bool:
    """Return the value of a tensor of one element for `torch.Tensor([a, b])`, which reads data below any dispatch mode.

    Source: torch/csrc/utils/tensor_new.cpp, legacy_new_from_sequence (PyTorch 2.15).
    """
    with ExitStack() as stack:
        for key in _PYTHON:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        return torch.ops.aten._local_scalar_dense.default(tensor)


def _names_device(args: tuple, kwargs: dict | None) -> bool:
    return any(isinstance(one, (str, int, torch.device)) for one in (*args[1:2], (kwargs or {}).get("device")))


def sparse_refused(name: str) -> TraceError:
    """Return the error of a trace with a sparse tensor, made by a function or operator."""
    return TraceError(
        "sparse tensors are not traced",
        given=name,
        allowed="dense tensors",
        todo="run the script with `sizer run --route driver`",
    )


@contextmanager
def _nested_attention_answered() -> Iterator[None]:
    """Make attention over jagged tensors choose its backend for the device within the context.

    The conditions are those that `torch.backends.cuda` returns in a trace; the module imports them under its own names
    (torch/nested/_internal/sdpa.py).
    """
    from torch.nested._internal import sdpa

    def refused(*_: object) -> bool:
        raise TraceError(
            "the math path of attention over nested tensors is not traced",
            given="a nested query",
            allowed="inputs of flash or memory-efficient attention, or padded tensors",
            todo="run the script with `sizer run --route driver`",
        )

    answers = {name: getattr(torch.backends.cuda, name) for name in _CAN_USE}
    with mock.patch.multiple(
        sdpa, _is_computing_meta_flops=lambda query: False, _can_use_math_sdpa_jagged=refused, **answers
    ):
        yield


class OnMeta(TorchFunctionMode):
    """Moves tensors to meta if code names an accelerator: `.cuda()`, `.to("cuda:0")`, `device="mps"`.

    `host` records tensors without a device and tensors that leave the host, `deferred` tensors for which code names meta.
    """

    def __init__(self, host: HostMemory | None = None, deferred: Deferred | None = None) -> None:
        super().__init__()
        self._host = HostMemory() if host is None else host
        self._deferred = deferred

    @contextmanager
    def default_device_left(self) -> Iterator[None]:
        """Leave the effect of `torch.set_default_device` within the context: it is a function mode."""
        host = self._host
        before = host.is_default_elsewhere
        host.is_default_elsewhere = before and not host.is_default_a_mode
        try:
            yield
        finally:
            host.is_default_elsewhere = before

    def is_like(self, mode: object) -> bool:
        """Return True for a mode with the same host. `size_step` has one for its setup, which may set hooks, and one per step."""
        return isinstance(mode, OnMeta) and mode._host is self._host

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _SPARSE and any(isinstance(arg, Tensor) and arg.is_meta for arg in args):
            raise sparse_refused(func.__name__)
        if func in _MOVES and args[0].layout not in _DENSE and (func is not Tensor.to or _names_device(args, kwargs)):
            raise sparse_refused(func.__name__)
        if func in _CLOSE:
            return isclose(*args, **(kwargs or {}))
        if func is _ATTENTION and args and args[0].is_nested:
            with _nested_attention_answered():
                return func(*args, **(kwargs or {}))
        if func in _MOVES and is_lazy(args[0]):
            return self._moved_lazy(args[0], *(args[1:] if func is Tensor.to else (_ACCELERATOR,)), **(kwargs or {}))
        if func in (Tensor.cuda, Tensor.xpu):
            self._check_single(map(_numbered, (*args[1:], *(kwargs or {}).values())))
            return self._to_device(args[0])
        if func is Tensor.type_as:  # in inference mode it comes undecomposed, which a host tensor beside one of the device cannot
            return self.__torch_function__(Tensor.to, types, args)
        if func is Tensor.is_pinned:
            return self._host.is_pinned(args[0])
        if func is Tensor.pin_memory:  # without a driver: a copy on the host
            return args[0] if self._host.is_pinned(args[0]) else self._pinned_copy(args[0])
        if kwargs and kwargs.get("pin_memory"):
            return self._made_pinned(func, types, args, kwargs | {"pin_memory": False})
        if func is Tensor.type and self._has_place(args[0]) and args[0].dtype in _LEGACY and len(args) == 1 and not kwargs:
            return f"torch.{'' if args[0] in self._host else 'cuda.'}{_LEGACY[args[0].dtype]}"
        if func is Tensor.type and (named := _type_named(args[1] if len(args) > 1 else (kwargs or {}).get("dtype"))):
            return self.__torch_function__(Tensor.to, types, (args[0], *named))
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):  # such as an attribute of a tensor: most calls
            if func is Tensor.cpu and args[0] in self._host:
                return args[0]
            if func is Tensor.numpy and args[0].is_meta and args[0] in self._host:  # a large one
                with _disable_current_modes():
                    return torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu").numpy()
            if func in _TO_NUMPY and self._has_place(args[0]):
                raise TypeError(_NO_NUMPY)
            if func is Tensor.share_memory_ and args[0].is_meta:  # as for every tensor on CUDA
                return args[0]
            if func in _NUMBERS and args[0].is_meta and torch._C._dispatch_tls_is_dispatch_key_excluded(_PYTHON[0]):
                return _NUMBERS[func](_read(args[0]))
            return self._to_host(args[0]) if func is Tensor.cpu else func(*args)
        kwargs = kwargs or {}
        if self._host.is_default_elsewhere and kwargs.get("device") is None and func in _device_constructors():
            kwargs = kwargs | {"device": _ACCELERATOR}
        if func in _UNFILLED and self._makes_on_host(func, args, kwargs):
            return self._empty(func, args, kwargs)
        if func is torch.device and _is_outside(_calling(sys._getframe(1))) and not (args and args[0] == "meta"):
            return func(*args, **kwargs)
        if func is torch._C._nn._parse_to and _is_outside(_calling(sys._getframe(1))):
            return func(*args, **kwargs)
        if func is torch._C._nn._parse_to and self._deferred is not None and self._names_meta(*args, **kwargs):
            device, *rest = func(*args, **kwargs)
            return self._deferred.name(device), *rest  # `Module.to` moves tensors there
        if isinstance(kwargs.get("device"), int):  # a GPU by its number
            self._check_single((_numbered(kwargs["device"]),))
            kwargs = kwargs | {"device": _ACCELERATOR}
        if func is Tensor.to:
            if len(args) > 1 and isinstance(args[1], int):
                self._check_single((_numbered(args[1]),))
                args = (args[0], _ACCELERATOR, *args[2:])
            if self._deferred is not None and self._names_meta(*args[1:], **kwargs):
                return self._deferred.emptied(args[0])
            if args[0] in self._host:
                return self._from_host(*args, **kwargs)
            if self._names_host(*args[1:], **kwargs):
                held = isinstance(args[0], nn.Parameter) or _module_of(_calling(sys._getframe(1))) in _HOLDERS
                _, dtype, non_blocking, _, memory_format = self._asked(*args[1:], **kwargs)
                return self._to_host(
                    args[0], dtype, non_blocking=non_blocking, memory_format=memory_format, of_module=held
                )
            if _module_of(_calling(sys._getframe(1))) == _INPUTS:
                args = tuple(map(_unnumbered, args))
        if len(args) == 2 and func == _SET_DATA and args[0].is_meta and args[1].is_cpu:
            args = (args[0], self._host.copy_of(args[1], pinned=False))
        if len(args) == 2 and func == _SET_DATA and args[0].is_cpu and args[1].is_meta:  # FSDP1 moves parameters this way
            return torch._C._swap_tensor_impl(args[0], args[1].detach().requires_grad_(args[0].requires_grad))
        deferred = self._deferred
        if deferred is None or not deferred.is_setting_up:
            return self._run(func, args, kwargs)
        if func is torch.device and args and deferred.names(args[0]):
            return deferred.name(func(*args, **kwargs))
        if deferred.names(kwargs.get("device")):
            with deferred.told(True), self._host.told(False):
                return func(*args, **kwargs)
        if any(_on_meta(value) is not value for value in (*args, *kwargs.values())):
            if func is not torch.device:
                self._check_single((*args[1:], *kwargs.values()))
            with deferred.told(False):
                return self._run(func, args, kwargs)
        if kwargs.get("device") is None and func in _device_constructors():
            with self._host.of_no_device(pinned=self._host.pins):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if kwargs.get("device") == "meta" and isinstance(kwargs["device"], str):
            with _disable_current_modes():  # meta by name: on no device
                return func(*args, **kwargs)
        moved, named = tuple(map(_on_meta, args)), {name: _on_meta(value) for name, value in kwargs.items()}
        if any(new is not old for new, old in zip((*moved, *named.values()), (*args, *kwargs.values()), strict=True)):
            if func is not torch.device:
                self._check_single((*args[1:], *kwargs.values()))
            with self._host.told(False):
                return func(*moved, **named)
        return func(*args, **kwargs)

    def _check_single(self, values: Iterable[Any]) -> None:
        """Raise TraceError if one of the values names another GPU than the code has named before: a trace has one GPU.

        On a rank of several, tensors report that they are on GPU 0, which then counts as the same.
        """
        for value in values:
            index = _index_of(value)
            if index is None or (index == 0 and torch.distributed.is_initialized()):
                continue
            if self._host.gpu not in (None, index):
                raise TraceError(
                    "several GPUs in one process are not traced",
                    given=f"GPU {index} after GPU {self._host.gpu}",
                    allowed="one GPU for each process",
                    todo="run the script with `sizer run --route driver --world N` for a host of N GPUs",
                )
            self._host.gpu = index

    def _pinned_copy(self, tensor: Tensor) -> Tensor:
        with self._host.told(True, pinned=True):
            return self._host.pin(tensor.clone())

    def _made_pinned(self, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        """Return a constructor's result with `pin_memory=True`."""
        self._host.pins = True
        try:
            return self._host.pin(self.__torch_function__(func, types, args, kwargs))
        finally:
            self._host.pins = False

    def _to_device(self, tensor: Tensor) -> Tensor:
        if tensor not in self._host:
            return tensor.to("meta")
        self._host.copied_bytes += tensor.nbytes
        with self._host.told(False):
            return Tensor.to(tensor, "meta", copy=True)

    def _moved_lazy(self, parameter: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the empty tensor of a lazy module's parameter after `.to(…)`; the parameter has no shape."""
        device, dtype, *_ = self._asked(*args, **kwargs)
        place = parameter.data.device if device is None else _on_meta(device)
        with self._host.told(False):
            moved = torch.empty(0, device=place, dtype=dtype or parameter.data.dtype)
        if isinstance(parameter, nn.Parameter) and parameter.data.is_cpu and moved.is_meta:
            # made outside of the trace: on a device it keeps its class, as `Module._apply` sets the data of a compatible tensor
            with _disable_current_modes():
                empty = torch.empty_like(moved).requires_grad_(parameter.requires_grad)
            torch._C._swap_tensor_impl(parameter, empty)
        return moved if isinstance(parameter, nn.Parameter) else moved.as_subclass(type(parameter))

    def _names_meta(self, device: object = None, *args: Any, **kwargs: Any) -> bool:
        """Return True if arguments of `Tensor.to` or `Module.to` name meta itself, which is no device.

        In PyTorch's own code, meta is the representation of the device.
        """
        device = kwargs.get("device", device)
        if self._deferred is None or not self._deferred.names(device):
            return False
        frame = _calling(sys._getframe(1))
        if frame.f_globals.get("__name__") == _MODULE:
            frame = frame.f_back or frame
        return not isinstance(device, str) or _is_outside(frame)

    def _names_host(self, *args: Any, **kwargs: Any) -> bool:
        """Return True if arguments of `Tensor.to` name the host, or a tensor there."""
        device = args[0] if args else kwargs.get("device", kwargs.get("other"))
        if isinstance(device, Tensor):
            return device.is_cpu or device in self._host
        return isinstance(device, (str, torch.device)) and str(device).partition(":")[0] == "cpu"

    def _asked(self, *args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, bool, torch.memory_format]:
        """Return the device, the dtype, `non_blocking`, `copy` and the memory format from arguments of `Tensor.to`."""
        other = args[0] if args else kwargs.get("other")
        before_copy = 2 if isinstance(other, (Tensor, torch.dtype)) else 3  # positions
        copy = args[before_copy] if len(args) > before_copy else kwargs.get("copy", False)
        kept = torch.preserve_format
        if not isinstance(other, Tensor):
            named = {name: value for name, value in kwargs.items() if name != "copy"}
            device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args[:before_copy], **named)
            return device, dtype, non_blocking, copy, memory_format or kept
        device = _CPU if other in self._host or other.is_cpu else _ACCELERATOR
        non_blocking = args[1] if len(args) > 1 else kwargs.get("non_blocking", False)
        return device, other.dtype, non_blocking, copy, kwargs.get("memory_format", kept)

    def _to_host(
        self,
        tensor: Tensor,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        of_module: bool = False,
    ) -> Tensor:
        """Return a copy on the host; a large copy, or one of a module, stays on meta without memory."""
        how = (dtype or tensor.dtype, non_blocking)
        if not tensor.is_meta or (tensor.nbytes <= LARGE and not of_module):
            return Tensor.to(tensor, "cpu", *how, memory_format=memory_format)
        with self._host.told(True):
            return Tensor.to(tensor, "meta", *how, copy=True, memory_format=memory_format)

    def _makes_on_host(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """Return True if a function of _UNFILLED creates a host tensor.

        In a setup only a tensor like one of the device or the host counts.
        """
        if self._host.setting_up and (func is not torch.empty_like or not self._has_place(args[0])):
            return False
        if (device := kwargs.get("device")) is not None:
            return str(device) == "cpu"
        return func is not torch.empty_like or args[0] in self._host

    def _has_place(self, tensor: Tensor) -> bool:
        """Return True if a meta tensor represents a tensor of the device or of the host."""
        return tensor.is_meta and (self._deferred is None or tensor not in self._deferred)

    def _empty(self, func: Any, args: tuple, kwargs: dict) -> Tensor:
        """Return a host tensor created by `func`; a large tensor is a meta tensor that represents host memory."""
        with _disable_current_modes():
            large = func(*args, **(kwargs | {"device": "meta", "requires_grad": False})).nbytes > LARGE
        if not large:
            return func(*args, **kwargs)
        with self._host.told(True, pinned=self._host.pins):
            return func(*args, **(kwargs | {"device": "meta"}))

    def _from_host(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of `.to(…)` for a host tensor."""
        device, dtype, non_blocking, copy, memory_format = self._asked(*args, **kwargs)
        how = (dtype or tensor.dtype, non_blocking)
        if device is None or device.type == "cpu":
            return Tensor.to(tensor, *how, copy=copy, memory_format=memory_format)
        self._host.copied_bytes += tensor.nbytes
        with self._host.told(False):
            return Tensor.to(tensor, "meta", *how, copy=True, memory_format=memory_format)


@contextmanager
def modes_in_callbacks(mode: OnMeta) -> Iterator[None]:
    """Enable the mode in callbacks within the context: hooks of saved tensors, backward passes, operators' Python kernels.

    PyTorch calls them from an operator or from `Tensor.backward`, which disable function modes. A device's backward pass runs
    in its own thread (torch/csrc/autograd/engine.cpp, 2.15), in which Dynamo compiles nothing.
    """
    push, run = torch._C._autograd._push_saved_tensors_default_hooks, torch.autograd.graph._engine_run_backward
    set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame

    def within(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            if any(map(mode.is_like, _get_current_function_mode_stack())):
                return function(*args, **kwargs)
            with mode, mode.default_device_left():
                return function(*args, **kwargs)

        return called

    def uncompiled(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            callback = set_eval_frame(None)
            try:
                return function(*args, **kwargs)
            finally:
                set_eval_frame(callback)

        return called

    def push_within(pack: Any, unpack: Any) -> None:
        push(within(pack), within(unpack))

    with (
        mock.patch.object(torch._C._autograd, "_push_saved_tensors_default_hooks", push_within),
        mock.patch.object(torch.autograd.graph, "_engine_run_backward", uncompiled(within(run))),
        mock.patch.object(torch.autograd, "_engine_run_backward", uncompiled(within(run))),
        mock.patch.object(composite, "in_callbacks", within),
    ):
        yield


@contextmanager
def devices_told(host: HostMemory, deferred: Deferred, kind: str = "cuda") -> Iterator[None]:
    """Make tensors report a device to code outside of PyTorch and Sizer within the context: the first device, or the host.

    The class attributes are patched, so that hooks of saved tensors and autograd's callbacks see them too. An optimizer of
    parameters on the host steps there.

    Args:
        host: Tensors of the host.
        deferred: Tensors on meta without a device.
        kind: Kind of the traced device.
    """
    first = _TOLD[kind]
    told: dict[str, tuple[Any, Any]] = {"device": (first, _CPU), "is_cpu": (kind == "cpu", True), "is_meta": (False, False)}
    told |= {f"is_{name}": (kind == name, False) for name in ("cuda", "mps")}
    own = {name: getattr(Tensor, name).__get__ for name in told}

    def answer(name: str) -> property:
        read, is_meta, (on_device, on_host) = own[name], own["is_meta"], told[name]

        def get(tensor: Tensor) -> Any:
            frame = sys._getframe(1)
            module = frame.f_globals.get("__name__", "")
            moves = module in _MOVERS and bool(host)
            asks = module in _ASKERS or (name == "is_meta" and module == _INITIALIZERS)
            outside = not _is_ours(module) or moves or asks
            if not (outside and _are_devices_sent_to_meta()):
                return read(tensor)
            with torch._C.DisableTorchFunction():
                if name == "device" and tensor in deferred:
                    return deferred.device
                if not is_meta(tensor) or tensor in deferred or (moves and tensor not in host):
                    return read(tensor)
                return on_host if tensor in host else on_device

        return property(get)

    address, of_storage, address_of = Tensor.data_ptr, torch.UntypedStorage.data_ptr, host.addresses.address_of

    def data_ptr(tensor: Tensor) -> int:
        with torch._C.DisableTorchFunction():
            if own["is_meta"](tensor) and _is_outside(sys._getframe(1)):
                return address_of(tensor.untyped_storage()) + tensor.storage_offset() * tensor.itemsize
            return address(tensor)

    def storage_data_ptr(storage: torch.UntypedStorage) -> int:
        outside = storage.device.type == "meta" and _is_outside(sys._getframe(1))
        return address_of(storage) if outside else of_storage(storage)

    get_device = Tensor.get_device

    def index_of_device(tensor: Tensor) -> int:
        """Return 0 for the device, -1 for the host."""
        with torch._C.DisableTorchFunction():
            told_otherwise = own["is_meta"](tensor) and _is_outside(sys._getframe(1)) and tensor not in deferred
            return (-1 if tensor in host or kind == "cpu" else 0) if told_otherwise else get_device(tensor)

    current = torch.accelerator.current_accelerator

    def current_accelerator(*args: Any, **kwargs: Any) -> torch.device | None:
        if not _is_outside(sys._getframe(1)):
            return current(*args, **kwargs)
        return None if kind == "cpu" else torch.device(kind)

    set_type, set_device, get_device_of_default = torch.set_default_tensor_type, torch.set_default_device, torch.get_default_device

    def set_default_device(device: object) -> None:
        """Replace torch.set_default_device, because its mode would be below this trace's mode."""
        host.is_default_elsewhere = host.is_default_a_mode = str(device).partition(":")[0] == kind != "cpu"
        set_device(None if host.is_default_elsewhere else device)

    def get_default_device() -> torch.device:
        return first if host.is_default_elsewhere and _is_outside(sys._getframe(1)) else get_device_of_default()

    def set_default_tensor_type(kind: object) -> None:
        """Replace torch.set_default_tensor_type, which PyTorch converts to a dtype and a device."""
        named = _type_named(kind)
        host.is_default_elsewhere, host.is_default_a_mode = named is not None and named[0] is _ACCELERATOR, False
        of_default_type.close()
        if host.is_default_elsewhere and named is not None:
            torch.set_default_dtype(named[1])
            # only here: Dynamo records the constructor when it is imported
            of_default_type.enter_context(mock.patch.object(Tensor, "__new__", staticmethod(new), create=True))
        else:
            set_type(kind)

    make = Tensor.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Tensor:
        """Replace torch.Tensor(…), which follows the default type of tensors (torch/csrc/utils/tensor_new.cpp)."""
        if cls is Tensor and not kwargs:
            return _TYPES[_LEGACY[torch.get_default_dtype()]](*args)
        return make(cls, *args, **kwargs)

    written, storage_device = torch._tensor_str._str, torch.UntypedStorage.device.__get__

    def write(tensor: Tensor, *, tensor_contents: str | None = None) -> str:
        """Replace torch._tensor_str._str, and write the device that the code sees."""
        text = written(tensor, tensor_contents=tensor_contents)
        with torch._C.DisableTorchFunction():
            if not own["is_meta"](tensor) or tensor in deferred:
                return text
            return text.replace("device='meta'", f"device='{_CPU if tensor in host else first}'")

    def device_of_storage(storage: torch.UntypedStorage) -> torch.device:
        device = storage_device(storage)
        if device.type != "meta" or not _is_outside(sys._getframe(1)) or deferred.holds(storage):
            return device
        return _CPU if host.holds(storage) else first

    answers: dict[str, Any] = {name: answer(name) for name in own}
    with (
        ExitStack() as of_default_type,
        mock.patch.multiple(torch.cuda, **_TYPES),
        mock.patch.multiple(
            torch,
            set_default_tensor_type=set_default_tensor_type,
            set_default_device=set_default_device,
            get_default_device=get_default_device,
        ),
        mock.patch.object(torch.accelerator, "current_accelerator", current_accelerator),
        mock.patch.multiple(Tensor, create=True, data_ptr=data_ptr, get_device=index_of_device),
        mock.patch.multiple(Tensor, create=True, **answers),
        mock.patch.object(torch.UntypedStorage, "data_ptr", storage_data_ptr),
        mock.patch.object(torch.UntypedStorage, "device", property(device_of_storage), create=True),
        mock.patch.object(torch._tensor_str, "_str", write),
        mock.patch.object(host, "tells", True),
        steps_on(host),
    ):
        yield


def _calling(frame: FrameType) -> FrameType:
    """Return the frame that called a function in a frame. It skips this module and PyTorch's modes (`with torch.device(…)`)."""
    while frame.f_back is not None and (
        frame.f_globals is globals() or (frame.f_code.co_name == "__torch_function__" and _is_ours(_module_of(frame)))
    ):
        frame = frame.f_back
    return frame


def _module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _is_outside(frame: FrameType) -> bool:
    """Return True if the caller is neither PyTorch nor Sizer; both need the real device, meta."""
    return not _is_ours(frame.f_globals.get("__name__", ""))


@functools.cache
def _is_ours(name: str) -> bool:
    """Return True for the name of a module of PyTorch or Sizer."""
    return name.partition(".")[0] in _OURS


def _are_devices_sent_to_meta() -> bool:
    """Return True if the mode is active. It is inactive in Python kernels of other packages, which would allocate on CUDA."""
    return any(isinstance(mode, OnMeta) for mode in _get_current_function_mode_stack())


def _numbered(value: Any) -> Any:
    """Return the device of a number; other values unchanged."""
    return f"cuda:{value}" if type(value) is int else value


def _index_of(value: Any) -> int | None:
    """Return the index of a GPU from a device or its name; None for other devices."""
    if isinstance(value, str):
        kind, _, number = value.partition(":")
        return int(number) if kind == "cuda" and number.isdigit() else None
    return value.index if isinstance(value, torch.device) and value.type == "cuda" else None


def _unnumbered(value: Any) -> Any:
    """Return a meta device without its index.

    DDP names devices with an index. Inputs on meta have none, and would be copied there.
    """
    return torch.device("meta") if isinstance(value, torch.device) and value.type == "meta" else value


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type in ("cuda", "mps", "xpu"):
        return torch.device("meta")
    if isinstance(value, str) and value.partition(":")[0] in ("cuda", "mps", "xpu"):
        return "meta"
    return value

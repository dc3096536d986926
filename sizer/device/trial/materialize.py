"""A real module for a blueprint: weights of the right size and dtype with cheap random values, buffers with their true ones."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn

from sizer.architecture.blueprint import Blueprint
from sizer.architecture.held_tensors import parts_of
from sizer.architecture.loaded import Loaded, as_loaded
from sizer.architecture.peft_adapters import cast
from sizer.architecture.quantization import quantization_states
from sizer.base.errors import BuildError
from sizer.catalogue.checkpoints import METHODS
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import Backend
from sizer.catalogue.modes import QUANTIZED, QUANTO
from sizer.device.record.measurement import DeviceFacts
from sizer.query.request import Request
from sizer.tracing.modules import children_first
from sizer.tracing.steps import weight_dtype

Bring = Callable[[nn.Module, torch.device], nn.Module]  # the module on the device, loaded as its weights are

Copies = dict[int, tuple[Tensor, Tensor]]
"""Buffer and copy by the buffer's id; both live on, so that no id is used again."""

STANDARD_DEVIATION = 0.02  # of the random weights: small enough that no half-precision activation overflows


def build_without_weights(blueprint: Blueprint, dtype: torch.dtype, *, checkpointing: bool = False) -> nn.Module:
    """The blueprint's module cast to `dtype`: parameters on meta, buffers real, on the CPU, as its constructor made them.

    Constructors that want to read the values of their parameters get real ones. Raises BuildError where the architecture offers
    no checkpointing and it is asked for.
    """
    module = _make(blueprint, checkpointing)
    for parameter in module.parameters():
        if not parameter.is_meta:
            _swap(parameter, parameter.detach().to("meta"))
    return cast(module, dtype)


def loaded_on(request: Request, facts: DeviceFacts, config: dict | None = None) -> Loaded:
    """Return the weights of a request as an available device loads them.

    Raises ConfigError as `as_loaded` does, and BuildError for a checkpoint, or a cache, whose own kernels do not run here.
    """
    if request.cache == QUANTIZED:
        raise BuildError(
            f"{QUANTO} compiles its kernels where it runs, which a measurement may not, so that there is nothing to measure",
            given=f"cache={QUANTIZED}",
            allowed="the other caches",
            todo="ask for one of these",
        )
    backend = typing.cast(Backend, facts.kind)  # an XPU is none of them: nothing is known of its kernels
    device = replace(find_gpu(request.gpu), name=facts.name, backend=backend, capability=facts.capability)
    loaded = as_loaded(request, device, config)
    if loaded.quantization is not None and loaded.request.weights == "checkpoint":
        method = METHODS[loaded.quantization.method]
        if not method.traced:
            raise BuildError(
                f"the kernels of {method.title} are no part of what is installed here, so that there is nothing to measure",
                given=f"a checkpoint in {method.title}",
                allowed=", ".join(row.title for row in METHODS.values() if row.traced),
                todo="ask for weights=full, or another way to quantise",
            )
    return loaded


def prepare(blueprint: Blueprint, dtype: str, *, checkpointing: bool) -> tuple[nn.Module, Bring]:
    """The blueprint's module for a dtype of the contract, with parameters on meta, and what brings it to a device as its weights
    are loaded. Raises BuildError as Blueprint.make does."""
    if blueprint.load_quantized is None:
        return build_without_weights(blueprint, weight_dtype(dtype), checkpointing=checkpointing), load
    return prepare_quantized(blueprint, dtype), partial(load_quantized, blueprint, checkpointing=checkpointing)


def prepare_quantized(blueprint: Blueprint, dtype: str) -> nn.Module:
    """The blueprint's module for a dtype of the contract with the layers that will hold quantised weights: parameters on meta,
    buffers real, on the CPU. Raises BuildError as Blueprint.make does."""
    with _parameters_on_meta():
        return blueprint.prepare(dtype)


def load_quantized(blueprint: Blueprint, module: nn.Module, device: torch.device, *, checkpointing: bool) -> nn.Module:
    """The module of `prepare_quantized` on the device, quantised by the real library, and made for its work there."""
    module = blueprint.finish(blueprint.load(module, device.type), checkpointing=checkpointing)
    if device.type == "cpu":
        copies: Copies = {}
        for _, child in children_first(module):
            _copy_buffers(child, copies)
    return module


def parameter_and_buffer_bytes(module: nn.Module, kind: str | None = None) -> tuple[int, int]:
    """Bytes of a module's parameters, with those that restore quantised ones, and of its buffers, every storage once; with a `kind`
    of device of those that are there, and not on the host."""
    states = [state for child in module.modules() for _, state in quantization_states(child)]
    parameters, buffers = (
        [tensor for tensor in tensors if kind in (None, tensor.device.type)]
        for tensors in ([*module.parameters(), *states], module.buffers())
    )
    return storage_bytes(parameters), storage_bytes(buffers)


def storage_bytes(tensors: Iterator[Tensor | None] | list[Tensor | None]) -> int:
    """Bytes of the storages behind some tensors, each storage once."""
    parts = [part for tensor in tensors if tensor is not None for part in parts_of(tensor)]
    storages = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
    return sum(storages.values())


def allocate_parameters(module: nn.Module) -> None:
    """Give every parameter of a module memory on the CPU, without values. Tied parameters stay tied."""
    for parameter in module.parameters():
        _swap(parameter, torch.empty_like(parameter, device="cpu"))


def load(module: nn.Module, device: torch.device) -> nn.Module:
    """The module on the device: what the phase "load" measures.

    On an accelerator it is the `module.to(device)` of every script, after `allocate_parameters`. On the CPU, where that would do
    nothing, the parameters get their memory now and buffers are copied, in the order in which `.to` would.
    """
    if device.type != "cpu":
        return module.to(device)
    copies: Copies = {}
    for _, child in children_first(module):
        for parameter in child._parameters.values():
            if parameter is not None and parameter.is_meta:
                _swap(parameter, torch.empty_like(parameter, device="cpu"))
        _copy_buffers(child, copies)
    return module


def initialize_parameters(module: nn.Module) -> None:
    """Give the weights small random values in place, vectors that scale 1 and others 0: no step may overflow."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.is_floating_point() or parameter.dtype.itemsize == 1:  # quantised
                continue
            for part in parts_of(parameter):
                if parameter.dim() > 1:
                    part.normal_(0, STANDARD_DEVIATION)
                else:
                    part.fill_(0.0 if name.endswith("bias") else 1.0)


def _make(blueprint: Blueprint, checkpointing: bool) -> nn.Module:
    try:
        with _parameters_on_meta():
            module = blueprint.make(checkpointing=checkpointing)
    except Exception:  # the constructor reads values of parameters, or fails anyway: then it fails here, too
        return blueprint.make(checkpointing=checkpointing)
    return blueprint.make(checkpointing=checkpointing) if _has_lost_values(module) else module


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within the context, a parameter moves to meta the moment a module gets it: to initialize it then costs nothing."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and type(parameter) is nn.Parameter and not parameter.is_meta:
            _swap(parameter, torch.empty_like(parameter, device="meta"))
        register(self, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


def _has_lost_values(module: nn.Module) -> bool:
    """Return whether a buffer or a plain attribute was computed from a parameter that had no values."""
    if any(buffer.is_meta for buffer in module.buffers()):
        return True
    return any(tensor.is_meta for child in module.modules() for tensor in _plain_tensors(child))


def _plain_tensors(module: nn.Module) -> Iterator[Tensor]:
    registered = {"_parameters", "_buffers", "_modules"}
    for name, value in vars(module).items():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        if name not in registered:
            yield from (item for item in items if isinstance(item, Tensor) and not isinstance(item, nn.Parameter))


def _swap(parameter: nn.Parameter, data: Tensor) -> None:
    """Put other data, of any device, into a parameter that stays the same object for everybody who holds it.

    `torch.utils.swap_tensors` does the same, but refuses where weak references exist, as recurrent layers keep them.
    """
    torch._C._swap_tensor_impl(parameter, nn.Parameter(data, requires_grad=parameter.requires_grad))


def _copy_buffers(child: nn.Module, copies: Copies) -> None:
    """Put copies in the place of the buffers that a module itself holds, of each buffer one, and of a copy itself."""
    for name, buffer in child._buffers.items():
        if buffer is None:
            continue
        if id(buffer) not in copies:
            copy = buffer.clone()
            copies[id(buffer)], copies[id(copy)] = (buffer, copy), (copy, copy)
        child._buffers[name] = copies[id(buffer)][1]

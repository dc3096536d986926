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
from sizer.architecture.inner_tensors import parts_of
from sizer.architecture.loading import ResolvedWeights, resolve_weights
from sizer.architecture.peft_adapters import cast
from sizer.architecture.quantization import quantization_states
from sizer.base.errors import BuildError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import Backend
from sizer.catalogue.modes import QUANTIZED, QUANTO
from sizer.catalogue.weights import METHODS
from sizer.device.record.measurement import DeviceFacts
from sizer.query.request import Request
from sizer.tracing.modules import children_first
from sizer.tracing.steps import weight_dtype

Bring = Callable[[nn.Module, torch.device], nn.Module]  # the module on the device, loaded as its weights are

Copies = dict[int, tuple[Tensor, Tensor]]
"""Buffer and copy by the buffer's id; both stay alive, so that ids remain unique."""

STANDARD_DEVIATION = 0.02  # of the random weights: small enough that no half-precision activation overflows


def build_without_weights(blueprint: Blueprint, dtype: torch.dtype, *, checkpointing: bool = False) -> nn.Module:
    """Return the blueprint's module cast to `dtype`, with parameters on meta.

    Buffers are real, on the CPU, as its constructor made them.

    Constructors that read the values of their parameters get real ones. Raises BuildError if checkpointing is requested and the
    architecture does not offer it.
    """
    module = _make(blueprint, checkpointing)
    for parameter in module.parameters():
        if not parameter.is_meta:
            _swap(parameter, parameter.detach().to("meta"))
    return cast(module, dtype)


def loaded_on(request: Request, facts: DeviceFacts, config: dict | None = None) -> ResolvedWeights:
    """Return the weights of a request as an available device loads them.

    Raises ConfigError as `resolve_weights` does, and BuildError for a checkpoint, or a cache, whose own kernels do not run here.
    """
    if request.cache == QUANTIZED:
        raise BuildError(
            f"{QUANTO} compiles its kernels at run time, which a measurement does not allow",
            given=f"cache={QUANTIZED}",
            allowed="other caches",
            todo="ask for one of these",
        )
    backend = typing.cast(Backend, facts.kind)  # an XPU is not a Backend: its kernels are not known
    device = replace(find_gpu(request.gpu), name=facts.name, backend=backend, capability=facts.capability)
    loaded = resolve_weights(request, device, config)
    if loaded.quantization is not None and loaded.request.weights == "checkpoint":
        method = METHODS[loaded.quantization.method]
        if not method.traced:
            raise BuildError(
                f"the kernels of {method.title} are not installed here, so they cannot be measured",
                given=f"a checkpoint in {method.title}",
                allowed=", ".join(row.title for row in METHODS.values() if row.traced),
                todo="ask for weights=full, or another way to quantize",
            )
    return loaded


def prepare(blueprint: Blueprint, dtype: str, *, checkpointing: bool) -> tuple[nn.Module, Bring]:
    """Return the blueprint's module for a dtype with parameters on meta, and a function that loads it to a device.

    Raises BuildError as Blueprint.make does.
    """
    if blueprint.load_quantized is None:
        return build_without_weights(blueprint, weight_dtype(dtype), checkpointing=checkpointing), load
    return prepare_quantized(blueprint, dtype), partial(load_quantized, blueprint, checkpointing=checkpointing)


def prepare_quantized(blueprint: Blueprint, dtype: str) -> nn.Module:
    """Return the blueprint's module for a dtype of the contract, with layers for quantized weights.

    Parameters are on meta, buffers are real, on the CPU. Raises BuildError as Blueprint.make does.
    """
    with _parameters_on_meta():
        return blueprint.prepare(dtype)


def load_quantized(blueprint: Blueprint, module: nn.Module, device: torch.device, *, checkpointing: bool) -> nn.Module:
    """Return the module of `prepare_quantized` on the device, quantized by the real library, and prepared for its work there."""
    module = blueprint.finish(blueprint.load(module, device.type), checkpointing=checkpointing)
    if device.type == "cpu":
        copies: Copies = {}
        for _, child in children_first(module):
            _copy_buffers(child, copies)
    return module


def parameter_and_buffer_bytes(module: nn.Module, kind: str | None = None) -> tuple[int, int]:
    """Return the bytes of a module's parameters and of its buffers, every storage once.

    States of quantized parameters count as parameters.

    With a `kind`, only tensors on that device type count.
    """
    states = [state for child in module.modules() for _, state in quantization_states(child)]
    parameters, buffers = (
        [tensor for tensor in tensors if kind in (None, tensor.device.type)]
        for tensors in ([*module.parameters(), *states], module.buffers())
    )
    return storage_bytes(parameters), storage_bytes(buffers)


def storage_bytes(tensors: Iterator[Tensor | None] | list[Tensor | None]) -> int:
    """Return the bytes of the storages behind some tensors, each storage once."""
    parts = [part for tensor in tensors if tensor is not None for part in parts_of(tensor)]
    storages = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
    return sum(storages.values())


def allocate_parameters(module: nn.Module) -> None:
    """Give every parameter of a module memory on the CPU, without values. Tied parameters stay tied."""
    for parameter in module.parameters():
        _swap(parameter, torch.empty_like(parameter, device="cpu"))


def load(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the module on the device: the phase "load" measures this call.

    On an accelerator it is the `module.to(device)` of every script, after `allocate_parameters`. On the CPU `.to` would do
    nothing: instead, parameters get their memory now and buffers are copied, in the order of `.to`.
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
    """Initialize the weights in place with small random values, so that no step overflows.

    Vectors that scale are 1, other vectors 0.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.is_floating_point() or parameter.dtype.itemsize == 1:  # quantized
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
    except Exception:  # the constructor reads values of parameters, or fails anyway: then the error is raised here
        return blueprint.make(checkpointing=checkpointing)
    return blueprint.make(checkpointing=checkpointing) if _has_lost_values(module) else module


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move a parameter to meta as soon as a module registers it, within the context: its initialization then costs nothing."""
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
    """Replace the data of a parameter, on any device, so that all references to the parameter stay valid.

    `torch.utils.swap_tensors` does the same, but refuses if weak references exist, as recurrent layers keep them.
    """
    torch._C._swap_tensor_impl(parameter, nn.Parameter(data, requires_grad=parameter.requires_grad))


def _copy_buffers(child: nn.Module, copies: Copies) -> None:
    """Replace a module's own buffers by copies, one for each buffer, and a copy by itself."""
    for name, buffer in child._buffers.items():
        if buffer is None:
            continue
        if id(buffer) not in copies:
            copy = buffer.clone()
            copies[id(buffer)], copies[id(copy)] = (buffer, copy), (copy, copy)
        child._buffers[name] = copies[id(buffer)][1]

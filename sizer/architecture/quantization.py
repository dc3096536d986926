"""Contents of a quantized module: the tensors that restore its weights, their bytes, and weights left unquantized."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from torch import Tensor, nn

from sizer.architecture.inner_tensors import parts_of
from sizer.architecture.peft_adapters import is_adapted
from sizer.base.units import format_bytes
from sizer.catalogue.optimizers import BITSANDBYTES
from sizer.report.advice import UNQUANTIZED_PART

NO_OUTLIERS = "Activations are assumed to have no outliers: no column is multiplied in 16 bits."
MANY = 8  # names in one sentence
FP8_LAYERS = "transformers.integrations.finegrained_fp8"
_LAYERS = (f"{BITSANDBYTES}.", FP8_LAYERS)  # modules of the layers that quantizers put in
_STATES = ("absmax", "code", "offset")  # the tensors of bitsandbytes' QuantState (bitsandbytes/functional.py, 0.50)


def quantization_states(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own tensors that restore its quantized weight, by name: scales, codes, offsets.

    They are neither parameters nor buffers (bitsandbytes/nn/modules.py, 0.50: Linear4bit, Linear8bitLt).
    """
    weight = module._parameters.get("weight")
    if (state := getattr(weight, "quant_state", None)) is not None:
        yield from _tensors_of(state, "weight.")
    scales = getattr(weight, "SCB", None)
    if scales is None:
        scales = getattr(getattr(module, "state", None), "SCB", None)  # the first forward pass stores them there
    if isinstance(scales, Tensor):
        yield "weight.SCB", scales


def quantization_objects(module: nn.Module) -> Iterator[object]:
    """Yield the objects that hold the tensors of `quantization_states`; bitsandbytes' layers change them when they run."""
    weight = module._parameters.get("weight")
    if hasattr(weight, "SCB"):
        yield weight
        yield module.state


def _tensors_of(state: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    for name in _STATES:
        if isinstance(tensor := getattr(state, name), Tensor):
            yield f"{path}{name}", tensor
    if state.state2 is not None:  # for scales that are themselves quantized
        yield from _tensors_of(state.state2, f"{path}state2.")


def elements_of(tensor: Tensor) -> int:
    """Return the elements that a tensor represents: two per byte for 4-bit weights, none for a tensor that restores another."""
    if (state := getattr(tensor, "quant_state", None)) is not None:
        return prod(state.shape)
    return getattr(tensor, "elements", tensor.numel())


def weight_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor itself; for a wrapper subclass those of its inner tensors."""
    return sum(part.numel() * part.element_size() for part in parts_of(tensor))


def describe_weights(module: nn.Module, title: str, *, outliers: bool = True) -> tuple[str, ...]:
    """Return sentences on a module with the quantization `title`: the quantized size, and unquantized parts by name and bytes.

    `outliers` says whether activations are searched for outliers; the estimate assumes none.
    """
    layers = [layer for layer in module.modules() if is_replaced(layer)]
    held = elements = 0
    for layer in layers:
        tensors = [*layer.parameters(recurse=False), *(state for _, state in quantization_states(layer))]
        held += sum(map(weight_bytes, tensors))
        elements += sum(map(_quantized_elements, tensors))
    text = f"{title}: {elements:,} weights of {len(layers)} layers are quantized, to {format_bytes(held)} with their scales."
    left = ", ".join(f"{name} ({format_bytes(size)})" for name, _, size in unquantized_part(module)[:MANY])
    if computes := {layer.compute_dtype for layer in layers if getattr(layer, "compute_dtype", None) is not None}:
        text += f" Their products are computed in {', '.join(sorted(str(one).removeprefix('torch.') for one in computes))}."
    said = f"{text} {NO_OUTLIERS}" if outliers else text
    return (said, *([f"{UNQUANTIZED_PART}{left}."] if left else []))


def _quantized_elements(tensor: Tensor) -> int:
    if hasattr(tensor, "elements"):
        return tensor.elements
    return elements_of(tensor) if tensor.dtype.itemsize == 1 and tensor.dim() > 1 else 0


def unquantized_part(module: nn.Module) -> list[tuple[str, int, int]]:
    """Return the frozen unquantized weights: (name, elements, bytes) of each kind of module, the largest first."""
    found: dict[str, tuple[int, int]] = {}
    adapted = is_adapted(module)
    left = {id(parameter) for parameter in module.parameters()}
    for path, child in module.named_modules():
        for parameter in () if is_replaced(child) else child.parameters(recurse=False):
            if parameter.dim() > 1 and id(parameter) in left and not (adapted and parameter.requires_grad):
                left.remove(id(parameter))
                name = path.rpartition(".")[2]
                elements, size = found.get(name, (0, 0))
                found[name] = (elements + parameter.numel(), size + weight_bytes(parameter))
    return sorted(((name, *sizes) for name, sizes in found.items()), key=lambda row: -row[2])


def is_replaced(layer: nn.Module) -> bool:
    """Return whether this layer has quantized weights and replaces another layer."""
    packed = any(hasattr(parameter, "elements") for parameter in layer._parameters.values())
    return packed or type(layer).__module__.startswith(_LAYERS)

"""Layers with a checkpoint's quantized weights in their method's layout, if the method's own kernels cannot be traced.

Every tensor has its size on the device. A product only allocates its result; in training, a product of GPTQ also allocates its
layer's weights in 16 bits.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sizer.architecture.compressed_layouts import Tensors
from sizer.architecture.layouts import LAYOUTS, layout_of
from sizer.architecture.quantization import weight_bytes
from sizer.architecture.quantization_settings import Quantization
from sizer.architecture.quantized_layers import quantized_layers, settings_of, sides_of
from sizer.base.errors import BuildError, ConfigError, quote
from sizer.base.units import format_both
from sizer.catalogue.weights import METHODS


class PackedLinear(nn.Module):
    """A linear layer with its weight packed in the tensors of a layout; `bias` is the layer's own, or None."""

    def __init__(self, outputs: int, inputs: int, tensors: Tensors, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        _register(self, tensors, outputs * inputs)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return [.., out_features] for `input [.., in_features]`."""
        return input.new_empty((*input.shape[:-1], self.out_features))


class DequantizedLinear(PackedLinear):
    """A linear layer in GPTQ that dequantizes its weight in training and multiplies with it: autograd saves that weight.

    gptqmodel/nn_modules/qlinear/torch.py, TorchLinear._forward_eager, 7.7; its compiled dequantization is assumed to allocate
    only its result. auto_gptq's layers did the same (nn_modules/qlinear/qlinear_cuda_old.py, 0.7).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return [.., out_features] for `input [.., in_features]`."""
        if not self.training:
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        weight = self.scales.new_empty((self.in_features, self.out_features)).to(input.dtype)
        result = torch.matmul(rows, weight).reshape(*input.shape[:-1], self.out_features)
        del weight
        return result if self.bias is None else result.add_(self.bias.to(result.dtype))


class PackedExperts(nn.Module):
    """Experts with weights packed in the tensors of a layout, each kind stacked over the experts.

    `fused` says that the activation is part of the first product, and the sum over a token's experts of the second.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        tensors: dict[str, tuple[Tensors, int]],
        biases: dict[str, nn.Parameter],
        *,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.hidden, self.inner, self.fused = hidden, inner, fused
        for name, (held, elements) in tensors.items():
            _register(self, {f"{name}_{key}": row for key, row in held.items()}, elements)
        for name, bias in biases.items():
            self.register_parameter(name, bias)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [tokens, hidden] for `hidden_states [tokens, hidden]`, `top_k_index` and `top_k_weights [tokens, k]`."""
        tokens, chosen = top_k_index.shape
        if self.fused:  # triton_kernels/matmul_ogs.py, init_allocation: a result, and a scratch for unsummed products
            product = hidden_states.new_empty((tokens * chosen, self.inner))
            result, scratch = (product.new_empty((rows, self.hidden)) for rows in (tokens, tokens * chosen))
            del scratch
            return result.view_as(hidden_states)
        gate, up = hidden_states.new_empty((tokens * chosen, 2 * self.inner)).chunk(2, dim=-1)
        product = nn.functional.silu(gate) * up
        down = product.new_empty((tokens, chosen, self.hidden))
        return (down * top_k_weights[..., None].to(down.dtype)).sum(dim=1).view_as(hidden_states)


def _register(module: nn.Module, tensors: Tensors, elements: int) -> None:
    """Register the tensors of a layout on a module; the first one represents `elements` elements, the others none."""
    for name, (shape, dtype) in tensors.items():
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
        parameter.elements, elements = elements, 0
        module.register_parameter(name, parameter)


def pack(module: nn.Module, dtype: str, quantization: Quantization) -> nn.Module:
    """Replace the layers of a transformers model on meta that its checkpoint has quantized by packed layers; return the module.

    `dtype` is a dtype of the contract. Raises BuildError if there is no such layer, ConfigError if the settings do not fit the
    method.
    """
    half = dtype.removeprefix("amp-")
    module.to(torch.float32 if dtype != half else getattr(torch, half))
    layers = quantized_layers(module, quantization)
    if not layers:
        given = f"{quote(quantization.method)} with {type(module).__name__}"
        raise BuildError(
            "this model has no layer that its checkpoint quantizes", given=given, todo="ask for weights=full"
        )
    for path, layer in layers:
        module.set_submodule(path, _packed(path, layer, quantization, getattr(torch, half)))
    return module


def load_packed(module: nn.Module, device: str = "meta") -> nn.Module:
    """Return the model of `pack`; its tensors are loaded unchanged. Raises BuildError for a device: its layers compute nothing."""
    if device != "meta":
        raise BuildError(
            "the kernels of these weights are not known",
            given=f"a checkpoint's weights on {device}",
            todo="ask for weights=full, or weights=nf4",
        )
    return module


def describe_checkpoint(module: nn.Module, quantization: Quantization) -> tuple[str, ...]:
    """Return a sentence on the contents of an unquantized model's checkpoint; none if its layout is not known."""
    if quantization.method not in LAYOUTS:
        return ()
    try:
        size = checkpoint_bytes(module, quantization, getattr(torch, quantization.dtype))
    except ConfigError:  # an uncountable checkpoint does not change the count of the model
        return ()
    title = METHODS[quantization.method].title
    return (f"The checkpoint's own tensors take {format_both(size)}: {title}, the rest in {quantization.dtype}.",)


def checkpoint_bytes(module: nn.Module, quantization: Quantization, dtype: torch.dtype) -> int:
    """Return the bytes of a quantized checkpoint's tensors, for an unquantized model.

    They are those of the layouts, and of the other tensors in `dtype`; tied tensors count once. Raises ConfigError as `pack`
    does.
    """
    packed = total = 0
    seen: set[int] = set()
    for path, layer in quantized_layers(module, quantization):
        held = _packed(path, layer, quantization, dtype)
        packed += sum(weight_bytes(one) for one in held.parameters() if hasattr(one, "elements"))
        seen.update(id(one) for name, one in layer.named_parameters(recurse=False) if not name.endswith("bias"))
    for parameter in module.parameters():
        total += 0 if id(parameter) in seen else parameter.numel() * dtype.itemsize
    persistent = (
        buffer
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and name not in child._non_persistent_buffers_set
    )
    return packed + total + sum(map(weight_bytes, persistent))


def _packed(path: str, layer: nn.Module, quantization: Quantization, dtype: torch.dtype) -> nn.Module:
    """Return the layer with its weights packed."""
    method, settings = quantization.method, settings_of(quantization, path, layer)
    if (sides := sides_of(layer)) is None:
        inputs, outputs = layer.weight.shape if isinstance(layer, Conv1D) else layer.weight.shape[::-1]
        bias = layer.bias
        if bias is not None and method == "quark":  # ImportBuilder.build_bias of quark's, 0.13
            bias = nn.Parameter(bias.float(), requires_grad=False)
        made = DequantizedLinear if method == "gptq" else PackedLinear
        return made(outputs, inputs, layout_of(method, settings, outputs, inputs, dtype), bias)
    count, hidden, inner = sides
    together = method == "mxfp4"
    parts = (
        {"gate_up_proj": (2 * inner, hidden)}
        if together
        else {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    )
    parts["down_proj"] = hidden, inner
    tensors = {
        name: (_stacked(layout_of(method, settings, *shape, dtype), count), count * prod(shape))
        for name, shape in parts.items()
    }
    biases = {name: one for name, one in layer._parameters.items() if one is not None and name.endswith("bias")}
    if together:  # transformers/integrations/mxfp4.py, Mxfp4GptOssExperts, 5.23
        biases = {name: nn.Parameter(one.float(), requires_grad=False) for name, one in biases.items()}
    return PackedExperts(hidden, inner, tensors, biases, fused=together)


def _stacked(tensors: Tensors, count: int) -> Tensors:
    return {name: ((count, *shape), dtype) for name, (shape, dtype) in tensors.items()}

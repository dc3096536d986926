"""Recurrent layers: cuDNN runs all stacked layers in one kernel, which keeps one reserve for the backward pass.

Source: aten/src/ATen/native/RNN.cpp (use_cudnn), native/cudnn/RNN.cpp (_cudnn_impl, _cudnn_rnn, _cudnn_rnn_backward), PyTorch
2.6 and 2.11 to 2.15. Weights are one flat buffer on the device (flatten_parameters); their gradients are also one buffer.

*Known limitations*: how large cuDNN's reserve and workspace are is known to the library only (cudnnGetRNNTempSpaceSizes); they are
modelled as the activations of the gates, the cells, and the outputs between layers. Its dropout state is a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from sizer.tracing.allocations import AllocationRule, During, Steps
from sizer.tracing.cuda.by_hardware import DROPOUT
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.meta.shortcuts import like
from sizer.tracing.values.handler import HandlerContext
from sizer.tracing.values.known import tensors_of

_aten = torch.ops.aten
_RELU, _TANH, _LSTM, _GRU = range(4)  # cudnnRNNMode_t
_NAMES = {_RELU: "rnn_relu", _TANH: "rnn_tanh", _LSTM: "lstm", _GRU: "gru"}
_KEPT = {_RELU: 1, _TANH: 1, _LSTM: 5, _GRU: 4}  # values kept per hidden unit and step: gates, for LSTM the cell too
_FLATTENED = {torch.half, torch.float, torch.double}  # torch.backends.cudnn.CUDNN_TENSOR_DTYPES
_DROPOUT_STATE = 80 * 2048 * 16  # bytes, for a device of unknown hardware: as for 80 multiprocessors
_BIASED = 4  # fewest tensors of a layer with biases
_GATES = {_RELU: 1, _TANH: 1, _LSTM: 4, _GRU: 3}


def _run(device: Device, mode: int, input, hx, params, layers, dropout, train, both_ways, batch_first,
         sizes) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the output, the last hidden state, and the last cell of an LSTM.

    An LSTM's `hx` is a pair.
    """
    hx, cx = hx if mode == _LSTM else (hx, None)
    hidden = (cx if cx is not None else hx).shape[2]
    projected = hx.shape[2] if cx is not None and hx.shape[2] != hidden else 0
    device.note_choice("recurrent layers", "cuDNN", f"{_NAMES[mode]}, {str(input.dtype)[6:]}, hidden size {hidden}")
    flat = torch.empty(0, dtype=torch.uint8, device=input.device)  # the buffer that the weights are views of
    stride = len(params) // (layers * (2 if both_ways else 1))
    out = _aten._cudnn_rnn.default(input, params, stride, flat, hx, cx, mode, hidden, projected, layers,
                                   batch_first, dropout, train, both_ways, sizes, None)  # fmt: skip
    return tuple(out)[: 3 if mode == _LSTM else 2]


def _padded(mode: int) -> Callable[..., Any]:
    """Return the kernel of aten.lstm.input or its counterpart of another mode."""

    def run(device, input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        return _run(
            device, mode, input, hx, params, num_layers, dropout, train, bidirectional, batch_first, []
        )

    return run


def _packed(mode: int) -> Callable[..., Any]:
    """Return the kernel over packed sequences, such as aten.lstm.data."""

    def run(device, data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional):
        sizes = batch_sizes.tolist()
        return _run(device, mode, data, hx, params, num_layers, dropout, train, bidirectional, False, sizes)

    return run


def _steps(input: Tensor, sizes: list[int], batch_first: bool) -> tuple[int, int]:
    """Return the product of time steps and samples, and the number of samples."""
    if sizes:
        return input.shape[0], sizes[0]
    return input.shape[0] * input.shape[1], input.shape[0 if batch_first else 1]


def reserve_bytes(
    mode: int, steps: int, hidden: int, width: int, layers: int, ways: int, dropout: float, item: int
) -> int:
    """Return the modelled bytes of cuDNN's reserve for the backward pass.

    `steps` is the product of time steps and samples. The reserve has the gates and cells per layer and direction, and outputs
    of `width` between layers, twice with dropout.
    """
    between = steps * width * ways * (layers - 1) * (2 if dropout else 1)
    return (steps * hidden * _KEPT[mode] * layers * ways + between) * item


def forward(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return _cudnn_rnn's results: output, last hidden state, last cell, reserve and flat weights.

    The reserve is empty in inference. Weights that are never one buffer, those in bfloat16, are copied into a new one, which
    stays for the backward pass (cudnn/RNN.cpp, try_get_weight_buf).
    """
    input, weights, stride, flat = args[:4]
    cx, mode, hidden, projected, layers = args[5:10]
    batch_first, dropout, train, both_ways, sizes = args[10], args[11], args[12], args[13], args[14]
    if input.device.type != "meta":
        return NotImplemented
    if dropout and train:  # `dropout_state_cache`, one of each device
        recorder.keep(DeferredSize(_DROPOUT_STATE, DROPOUT, (), ()))
    ways, width = 2 if both_ways else 1, projected or hidden
    steps, samples = _steps(input, sizes, batch_first)

    output = input.new_empty((steps, width * ways) if sizes else (input.shape[1 if batch_first else 0], samples, width * ways))
    if _is_turned(batch_first, sizes):
        output = output.transpose(0, 1)
    kept = reserve_bytes(mode, steps, hidden, width, layers, ways, dropout, input.itemsize) if train else 0
    reserve = torch.empty(kept, dtype=torch.uint8, device="meta")
    cell = input.new_empty((layers * ways, samples, hidden) if cx is not None else 0)
    if weights[0].dtype not in _FLATTENED:
        beside = 0 if stride >= _BIASED else _bias_values(weights, stride)
        flat = input.new_empty(sum(weight.numel() for weight in weights) + beside)
    return output, input.new_empty(layers * ways, samples, width), cell, reserve, flat


def backward(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return _cudnn_rnn_backward's gradients of input, hidden state, cell and each weight; the last are views of one buffer."""
    input, weights, stride, hx, cx, wanted = *args[:3], args[4], args[5], args[-1]
    if input.device.type != "meta":
        return NotImplemented
    turned = _is_turned(args[14], args[18])

    grads: list[Tensor] = []
    if wanted[3] and stride < _BIASED:
        grads = [like(weight) for weight in weights]
    elif wanted[3]:
        buffer = torch.empty(sum(w.numel() for w in weights), dtype=weights[0].dtype, device="meta")
        grads = [
            part.view(w.shape) for part, w in zip(buffer.split([w.numel() for w in weights]), weights, strict=True)
        ]
    dx = like(input.transpose(0, 1)).transpose(0, 1) if turned else like(input)
    return dx, like(hx), like(cx) if cx is not None else None, grads


def _is_turned(batch_first: bool, sizes: list[int]) -> bool:
    """Return True if cuDNN's kernel, which needs time as the first dimension, reads and writes transposed views."""
    return batch_first and not sizes


def _bias_values(weights: Sequence[Tensor], stride: int) -> int:
    """Return the number of cuDNN's bias values for a layer without biases: two for each row of its weights."""
    return sum(2 * weight.shape[0] for weight in weights[::stride])


def _copied(tensor: Tensor, turned: bool) -> list[int]:
    """Return the bytes of the kernel's contiguous copy, 0 if it makes none."""
    read = tensor.transpose(0, 1) if turned else tensor
    return [] if read.is_contiguous() else [tensor.nbytes]


def _workspace(input: Tensor, mode: int, hidden: int, both_ways: bool) -> int:
    """Return the bytes of the products of one layer's input with its weights, for all steps.

    This is a model: the true size is known to the library only.
    """
    steps = input.shape[0] if input.dim() == 2 else input.shape[0] * input.shape[1]
    return steps * hidden * _GATES[mode] * (2 if both_ways else 1) * input.itemsize


def held_forward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a contiguous input, and the workspace before the reserve, for `_cudnn_rnn` (cudnn/RNN.cpp)."""
    output, hidden, cell, reserve, flat = out
    yield tuple(_copied(args[0], _is_turned(args[10], args[14])))
    yield from (output, hidden, cell, flat)
    yield (_workspace(args[0], args[6], args[7], args[13]),)
    yield reserve


def held_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add zeros for missing gradients, copies of strided operands, and workspaces, for `_cudnn_rnn_backward` (cudnn/RNN.cpp).

    The inputs' gradients need a contiguous input and a contiguous gradient of the output, the weights' gradients a contiguous
    input. Both have a workspace.
    """
    hx, cx, output = args[4:7]
    pairs = zip((output, hx, cx), args[7:10], strict=True)
    yield tuple(like.nbytes for like, grad in pairs if like is not None and grad is None)
    turned = _is_turned(args[14], args[18])
    copied = _copied(args[0], turned)
    gradient = _copied(like(output) if args[7] is None else args[7], turned)
    workspace = _workspace(args[0], args[10], args[11], args[17])
    yield During([*copied, *gradient], (*tensors_of(out[:3]), [workspace]))
    if out[3] and args[2] < _BIASED:
        buffer = args[1][0].itemsize * (sum(weight.numel() for weight in args[1]) + _bias_values(args[1], args[2]))
        yield (*copied, buffer, workspace)
        yield from out[3]
    elif out[3]:
        yield During(copied, (out[3][0], [workspace]))


def lstm_cell(device, input: Tensor, hx: list[Tensor], w_ih, w_hh, b_ih=None, b_hh=None) -> tuple[Tensor, Tensor]:
    """Run aten.lstm_cell: products without their biases, which the cell's kernel adds (`LSTMCell` of native/RNN.cpp)."""
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    return _aten._thnn_fused_lstm_cell.default(*gates, hx[1], b_ih, b_hh)[:2]


def gru_cell(device: Device, input: Tensor, hx: Tensor, w_ih, w_hh, b_ih=None, b_hh=None) -> Tensor:
    """Run aten.gru_cell, with the same steps as `lstm_cell`."""
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t())
    return _aten._thnn_fused_gru_cell.default(*gates, hx, b_ih, b_hh)[0]


def fused_lstm(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return hidden state, cell, and activated gates for the backward pass (_thnn_fused_lstm_cell of native/cuda/RNN.cu)."""
    return like(args[2]), like(args[2]), like(args[0])


def fused_lstm_backward(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return _thnn_fused_lstm_cell_backward's gradients (native/cuda/RNN.cu).

    Both products share one gradient, and so do both biases.
    """
    with recorder:
        gates, cell = torch.empty_like(args[4]), torch.empty_like(args[2])
        bias = gates.sum(0) if args[5] else None
    return gates, gates, cell, bias, bias


def fused_gru(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return hidden state, and five values per hidden unit for backward (_thnn_fused_gru_cell of native/cuda/RNN.cu)."""
    hidden = args[2]
    return like(hidden), hidden.new_empty(hidden.shape[0], 5 * hidden.shape[1])


def fused_gru_backward(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the gradients of _thnn_fused_gru_cell_backward (native/cuda/RNN.cu)."""
    gradient, kept, has_bias = args
    with recorder:
        inputs, states = (gradient.new_empty(kept.shape[0], 3 * kept.shape[1] // 5) for _ in range(2))
        hidden = torch.empty_like(gradient)
        biases = (inputs.sum(0), states.sum(0)) if has_bias else (None, None)
    return inputs, states, hidden, *biases


def last_first(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the values for the backward pass before the other results (native/cuda/RNN.cu)."""
    return [out[-1], *out[:-1]]


@contextmanager
def weights_flattened(block_of: Callable[[Tensor], int | None]) -> Iterator[None]:
    """Make `RNNBase.flatten_parameters` turn weights on the device into views of one new buffer, as cuDNN requires.

    This holds within the context. PyTorch calls the method when a module has moved to the device, and again from user code.
    Meta tensors have no address, so PyTorch's own method leaves them unchanged. Source: torch/nn/modules/rnn.py, and
    copy_weights_to_flat_buf_views in native/cudnn/RNN.cpp.

    Args:
        block_of: Return the block of a tensor on the device; None for other tensors.
    """
    flatten = nn.RNNBase.flatten_parameters

    def flatten_parameters(module: nn.RNNBase) -> None:
        weights = [weight for weight in module._flat_weights if isinstance(weight, Tensor)]
        if len(weights) != len(module._flat_weights_names) or {weight.dtype for weight in weights} - _FLATTENED:
            return
        if any(not weight.is_meta or block_of(weight) is None for weight in weights):
            flatten(module)
            return
        with torch.no_grad():
            sizes = [weight.numel() for weight in weights]
            beside = 0 if module.bias else _bias_values(weights, len(weights) // len(module._all_weights))
            buffer = weights[0].new_empty(sum(sizes) + beside)
            for weight, part in zip(weights, buffer.split([*sizes, beside]), strict=False):
                weight.data = part.view(weight.shape)

    with mock.patch.object(nn.RNNBase, "flatten_parameters", flatten_parameters):
        yield


KERNELS = {
    **{getattr(_aten, name).input: _padded(mode) for mode, name in _NAMES.items()},
    **{getattr(_aten, name).data: _packed(mode) for mode, name in _NAMES.items()},
    _aten.lstm_cell.default: lstm_cell,
    _aten.gru_cell.default: gru_cell,
}
HANDLERS = {
    _aten._cudnn_rnn.default: forward,
    _aten._cudnn_rnn_backward.default: backward,
    _aten._thnn_fused_lstm_cell.default: fused_lstm,
    _aten._thnn_fused_lstm_cell_backward.default: fused_lstm_backward,
    _aten._thnn_fused_gru_cell.default: fused_gru,
    _aten._thnn_fused_gru_cell_backward.default: fused_gru_backward,
}
BY_CUDNN: dict[Any, AllocationRule] = {
    _aten._cudnn_rnn.default: held_forward,
    _aten._cudnn_rnn_backward.default: held_backward,
}
ALLOCATIONS: dict[Any, AllocationRule] = {
    **BY_CUDNN,
    _aten._thnn_fused_lstm_cell.default: last_first,
    _aten._thnn_fused_gru_cell.default: last_first,
}

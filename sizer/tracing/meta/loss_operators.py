"""Losses that meta tensors cannot compute as a device does: of sequences, and `F.linear_cross_entropy` with options.

Connectionist temporal classification: PyTorch has no meta kernel for its loss.

Sources: aten/src/ATen/native/LossCTC.cpp, native/cuda/LossCTC.cu and native/cudnn/LossCTC.cpp, PyTorch 2.15. The workspace of
cuDNN's path (int32 targets on the CPU) only cuDNN knows, and it counts as 0.

The loss of an RNN transducer: an operator of torchaudio, which has no meta kernel and is often not installed.

Source: torchaudio 2.11, RnntLoss in functional/functional.py, and workspace.h, cpu/compute.cpp and gpu/compute.cu of
src/libtorchaudio/rnnt.

`F.linear_cross_entropy` with options: PyTorch's Python code, which chooses its buffers by the tensors' device.

On CUDA a product of 16-bit matrices gives float32 logits, elsewhere copies in float32 are multiplied
(torch/nn/modules/linear_cross_entropy.py, `_ChunkContext.build`, 2.15).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sizer.tracing.device import Device
from sizer.tracing.meta.accelerators import OnMeta
from sizer.tracing.values.handler import HandlerContext

_aten = torch.ops.aten


def ctc_loss(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the loss [batch] and log_alpha [batch, time, 2 * longest target + 1] of _ctc_loss.

    log_probs is [time, batch, classes].
    """
    log_probs, targets, target_lengths = args[0], args[1], args[3]
    if log_probs.device.type != "meta":
        return NotImplemented
    time, batch = log_probs.shape[0], log_probs.shape[1]
    longest = _longest(recorder, targets, target_lengths)
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, 2 * longest + 1)


def ctc_loss_of_tensors(
    device: Device,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """Run aten.ctc_loss.Tensor with lengths read on the host; under a dispatch mode PyTorch would compute with them."""
    inputs, longest = input_lengths.tolist(), target_lengths.tolist()
    if not any(longest):  # unknown lengths read as 0
        longest = [targets.shape[-1]] * len(longest) if targets.dim() > 1 else longest
    divides = device.kind == "cuda" and reduction == 1 and target_lengths.is_cpu and log_probs.is_meta
    if divides and log_probs.dim() == 3 and _uses_cudnn(log_probs, targets, inputs, longest, blank):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        )
    return ctc_loss_of_lengths(device, log_probs, targets, inputs, longest, blank, reduction, zero_infinity)


def ctc_loss_of_lengths(
    device: Device,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: list[int],
    target_lengths: list[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """Run aten.ctc_loss.IntList (`ctc_loss_impl`), with cuDNN's kernel if a CUDA device would use it."""
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    lengths = input_lengths, target_lengths
    if device.kind == "cuda" and batched.is_meta and _uses_cudnn(batched, targets, *lengths, blank):
        loss = _aten._cudnn_ctc_loss.default(batched, targets, *lengths, blank, False, zero_infinity)[0]
    else:
        targets = targets.to(batched.device, torch.long)
        loss = _aten._ctc_loss.default(batched, targets, *lengths, blank, zero_infinity)[0]
        if zero_infinity:
            loss = torch.where(loss == torch.inf, loss.new_zeros(()), loss)
    if reduction == 1:
        divisor = torch.tensor(target_lengths, dtype=loss.dtype).to(loss.device).clamp_min(1)
        return (loss / divisor).mean()
    if reduction == 2:
        return loss.sum()
    return loss if log_probs.dim() == 3 else loss.squeeze(0)


def _uses_cudnn(log_probs: Tensor, targets: Tensor, input_lengths: list[int], target_lengths: list[int], blank: int) -> bool:
    """Return whether cuDNN computes the loss (`_use_cudnn_ctc_loss` of native/cudnn/LossCTC.cpp)."""
    return (
        torch.backends.cudnn.enabled
        and blank == 0
        and (targets.dim(), targets.dtype, targets.is_cpu, targets.is_contiguous()) == (1, torch.int32, True, True)
        and log_probs.dtype == torch.float32
        and all(length == log_probs.shape[0] for length in input_lengths)
        and all(target < 256 and target <= given for given, target in zip(input_lengths, target_lengths, strict=True))
    )


def cudnn_ctc_loss(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the loss [batch] and the gradient of log_probs of _cudnn_ctc_loss."""
    log_probs = args[0]
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _longest(recorder: HandlerContext, targets: torch.Tensor, lengths: Any) -> int:
    if isinstance(lengths, torch.Tensor):
        real = recorder.values.get(lengths)
        if real is not None:
            return int(real.max())
        recorder.stand_in("the longest target of a CTC loss was taken to fill its row")
        return targets.shape[-1]
    return max(lengths)


def ctc_loss_backward(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return a contiguous gradient of log_probs for _ctc_loss_backward."""
    log_probs = args[1]
    if log_probs.device.type != "meta":
        return NotImplemented
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


KERNELS = {_aten.ctc_loss.Tensor: ctc_loss_of_tensors, _aten.ctc_loss.IntList: ctc_loss_of_lengths}
HANDLERS = {
    _aten._cudnn_ctc_loss.default: cudnn_ctc_loss,
    _aten._ctc_loss.default: ctc_loss,
    _aten._ctc_loss.Tensor: ctc_loss,
    _aten._ctc_loss_backward.default: ctc_loss_backward,
    _aten._ctc_loss_backward.Tensor: ctc_loss_backward,
}
LIBRARIES = {_aten._cudnn_ctc_loss.default: lambda args: "cuDNN's CTC loss"}


# ---------------------------------------------------------------------------------------------------------------- rnnt


LIKE_TORCHAUDIO = "the loss of a transducer was taken to hold what torchaudio's operator holds"
FLOATS_PER_PLACE = 5  # of the lattice of frames and labels: denominator, two probabilities, alpha, beta
COUNTERS = 2  # integers for each sample and label, on a GPU


class _Loss(torch.autograd.Function):
    """Costs [batch] of logits [batch, frames, 1 + labels, classes]; the gradient is computed together with them and kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, on_gpu: bool) -> Tensor:
        batch, frames, places, _ = logits.shape
        costs, gradients = logits.new_empty(batch), torch.empty_like(logits)
        counters = logits.new_empty(COUNTERS * batch * places if on_gpu else 0, dtype=torch.int32)
        lattice = logits.new_empty(FLOATS_PER_PLACE * batch * frames * places, dtype=torch.float32)
        del counters, lattice
        ctx.save_for_backward(gradients)
        return costs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * grad.view(-1, 1, 1, 1), None


@contextmanager
def transducers_on(recorder: HandlerContext) -> Iterator[None]:
    """Make transformers' transducers compute their loss as with torchaudio within the context, installed or not."""
    module = sys.modules.get("transformers.loss.loss_rnnt")
    if module is None or not hasattr(module, "rnnt_loss"):
        yield
        return
    with mock.patch.object(module, "rnnt_loss", _with_operator(recorder, inspect.unwrap(module.rnnt_loss))):
        yield


def _with_operator(recorder: HandlerContext, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rnnt_loss(logits: Tensor, *rest: Any, **options: Any) -> Tensor:
        recorder.stand_in(LIKE_TORCHAUDIO)
        return _Loss.apply(logits, recorder.device.kind == "cuda")

    torchaudio: Any = SimpleNamespace(functional=SimpleNamespace(rnnt_loss=rnnt_loss))

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        before = sys.modules.get("torchaudio")
        sys.modules["torchaudio"] = torchaudio  # the function imports it when it is called
        try:
            return compute(*args, **kwargs)
        finally:
            del sys.modules["torchaudio"]
            if before is not None:
                sys.modules["torchaudio"] = before

    return loss


# -------------------------------------------------------------------------------------------------------- chunked loss


_ACCUMULATOR = "_linear_cross_entropy_batch_chunked_accumulator"


@contextmanager
def chunked_loss_on(device: Device) -> Iterator[None]:
    """Make the chunked loss use a device's path within the context; otherwise its path is that of meta tensors."""
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None:  # before PyTorch 2.15
        yield
        return
    told, adjust = torch.device(device.kind), options._adjust
    patches = ExitStack()

    def adjusted(self: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.nn.modules import linear_cross_entropy as module

        accumulate = getattr(module, _ACCUMULATOR)
        if not isinstance(accumulate, _OnDevice):
            patches.enter_context(mock.patch.object(module, _ACCUMULATOR, _OnDevice(accumulate, told)))
        if kwargs["device"].type != "meta":
            return adjust(self, *args, **kwargs)
        with _capability_told(device) if device.kind == "cuda" else nullcontext():
            return adjust(self, *args, **kwargs | {"device": told})

    with patches, mock.patch.object(options, "_adjust", adjusted):
        yield


class _OnDevice:
    """PyTorch's loop over chunks, in which tensors report the device and buffers are on meta."""

    def __init__(self, accumulate: Any, told: torch.device) -> None:
        self._accumulate, self._told = accumulate, told

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._told.type == "cpu" or args[0].device.type != "meta":  # on the CPU it does the same as on meta
            return self._accumulate(*args, **kwargs)
        read, name = Tensor.device.__get__, self._accumulate.__module__

        def device_of(tensor: Tensor) -> torch.device:
            return self._told if sys._getframe(1).f_globals.get("__name__") == name else read(tensor)

        with mock.patch.object(Tensor, "device", property(device_of), create=True), OnMeta():
            return self._accumulate(*args, **kwargs)


def _capability_told(device: Device) -> Any:
    return mock.patch.multiple(
        torch.cuda, is_available=lambda: True, get_device_capability=lambda index=None: (device.capability[0], 0)
    )

"""Connectionist temporal classification: PyTorch has no meta kernel for its loss.

Source: aten/src/ATen/native/cuda/LossCTC.cu. The cuDNN path (int32 targets on the CPU) is not taken by what is traced here.
"""

from __future__ import annotations

from typing import Any

import torch

from sizer.tracing.values.handler import HandlerContext

_aten = torch.ops.aten


def ctc_loss(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """_ctc_loss: (loss [batch], log_alpha [batch, time, 2 * longest target + 1]) from log_probs [time, batch, classes]."""
    log_probs, targets, target_lengths = args[0], args[1], args[3]
    if log_probs.device.type != "meta":
        return NotImplemented
    time, batch = log_probs.shape[0], log_probs.shape[1]
    longest = _longest(recorder, targets, target_lengths)
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, 2 * longest + 1)


def _longest(recorder: HandlerContext, targets: torch.Tensor, lengths: Any) -> int:
    if isinstance(lengths, torch.Tensor):
        real = recorder.values.get(lengths)
        if real is not None:
            return int(real.max())
        recorder.stand_in("the longest target of a CTC loss was taken to fill its row")
        return targets.shape[-1]
    return max(lengths)


def ctc_loss_backward(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """_ctc_loss_backward: the gradient of log_probs, of its shape."""
    log_probs = args[1]
    return torch.empty_like(log_probs) if log_probs.device.type == "meta" else NotImplemented


HANDLERS = {
    _aten._ctc_loss.default: ctc_loss,
    _aten._ctc_loss.Tensor: ctc_loss,
    _aten._ctc_loss_backward.default: ctc_loss_backward,
    _aten._ctc_loss_backward.Tensor: ctc_loss_backward,
}

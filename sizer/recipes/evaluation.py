"""An evaluation after the training steps, as transformers' Trainer runs it (trainer.py, `evaluation_loop`, 5.24)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sizer.architecture.blueprint import Example
from sizer.architecture.frozen_parts import inner
from sizer.architecture.peft_adapters import base_of
from sizer.base.errors import RequestError
from sizer.catalogue.recipes import LOGITS, evaluated_batches
from sizer.recipes.losses import LossOf

_CLASSES = re.compile(r"LM$|LMHead|Classification$|ForConditionalGeneration$|ForMultipleChoice$")


def run_evaluation(
    evaluate: str,
    module: nn.Module,
    example: Example,
    *,
    cast: Callable[[], AbstractContextManager],
    predict: Callable[[nn.Module, Example], Any],
    loss_of: LossOf | None = None,
    scores_first: bool = False,
) -> None:
    """Run the forward passes of an evaluation, without gradients.

    With `loss` a batch's outputs are dropped after it. With `logits:N` the logits of N batches stay on the device, concatenated
    batch by batch, as the Trainer keeps them for `compute_metrics` if `eval_accumulation_steps` is not set. Each of several
    ranks keeps the logits of all ranks.

    Args:
        evaluate: A value of the key `evaluate`.
        module: The model, which is put back into training mode. A model wrapped by DDP runs without DDP (`_wrap_model`).
        example: The inputs of one batch, with labels.
        cast: A function that returns the autocast context, with which Accelerate returns outputs in float32.
        predict: A function that runs the module.
        loss_of: The function that computes the loss, None to use the loss in the model's outputs.
        scores_first: Whether logits come from a second pass, as in TRL's `SFTTrainer.prediction_step` (1.16).
    """
    keeps = evaluate.startswith(LOGITS)
    module = inner(module)
    kept: list[Tensor | None] = [None, None, None]  # losses, logits, labels
    module.eval()
    with torch.no_grad():
        for _ in range(evaluated_batches(evaluate)):
            loss = logits = labels = None
            if loss_of is not None and (scores_first or not keeps):
                with cast():
                    loss = loss_of(module, example)
            if keeps or loss_of is None:
                outputs = _outputs(module, example if loss is None else _unlabelled(example), cast, predict)
                loss = getattr(outputs, "loss", None) if loss is None else loss
                logits, labels = (outputs.logits.detach(), example.kwargs.get("labels")) if keeps else (None, None)
                del outputs
            if isinstance(loss, Tensor):
                loss = loss.detach().mean().repeat(_samples(example))
            # the Trainer's loop holds the last batch's tensors during the next forward pass
            last = [loss, logits, labels]
            del loss, logits, labels
            for number in range(len(last)):  # enumerate would keep a tensor until its next one
                last[number] = _of_all_ranks(last[number])
                kept[number] = _joined(kept[number], last[number])
    module.train()


def _outputs(
    module: nn.Module, example: Example, cast: Callable[[], AbstractContextManager], predict: Callable[[nn.Module, Example], Any]
) -> Any:
    """Return a module's outputs as Accelerate prepares them: 16-bit outputs in float32 under autocast (`prepare_model`, 1.15)."""
    with cast():
        outputs = predict(module, example)
    return outputs if cast is nullcontext else _in_float32(outputs)


def _in_float32(value: Any) -> Any:
    """Return outputs in float32, as `convert_to_fp32` does (accelerate/utils/operations.py, 1.15)."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, Mapping):
        return type(value)(**{name: _in_float32(one) for name, one in value.items()})
    return type(value)(map(_in_float32, value)) if type(value) in (tuple, list) else value


def _unlabelled(example: Example) -> Example:
    return replace(example, kwargs={name: value for name, value in example.kwargs.items() if name != "labels"})


def _of_all_ranks(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor [samples, …] gathered from all ranks, as `_gpu_gather` does (accelerate/utils/operations.py, 1.15).

    On one device, return it unchanged.
    """
    if tensor is None or not dist.is_initialized():
        return tensor
    gathered = tensor.new_empty(dist.get_world_size() * tensor.numel())
    dist.all_gather_into_tensor(gathered, tensor.contiguous().view(-1))
    return gathered.view(-1, *tensor.shape[1:])


def check_evaluation(evaluate: str, module: nn.Module) -> None:
    """Raise RequestError if an evaluation keeps logits, and the module returns none."""
    if evaluate.startswith(LOGITS) and not _CLASSES.search(type(base_of(module)).__name__):
        raise RequestError(
            f"evaluate: {type(base_of(module)).__name__} is not known to return logits",
            given=repr(evaluate),
            allowed="none, loss; logits:<batches> with a class for language modeling or classification",
            todo="ask for evaluate=loss",
        )


def _joined(before: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Return tensors of one length concatenated, as `nested_concat` does (trainer_pt_utils.py, 5.24)."""
    return new if before is None or new is None else torch.cat((before, new), dim=0)


def _samples(example: Example) -> int:
    tensors = (value for value in (*example.args, *example.kwargs.values()) if isinstance(value, Tensor) and value.dim())
    return next(tensors).shape[0]

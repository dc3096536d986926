"""An evaluation after the training steps, as transformers' Trainer runs it (trainer.py, `evaluation_loop`, 5.24)."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from sizer.architecture.blueprint import Example
from sizer.architecture.peft_adapters import base_of
from sizer.base.errors import RequestError
from sizer.catalogue.recipes import LOGITS, evaluated_batches

_CLASSES = re.compile(r"LM$|LMHead|Classification$|ForConditionalGeneration$|ForMultipleChoice$")


def run_evaluation(
    evaluate: str,
    module: nn.Module,
    example: Example,
    *,
    cast: Callable[[], AbstractContextManager],
    predict: Callable[[nn.Module, Example], Any],
) -> None:
    """Run the forward passes of an evaluation, without gradients.

    With `loss` a batch's outputs are dropped after it. With `logits:N` the logits of N batches stay on the device, concatenated
    batch by batch, as the Trainer keeps them for `compute_metrics` if `eval_accumulation_steps` is not set.

    Args:
        evaluate: A value of the key `evaluate`.
        module: The model, which is put back into training mode.
        example: The inputs of one batch, with labels.
        cast: A function that returns the autocast context.
        predict: A function that runs the module.
    """
    keeps = evaluate.startswith(LOGITS)
    losses: Tensor | None = None
    logits: Tensor | None = None
    labels: Tensor | None = None
    module.eval()
    with torch.no_grad():
        for _ in range(evaluated_batches(evaluate)):
            with cast():
                outputs = predict(module, example)
            loss = getattr(outputs, "loss", None)
            if isinstance(loss, Tensor):
                losses = _joined(losses, loss.detach().mean().repeat(_samples(example)))
            # the Trainer's loop holds the last batch's logits during the next forward pass
            last = outputs.logits.detach() if keeps else None
            del outputs, loss
            if last is not None:
                logits, labels = _joined(logits, last), _joined(labels, example.kwargs.get("labels"))
    module.train()


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
    """Return what `nested_concat` does of tensors of one length (trainer_pt_utils.py, 5.24)."""
    return new if before is None or new is None else torch.cat((before, new), dim=0)


def _samples(example: Example) -> int:
    tensors = (value for value in (*example.args, *example.kwargs.values()) if isinstance(value, Tensor) and value.dim())
    return next(tensors).shape[0]

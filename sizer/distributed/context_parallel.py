"""Context parallel: each sequence is sharded over several ranks, with ring attention by PyTorch's own `context_parallel`.

A batch is sharded as in transformers' Trainer (`Trainer._prepare_context_parallel_inputs`, read in 5.17 and 5.23): labels are
shifted first, position ids and an all-ones mask are added, and each rank takes its part of all of these. Sequences are cut into
twice as many pieces as there are ranks. Each rank has one piece from the front and one from the back.

*Known limitation*: PyTorch's own code fails with efficient attention, which float32 uses, if a piece is not a multiple of 32
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sizer.architecture.blueprint import Example
from sizer.base.errors import RequestError
from sizer.distributed.tensor_parallel import shortest_window

BUFFERS = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels")
PIECES = 2  # per rank, of a sequence
BLOCK = 32  # tokens per block of log-sum-exp values in efficient attention
IGNORED = -100  # label of a token without a next token


def check_context(module: nn.Module, degree: int, length: int | None) -> None:
    """Raise RequestError unless a model and a sequence length support context parallel over `degree` ranks.

    The model must be a causal language model of transformers with sdpa attention over all earlier tokens, trained with its own
    loss. The tokens must divide among the ranks.
    """
    config: Any = getattr(module, "config", None)
    if getattr(module, "loss_type", None) != "ForCausalLM" or config._attn_implementation != "sdpa":
        raise RequestError(
            "cp",
            given=f"{degree} for {type(module).__name__}",
            allowed="language models of transformers that learn the next token, with causal attention by sdpa",
            todo="leave cp out",
        )
    step, window = PIECES * degree, shortest_window(module)
    if length is None or length % step:
        raise RequestError(
            "cp",
            given=f"{degree} for {length or 0:,} tokens",
            allowed=f"a length that divides by {step}: each rank has two pieces of a sequence",
            todo=f"ask for seq={max(step, round((length or 0) / step) * step)}",
        )
    if window is not None and window <= length:
        raise RequestError(
            "cp",
            given=f"{degree} for {config.model_type}, with attention windows of {window:,} tokens",
            allowed="attention to all earlier tokens, which is what PyTorch has context parallel for",
            todo=f"ask for seq={(window - 1) // step * step}" if window > step else "leave cp out",
        )


def whole_sequences(example: Example) -> Example:
    """Return a batch for a language model with the further inputs that are sharded: int64 of shape [batch, tokens] each."""
    tokens, labels = example.kwargs["input_ids"], example.kwargs["labels"]
    beside = {
        "attention_mask": torch.ones_like(tokens),
        "position_ids": torch.arange(tokens.shape[1]).repeat(tokens.shape[0], 1),
        "shift_labels": nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].clone(
            memory_format=torch.contiguous_format
        ),
    }
    return replace(example, kwargs=example.kwargs | beside)


@contextmanager
def shared_sequences(example: Example, mesh: DeviceMesh) -> Iterator[None]:
    """Shard the tensors of a batch over the ranks of a mesh within the context, with ring attention."""
    from torch.distributed.tensor.experimental import context_parallel

    buffers = [example.kwargs[name] for name in BUFFERS]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
        yield

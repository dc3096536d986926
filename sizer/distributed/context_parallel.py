"""Context parallel: each sequence lies over several ranks, and attention goes round them, by PyTorch's own `context_parallel`.

A batch is shared as transformers' Trainer shares it (`Trainer._prepare_context_parallel_inputs`, read in 5.17 and 5.23): labels are
shifted before, the tokens' positions and a mask of all of them stand beside, and each rank takes its part of all these. Sequences
are cut in twice as many pieces as there are ranks, of which each has one from the front and one from the back.

*Known limitation*: PyTorch's own fails over efficient attention, which float32 takes, where a piece is no multiple of 32 tokens.
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
PIECES = 2  # of a sequence, for each rank
BLOCK = 32  # tokens whose logarithms efficient attention keeps together
IGNORED = -100  # the label of what has no next token


def check_context(module: nn.Module, degree: int, length: int | None) -> None:
    """Raise RequestError where a model of transformers does not attend to all earlier tokens of a text, and learn the next one by
    its own loss, or so many tokens do not divide among the ranks."""
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
            given=f"{degree} for {config.model_type}, whose layers look back {window:,} tokens",
            allowed="attention to all earlier tokens, which is what PyTorch has context parallel for",
            todo=f"ask for seq={(window - 1) // step * step}" if window > step else "leave cp out",
        )


def whole_sequences(example: Example) -> Example:
    """A batch for a language model, with what must be cut beside its tokens: int64 of shape [batch, tokens] each."""
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
    """Within the context the tensors of a batch are a rank's part of them, and attention goes round the ranks of a mesh."""
    from torch.distributed.tensor.experimental import context_parallel

    buffers = [example.kwargs[name] for name in BUFFERS]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
        yield

"""Tensor, sequence and loss parallel: PyTorch's styles around matrices that transformers' own plans split by columns or rows.

    embedding ─► [norm ─► attention ─► + ─► norm ─► MLP ─► +] × layers ─► norm ─► head ─► loss
      by tokens    by tokens   by heads   by tokens  by columns  by tokens       by words

transformers has no styles for activations between the matrices (`DistributedConfig.enable_sequence_parallel`, "not wired up
yet" in 5.17 and 5.23). They are those of PyTorch's own Llama example: docs.pytorch.org/tutorials/intermediate/TP_tutorial.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sizer.base.errors import RequestError

COLUMNS, ROWS, WORDS, HEADS = "colwise", "rowwise", "embedding_rowwise", "replicated_with_grad_allreduce"
SHAPE = "models of Llama's shape: layers of attention, MLP and norms, and a head for words"


def check_sequence(module: nn.Module, degree: int, length: int | None) -> None:
    """Raise RequestError if the sequence length does not divide by the ranks, or if attention takes a mask.

    A mask would be made for one rank's part of the sequence.
    """
    config = module.config.get_text_config()
    if length is not None and length % degree:
        nearest = max(degree, round(length / degree) * degree)
        raise RequestError(
            "sp",
            given=f"1 for {length:,} tokens on {degree} ranks",
            allowed=f"a length that divides by {degree}",
            todo=f"ask for seq={nearest}, or leave sp out",
        )
    if config._attn_implementation != "sdpa":
        raise RequestError(
            "sp",
            given=f"1 with {config._attn_implementation} attention",
            allowed="sdpa, which takes no mask: transformers makes masks for the tokens of one rank",
            todo="use attention=sdpa if the model supports it, or leave sp out",
        )
    window = shortest_window(module)
    if window is not None and (length is None or window <= length):
        raise RequestError(
            "sp",
            given=f"1 for {config.model_type}, with attention windows of {window:,} tokens",
            allowed="attention to all tokens: transformers makes the window's mask for the tokens of one rank",
            todo=f"ask for seq={(window - 1) // degree * degree}, or leave sp out"
            if window > degree
            else "leave sp out",
        )


def shortest_window(module: nn.Module) -> int | None:
    """Return the shortest attention window of a model's layers, in tokens, or None if all attend to all tokens."""
    config = module.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    limited = any(kind != "full_attention" for kind in kinds) if kinds is not None else True
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    return window if limited else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """One of PyTorch's parallel styles: the `name` of its class in torch.distributed.tensor.parallel, and its `options`."""

    name: str
    options: dict[str, Any]

    def make(self) -> object:
        """Return the style itself."""
        from torch.distributed.tensor import parallel

        return getattr(parallel, self.name)(**self.options)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


def styles(module: nn.Module, *, sequence: bool, loss: bool) -> dict[str, Style]:
    """Return PyTorch's parallel style for each split part of a model of transformers, by name ("*" for each of the layers).

    With `sequence`, shard activations between the matrices along the sequence; with `loss`, shard the logits along the
    vocabulary.
    Raises RequestError if the model's parts differ from a Llama's.
    """
    from torch.distributed.tensor import Replicate, Shard

    between = Shard(1) if sequence else Replicate()
    rules, head = dict(module.tp_plan), _name_of(module, module.get_output_embeddings())
    if sequence:
        rules[_name_of(module, module.get_input_embeddings())] = WORDS
    known = {
        COLUMNS: Style(name="ColwiseParallel", options={}),
        ROWS: Style(name="RowwiseParallel", options={"output_layouts": between}),
        WORDS: Style(name="RowwiseParallel", options={"input_layouts": Replicate(), "output_layouts": between}),
        HEADS: _norm(sequence_dim=2),  # per head; a rank has some of the heads
    }
    split = {name: known[rule] for name, rule in rules.items() if name != head and rule in known}
    if head not in rules or len(split) < len(rules) - 1:
        raise _refused(module, "sp" if sequence else "lp" if loss else "tp")
    by_words = {"output_layouts": Shard(-1), "use_local_output": False} if loss else {"output_layouts": Replicate()}
    split[head] = Style(name="ColwiseParallel", options={"input_layouts": between, **by_words})
    if sequence:
        split |= _between(module, split)
    return split


def _between(module: nn.Module, split: dict[str, Style]) -> dict[str, Style]:
    """Return the styles of the parts between the matrices: norms use a rank's tokens, attention and MLP gather all of them."""
    found: dict[str, Style] = {}
    for name, part in _parts(module, split):
        parameters = list(part.parameters())
        if any(rule.startswith(f"{name}.") for rule in split):
            found[name] = _gathering(part)
        elif any(parameter.dim() > 1 for parameter in parameters):
            raise _refused(module, "sp")
        elif parameters:
            found[name] = _norm(sequence_dim=1)
    return found


def _norm(*, sequence_dim: int) -> Style:
    return Style(name="SequenceParallel", options={"sequence_dim": sequence_dim, "use_local_output": True})


def _gathering(part: nn.Module) -> Style:
    """Return the style of a part that gets a rank's tokens and gathers all of them: by name, if it has other arguments."""
    from torch.distributed.tensor import Replicate, Shard

    first, *others = signature(part.forward).parameters
    given, taken = Shard(1), Replicate()
    if others:
        options: dict[str, Any] = {"input_kwarg_layouts": {first: given}, "desired_input_kwarg_layouts": {first: taken}}
    else:
        options = {"input_layouts": given, "desired_input_layouts": taken}
    return Style(name="PrepareModuleInput", options=options)


def _parts(module: nn.Module, split: dict[str, Style]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a model's decoder that are not matrices of the plan, and those of each of its layers, by name."""
    decoder = _name_of(module, module.base_model)
    for name, part in module.base_model.named_children():
        path = f"{decoder}.{name}" if decoder else name
        if not isinstance(part, nn.ModuleList):
            yield from () if path in split else ((path, part),)
            continue
        for layer in part:
            yield from ((f"{path}.*.{inner}", one) for inner, one in layer.named_children())


def _name_of(module: nn.Module, part: nn.Module | None) -> str | None:
    return next((name for name, one in module.named_modules() if one is part), None)


def _refused(module: nn.Module, key: str) -> RequestError:
    return RequestError(key, given=f"1 for {type(module).__name__}", allowed=SHAPE, todo=f"leave {key} out")


# ----------------------------------------------------------------------------------------------------- tensor parallel


def check_degree(module: nn.Module, degree: int) -> None:
    """Raise RequestError if a model of transformers has no plan for its layers, or its heads do not divide by the degree."""
    plan = getattr(module, "tp_plan", None) or {}
    if not any("*" in rule for rule in plan):
        raise RequestError(
            "tp",
            given=f"{degree} for {type(module).__name__}",
            allowed="1: transformers has no tensor parallel plan for its layers",
            todo="leave tp out, or choose a model with a plan (Llama, Qwen, Mistral, Gemma, …)",
        )
    config = module.config.get_text_config()
    heads = gcd(config.num_attention_heads, getattr(config, "num_key_value_heads", None) or 0)
    if heads % degree:
        nearest = max(number for number in range(1, degree) if heads % number == 0)
        raise RequestError(
            "tp",
            given=f"{degree} for {type(module).__name__}",
            allowed=f"divisors of {heads}, the common divisor of its heads and key heads",
            todo=f"ask for tp={nearest}" if nearest > 1 else "leave tp out",
        )


def split_matrices(module: nn.Module, mesh: DeviceMesh, *, sequence: bool = False, loss: bool = False) -> None:
    """Replace each matrix in the plan of a model on meta by its rank's part, and add communication to its modules.

    With `sequence` activations between the matrices are split too, with `loss` the logits: by PyTorch's styles for the same
    matrices (sizer.distributed.tensor_parallel). As in `from_pretrained`, tied parameters are tied afterwards.
    Source: transformers/distributed/tensor_parallel.py, read in 5.17 and 5.23; plans are expanded there.
    """
    from torch.distributed.tensor.parallel import parallelize_module
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    _untie(module)
    if sequence or loss:
        made = {name: style.make() for name, style in styles(module, sequence=sequence, loss=loss).items()}
        parallelize_module(module, mesh, made, src_data_rank=None)
    elif hasattr(module, "_expand_parallel_plan"):
        apply_tensor_parallelism(module, mesh, module._expand_parallel_plan(module.tp_plan))
    else:
        apply_tensor_parallelism(module, mesh)
    module.tie_weights()


def _untie(module: nn.Module) -> None:
    """Give each module separate parameters."""
    seen: set[nn.Parameter] = set()
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter in seen:
                child._parameters[name] = nn.Parameter(
                    torch.empty_like(parameter), requires_grad=parameter.requires_grad
                )
            elif parameter is not None:
                seen.add(parameter)

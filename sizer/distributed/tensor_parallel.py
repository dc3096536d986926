"""Tensor parallel by transformers' own plans: which module is split by columns, which by rows."""

from __future__ import annotations

from math import gcd

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sizer.base.errors import RequestError
from sizer.distributed.sequence_parallel import styles


def check_degree(module: nn.Module, degree: int) -> None:
    """Raise RequestError where a model of transformers has no plan for its layers, or its heads do not divide by the degree."""
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
            allowed=f"divisors of {heads}, by which its heads and key heads divide",
            todo=f"ask for tp={nearest}" if nearest > 1 else "leave tp out",
        )


def split_matrices(module: nn.Module, mesh: DeviceMesh, *, sequence: bool = False, loss: bool = False) -> None:
    """Leave a model of transformers on meta its rank's part of each matrix that its plan names, and let its modules communicate.

    With `sequence` what is between the matrices is split, too, with `loss` the logits: by PyTorch's styles for the same matrices
    (sizer.distributed.sequence_parallel). As `from_pretrained` does, tied parameters are tied after that.
    Source: transformers/distributed/tensor_parallel.py, read in 5.17 and 5.23, where plans come expanded.
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
    """Give each module parameters of its own."""
    seen: set[nn.Parameter] = set()
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter in seen:
                child._parameters[name] = nn.Parameter(
                    torch.empty_like(parameter), requires_grad=parameter.requires_grad
                )
            elif parameter is not None:
                seen.add(parameter)

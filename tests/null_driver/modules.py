"""PyTorch's own samples of modules (torch.testing's module_db) over the null driver: bytes at the peak and strides of the result.

    python -m tests.null_driver.modules MODE DTYPE FIRST EVERY

MODE is no_grad, inference or backward; a backward pass is that of a module in training. Of all modules those from the FIRST on,
each EVERY-th, with all its samples. The last line printed is JSON, as that of tests/null_driver/operators.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.null_driver.operators import Case, print_measured, tensors


def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward pass of a module."""
    return module(*args, **kwargs)


def cases(mode: str, dtype: torch.dtype, first: int, every: int) -> Iterator[Case]:
    """Yield the name of a sample, a call of its module, the module on the CPU and the arguments of the call."""
    from torch.testing._internal.common_modules import module_db

    torch.backends.__allow_nonbracketed_mutation_flag = True  # as for operators
    training = mode == "backward"
    for info in module_db[first::every]:
        if dtype not in info.dtypes or issubclass(info.module_cls, torch.nn.modules.lazy.LazyModuleMixin):
            continue  # a lazy module that was made on the CPU is not traced: docs/limits.md
        torch.manual_seed(0)
        samples = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=False, training=training
        )
        for number, sample in enumerate(samples):
            made, called = sample.constructor_input, sample.forward_input
            if called is None:
                continue
            module = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
            shapes = [tuple(tensor.shape) for tensor in tensors((called.args, called.kwargs))]
            yield f"{info.name}|{number}|{shapes}{sample.desc}", call, module, tuple(called.args), called.kwargs


if __name__ == "__main__":
    print_measured(cases)

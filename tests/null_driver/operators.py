"""PyTorch's own operator samples (torch.testing's op_db) over the null driver: bytes at the peak and strides of the result.

    python -m tests.null_driver.operators MODE DTYPE FIRST COUNT EVERY

MODE is no_grad, inference or backward. For every operator COUNT samples from the FIRST on; of all operators each EVERY-th. The last
line printed is JSON: for each sample its bytes, strides and shapes, or why it did not run.

The names of samples include the shapes of their tensors and their words, since PyTorch draws some samples from a set, in another
order in each process.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

NAMED = "SIZER_OPERATOR_NAMES"  # a variable of the environment: operators to take in place of all
MODES = ("no_grad", "inference", "backward")
LATEST = 0.2  # seconds that a sample waits for memory that another thread frees
# Operators that need a linear-algebra library, draw at random, or whose result's size only a kernel knows.
# This list may only shrink.
# fmt: off
SKIPPED = tuple("""
    linalg _refs masked_select sparse lu geqrf ormqr qr svd pinverse triangular_solve symeig pca_lowrank jiterator torch.ops
    histogramdd lstsq matrix_exp to_sparse unique nonzero _segment segment combinations inner_loop argwhere orgqr
""".split())  # noqa: SIM905
# fmt: on

Case = tuple[str, Callable[..., Any], Any, tuple, dict]


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# Operators whose gradient selects the elements of a mask, if their value is a tensor.
SELECTED = ("masked_fill", "masked_scatter")


def is_counted(op: Any, sample: Any, mode: str) -> bool:
    """Return True unless values decide how many elements an operator selects or repeats: the null driver's kernels count none."""
    others = tensors(sample.args)
    if (op.name == "repeat_interleave" and others) or (mode == "backward" and op.name in SELECTED and len(others) > 1):
        return False
    masks = [leaf for value in sample.args if isinstance(value, (list, tuple)) for leaf in tensors(value)]
    return not any(mask.dtype == torch.bool for mask in masks)


def cases(mode: str, dtype: torch.dtype, first: int, count: int, every: int) -> Iterator[Case]:
    """Yield the name of a sample, its operator and its arguments on the CPU."""
    from torch.testing._internal.common_methods_invocations import op_db

    # torch.testing's internals forbid to set flags of backends for the rest of the process (disable_global_flags).
    torch.backends.__allow_nonbracketed_mutation_flag = True
    named = os.environ.get(NAMED, "").split()
    for op in [op for op in op_db if (op.name in named if named else not op.name.startswith(SKIPPED))][::every]:
        if mode == "backward" and not op.supports_autograd:
            continue
        if dtype not in op.dtypes and dtype not in (getattr(op, "dtypesIfCUDA", None) or ()):
            continue
        torch.manual_seed(0)
        samples = []
        try:
            for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
                samples.append(sample)
                if len(samples) == first + count:
                    break
        except (RuntimeError, NotImplementedError, ValueError, TypeError):  # the CPU cannot make samples in this dtype
            continue
        for number, sample in enumerate(samples[first:], first):
            if is_counted(op, sample, mode):
                name = ".".join(part for part in (op.name, op.variant_test_name) if part)
                shapes = [tuple(tensor.shape) for tensor in tensors((sample.input, sample.args, sample.kwargs))]
                words = [value for value in sample.kwargs.values() if isinstance(value, str)]
                yield f"{name}|{number}|{shapes}{words}", op, sample.input, sample.args, sample.kwargs


def moved(case: Case, mode: str) -> tuple[Any, tuple, dict]:
    """Return a sample's arguments on the device; floating-point tensors require gradients in a backward pass.

    The input may be a module, or a function that makes it there.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.nn.Module):
            return copy.deepcopy(leaf).to("cuda")
        return leaf.to("cuda") if isinstance(leaf, torch.Tensor) else leaf

    made = tree_map(move, case[2:])
    if callable(made[0]) and not isinstance(made[0], torch.nn.Module):
        made = made[0]().detach(), *made[1:]
    if mode == "backward":
        for tensor in tensors(made):
            if tensor.is_floating_point():
                tensor.requires_grad_(True)
    input, args, kwargs = made
    return input, args, {**kwargs, "device": "cuda"} if "device" in kwargs else kwargs


def work(case: Case, mode: str, input: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator, and its backward pass if the mode asks for it."""
    with torch.inference_mode() if mode == "inference" else torch.set_grad_enabled(mode == "backward"):
        out = case[1](input, *args, **kwargs)
    if mode == "backward":
        roots = [tensor for tensor in tensors(out) if tensor.requires_grad and tensor.is_floating_point()]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return out


def layout(out: Any) -> list[list[list[int]]]:
    """Return strides and shapes of the tensors in a result."""
    return [[list(tensor.stride()), list(tensor.shape)] for tensor in tensors(out)]


def measured(case: Case, mode: str) -> list[Any]:
    """Return the peak bytes and layout of a sample on the device, or the class of the error alone."""
    free = torch.cuda.memory_allocated()
    try:
        arguments = moved(case, mode)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = work(case, mode, *arguments)
        return [torch.cuda.max_memory_allocated() - before, layout(out)]
    except Exception as error:  # of any class: Triton's own is no RuntimeError, and it launches nothing over the null driver
        return [type(error).__name__]
    finally:
        arguments = out = None
        gc.collect()  # what a cycle holds would be freed during the next sample
        until = time.monotonic() + LATEST
        while torch.cuda.memory_allocated() > free and time.monotonic() < until:
            time.sleep(0.001)  # so would be what autograd's thread frees late, on a busy machine
        torch.cuda.empty_cache()  # new memory holds zeros: code that reads a result finds no leftover of an earlier sample


def print_measured(cases: Callable[..., Iterator[Case]]) -> None:
    """Print what the cases that the command line names take on the device. Ends the process."""
    warnings.simplefilter("ignore")
    mode, dtype, *numbers = sys.argv[1:]
    torch.cuda.init()
    found = {}
    for case in cases(mode, getattr(torch, dtype), *map(int, numbers)):
        if not found:
            gc.freeze()  # PyTorch and its list of operators, which no collection need look at
        found[case[0]] = measured(case, mode)
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    print_measured(cases)

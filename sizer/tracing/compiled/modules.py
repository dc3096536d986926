"""The compiler in the step of a query: which modules it compiles, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from sizer.architecture.checkpointing import repeated_blocks
from sizer.base.errors import Refusal, RequestError
from sizer.catalogue.compilation import BLOCKS, MODEL
from sizer.distributed.described_gpus import accelerator_of, devices_answer
from sizer.tracing.compiled.install import Compiler

if TYPE_CHECKING:
    from sizer.tracing.recorder import Recorder
    from sizer.tracing.steps import Work

WRAPPED = "_orig_mod."  # begins the names of parameters in a compiled module (torch/_dynamo/eval_frame.py, 2.15)


@contextmanager
def compiling(work: Work, recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Within the context the recorder's steps may call code that is compiled for its device's GPU, if the work compiles any.

    Yields the function to call at the end of each phase. Enter it before anything of PyTorch is replaced.
    """
    gpu = recorder.device.compiles_for
    if work.compile_scope is None or gpu is None:
        yield lambda: None
        return
    compiler = Compiler(gpu, recorder)
    recorder.compiles = True
    with devices_answer(accelerator_of(gpu), count=1), compiler.watching(), budgeted(work.budget):
        yield compiler.end_step
    recorder.device.note_compiled(compiler.code)


@contextmanager
def budgeted(budget: float | None) -> Iterator[None]:
    """Within the context the compiler's activation memory budget is this one, if given."""
    import torch._functorch.config as config

    if budget is None:
        yield
        return
    with config.patch(activation_memory_budget=budget):
        yield


@contextmanager
def module_compiled(module: nn.Module, scope: str | None, mode: str) -> Iterator[nn.Module]:
    """Within the context a module, or each of its repeated blocks, is compiled as trainers do; yields what the loop calls.

    `mode` is one of COMPILE_MODES (sizer.catalogue.compilation).

    Raises RequestError for blocks of a module that has none.
    """
    if scope is None:
        yield module
        return
    if scope == MODEL:
        yield torch.compile(module, mode=mode)
        return
    blocks = repeated_blocks(module)
    if not blocks:
        refusal = Refusal(
            key="compile_scope",
            given=f"{BLOCKS!r} with a model that repeats no block",
            allowed=MODEL,
            todo=f"ask for compile_scope={MODEL}",
        )
        raise RequestError(refusals=[refusal])
    for block in blocks:
        block.compile(mode=mode)
    try:
        yield module
    finally:
        for block in blocks:
            block._compiled_call_impl = None

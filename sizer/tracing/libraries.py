"""Steps that call a package with Triton kernels: its tensors say that they are on CUDA, and its kernels launch nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from sizer.catalogue.recipes import is_library
from sizer.distributed.described_gpus import Accelerator, devices_answer
from sizer.tracing.compiled.install import hardware_of_capability
from sizer.tracing.compiled.launches import Launches
from sizer.tracing.meta.accelerators import OnMeta, devices_told, modes_in_callbacks
from sizer.tracing.recorder import Recorder


def compiled_code_run_eagerly() -> AbstractContextManager[None]:
    """Return a context without the compiler: cut cross-entropy compiles two functions of single numbers (cce.py, 25.1)."""
    return torch.compiler.set_stance("force_eager")


@contextmanager
def libraries_called(loss: str, recorder: Recorder) -> Iterator[None]:
    """Within the context the package that computes a loss finds its tensors on CUDA, and its kernels launch nothing."""
    device = recorder.device
    if not is_library(loss) or device.kind != "cuda":
        yield
        return
    capability = device.capability.plain
    launches = Launches(hardware_of_capability(capability), recorder.values.forget)
    with (
        compiled_code_run_eagerly() if loss == "cce" else nullcontext(),
        launches.seen(),
        devices_answer(Accelerator(capability=capability), count=1),
        OnMeta(recorder.host, recorder.deferred) as mode,
        modes_in_callbacks(mode),
        devices_told(recorder.host, recorder.deferred),
    ):
        yield
    recorder.notes.update(dict.fromkeys(launches.notes()))

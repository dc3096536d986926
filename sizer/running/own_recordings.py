"""Answer a script's recordings of its own run: memory history, and the profiler's events of the device. Imports torch.

A dry run records the memory history itself, and there is no device with kernels for CUPTI to record.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity


@contextmanager
def answer_recordings(*, history: bool) -> Iterator[None]:
    """Keep the script's own recordings from changing the run, within the context.

    - The script's calls of `_record_memory_history` do nothing.
    - With `history`, snapshots are those of the run; else they are empty.
    - The profiler records only the host's events. Recording the device's events would end the process in CUPTI. Without CUPTI,
      the profiler would record an event of the device around each operator (KINETO_GPU_FALLBACK), which fails on route meta
      each time, slowly.
    """
    configure = profiler.profile.config

    def configured(own: profiler.profile, *args: Any, **kwargs: Any) -> Any:
        if own.profiler_kind == profiler.ProfilerState.KINETO_GPU_FALLBACK:
            own.profiler_kind = profiler.ProfilerState.KINETO
        return configure(own, *args, **kwargs)


    def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(config: Any, activities: set[ProfilerActivity], *args: Any, **kwargs: Any) -> Any:
            return function(config, activities - {ProfilerActivity.CUDA} or {ProfilerActivity.CPU}, *args, **kwargs)

        return called

    def record(*args: Any, **kwargs: Any) -> None:
        pass

    def snapshot(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"segments": [], "device_traces": [[]], "allocator_settings": {}, "external_annotations": []}

    def dump(filename: Any = "dump_snapshot.pickle", *args: Any, **kwargs: Any) -> None:
        with open(filename, "wb") as file:
            pickle.dump(snapshot(), file)

    memory: dict[str, Any] = {"_record_memory_history": record}
    ranges: dict[str, Any] = {}
    if not history:
        memory |= {"_snapshot": snapshot, "_dump_snapshot": dump}
        ranges = {"start": record, "stop": record}  # these serve a profiler outside of the process
    with (
        mock.patch.multiple(torch.cuda.profiler, **ranges) if ranges else nullcontext(),
        mock.patch.multiple(torch.cuda.memory, **memory),
        mock.patch.object(profiler.profile, "config", configured),
        mock.patch.multiple(
            profiler,
            _prepare_profiler=on_host(profiler._prepare_profiler),
            _enable_profiler=on_host(profiler._enable_profiler),
        ),
    ):
        yield

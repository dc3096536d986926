"""The figures of each step of a work with compiled code, by the trace: what torch.cuda would say after each step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np

import sizer.estimating.custom as custom
from sizer.allocator.allocator import replay_events
from sizer.catalogue.gpus import GPUS
from sizer.tape.tape import Tape
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.watch import StepWatcher
from tests.tracing.compiled_works import WORKS

GPU = "h100-80gb"


def trace_steps(
    setup: Callable[[], Any], *, gpu: str = GPU, steps: int = 3, **options: Any
) -> tuple[Tape, list[int], Any]:
    """Return the tape of some steps, the number of its events at the end of the setup and of each step, and the report."""
    ends: list[int] = []
    tapes: list[Tape] = []
    loaded, end_step, report = StepWatcher.loaded, StepWatcher.end_step, custom._report

    def note_loaded(self: StepWatcher) -> None:
        loaded(self)
        ends.append(len(self.recorder.log.order))

    def note_end(self: StepWatcher, phase: str) -> None:
        end_step(self, phase)
        ends.append(len(self.recorder.log.order))

    def note_tape(tape: Tape, *args: Any, **kwargs: Any) -> Any:
        tapes.append(tape)
        return report(tape, *args, **kwargs)

    with (
        mock.patch.object(StepWatcher, "loaded", note_loaded),
        mock.patch.object(StepWatcher, "end_step", note_end),
        mock.patch.object(custom, "_report", note_tape),
    ):
        found = custom.size_step(setup, gpu=gpu, steps=steps, **options)
    return tapes[-1].resolve(size_oracle_of(GPUS[gpu])), ends, found


def figures(name: str, *, gpu: str = GPU) -> list[list[int]]:
    """By step of a work, bytes: the most allocated and reserved, and what is allocated at its end."""
    return figures_of(WORKS[name], gpu=gpu)


def figures_of(setup: Callable[[], Any], *, gpu: str = GPU, **options: Any) -> list[list[int]]:
    """By step of a setup, bytes: the most allocated and reserved, and what is allocated at its end."""
    tape, ends, _ = trace_steps(setup, gpu=gpu, **options)
    placed = replay_events(tape, "cuda")
    allocated = np.concatenate(([0], np.cumsum(placed.changes)))
    reserved = np.concatenate(([0], placed.reserved))
    parts = [slice(begin, end + 1) for begin, end in pairwise(ends)]
    return [[int(allocated[part].max()), int(reserved[part].max()), int(allocated[part.stop - 1])] for part in parts]

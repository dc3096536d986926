"""In which order weights arrive on a device that are quantized while they are loaded, and what that makes of a tape.

transformers reads each weight in one of up to four threads, the files' names in order, and quantizes them in another, each in its
turn (transformers/core_model_loading.py, GLOBAL_WORKERS and convert_and_load_state_dict_in_model, 5.0 to 5.23). So up to four
wait on the device at a time, and which of them has come first hangs on how long reading and copying took: the holes that they
leave among those that stay are others in each run.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from unittest import mock

import torch
from torch import nn

import sizer
from sizer.architecture import quantizers
from sizer.estimating import custom
from sizer.tape.tape import Tape
from tests.benchmarks.published.cases import CASES
from tests.benchmarks.published.held import STEPS, rules_of
from tests.benchmarks.published.rows import Run, read_arguments

SPREAD = 1.0  # of the logarithm of the time that a weight takes, beside its bytes: nothing published tells it
CALL = 2**18  # bytes that are read in the time that a weight takes of whatever size
READ = 0.1, 0.7  # the part of that time before a weight's memory is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One weight: its bytes, and where in a tape's order its memory is asked for (`begin`), where it is taken up (`taken`) and
    where nothing but what stays of it is left (`end`)."""

    size: int
    begin: int
    taken: int
    end: int


def arrivals_of(run: Run) -> tuple[Tape, list[Arrival]]:
    """The tape of a run of QLoRA whose weights arrive one by one, in the order of their names, and these."""
    sizes: list[int] = []
    tapes: list[Tape] = []

    # the report is of no use here, what it is made of is
    with (
        _places_told(sizes),
        mock.patch.object(custom, "_report", lambda tape, *args, **kwargs: tapes.append(tape)),
    ):
        sizer.size_step(CASES[run.case](**read_arguments(run.arguments)), gpu=run.gpu, steps=STEPS, torch=rules_of(run))
    return _read_places(tapes[0], sizes)


def in_threads(tape: Tape, arrivals: list[Arrival], threads: int, random: Random) -> Tape:
    """The tape with weights read by so many threads, each of which takes the next one when it is done."""
    free, ready, events = [0.0] * threads, 0.0, []
    for number, one in enumerate(arrivals):
        thread = min(range(threads), key=free.__getitem__)
        takes = (one.size + CALL) * random.lognormvariate(0, SPREAD)
        events.append((free[thread] + takes * random.uniform(*READ), number, one.begin, one.taken))
        free[thread] += takes
        ready = max(ready, free[thread])
        events.append((ready, number, one.taken, one.end))
    order = tape.order[: arrivals[0].begin]
    for _, _, begin, end in sorted(events):
        order.extend(tape.order[begin:end])
    order.extend(tape.order[arrivals[-1].end :])
    return replace(tape, order=order)


@contextmanager
def _places_told(sizes: list[int]) -> Iterator[None]:
    """Within it `load_quantized` calls `empty_cache` before and after it takes a weight's memory, and notes its bytes."""

    def arrive(old: nn.Parameter, device: str) -> nn.Parameter:
        torch.cuda.empty_cache()
        made = quantizers_arrive(old, device)
        torch.cuda.empty_cache()
        sizes.append(made.nbytes)
        return made

    def move_buffers(module: nn.Module, device: str) -> None:
        torch.cuda.empty_cache()
        quantizers_move_buffers(module, device)

    quantizers_arrive, quantizers_move_buffers = quantizers.arrive, quantizers.move_buffers
    with mock.patch.multiple(quantizers, arrive=arrive, move_buffers=move_buffers):
        yield


def _read_places(tape: Tape, sizes: list[int]) -> tuple[Tape, list[Arrival]]:
    """The tape, whose calls that tell the places of weights of so many bytes come first, and these places in it."""
    calls = dict.fromkeys(sorted(tape.empties())[: 2 * len(sizes) + 1])
    order = array("q", [event for call in calls for event in (call, ~call)])  # nothing is cached yet
    places = []
    for event in tape.order:
        if (event if event >= 0 else ~event) not in calls:
            order.append(event)
        elif event >= 0:
            places.append(len(order))
    arrivals = [
        Arrival(size=size, begin=begin, taken=taken, end=end)
        for size, begin, taken, end in zip(sizes, places[:-1:2], places[1::2], places[2::2], strict=True)
    ]
    return replace(tape, order=order), arrivals

"""In which order weights arrive on a device that are quantised while they are loaded, and what that makes of a tape.

transformers reads each weight in one of up to four threads, the files' names in order, and quantises them in another, each in its
turn (transformers/core_model_loading.py, GLOBAL_WORKERS and convert_and_load_state_dict_in_model, 5.0 to 5.23). So up to four
wait on the device at a time, and which of them has come first hangs on how long reading and copying took: the holes that they
leave among those that stay are others in each run.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from random import Random
from unittest import mock

import torch
from torch import nn

import sizer
from sizer import custom
from sizer.architecture.quantizers import STANDARD_DEVIATION, warm_up
from sizer.memory.tape import Tape
from tests.benchmarks.published import adapters
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

    def load(module: nn.Module, device: str) -> nn.Module:
        return _load_in_order(module, device, sizes)

    # the report is of no use here, what it is made of is
    with (
        mock.patch.object(adapters, "load_quantized", load),
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


def _load_in_order(module: nn.Module, device: str, sizes: list[int]) -> nn.Module:
    """As `load_quantized`, in the order of names; calls of `empty_cache` tell the places (Arrival) of each weight."""
    warm_up(module, device)
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((part, name))
    for path, old in sorted(module.named_parameters(), key=lambda item: _natural(item[0])):
        torch.cuda.empty_cache()
        value = torch.empty(old.shape, dtype=old.dtype, device=device)
        torch.cuda.empty_cache()
        sizes.append(value.nbytes)
        made = type(old)(value.normal_(std=STANDARD_DEVIATION), requires_grad=old.requires_grad, **vars(old))
        del value
        for part, name in owners[id(old)]:
            part._parameters[name] = made
        del made
        layer = module.get_submodule(path.rpartition(".")[0])
        if path.endswith(".weight") and hasattr(layer.weight, "_quantize"):
            layer.weight._quantize(device)
    torch.cuda.empty_cache()
    for part in module.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    module.hf_quantizer.postprocess_model(module)
    return module


def _natural(path: str) -> list[tuple[bool, int, str]]:
    """A key by which numbers are in their order, and before names (dot_natural_key in core_model_loading.py)."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split(".")]


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

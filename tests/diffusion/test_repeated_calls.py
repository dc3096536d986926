"""Calls that are logged again: the same tape as if each had run. `.ci/run` runs those whose name begins with "sample"."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from sizer.base.config_json import encode_config
from sizer.base.errors import TraceError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.diffusion import work
from sizer.diffusion.repeated_calls import RepeatedCalls
from sizer.query.text import parse_query
from sizer.tape.tape import BlockNotes, Tape
from sizer.tracing.device import Device
from tests.diffusion.test_bundle import files_of

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]  # diffusers warns of its own deprecations

GPU = "rtx-4090"
# Hooks of each layer, a VAE's tiles, tensors that a VAE keeps in a list from frame to frame, and quantized weights.
CASES = {
    "sample-sequential": ("flux.1-dev", "&image=128&offload=sequential"),
    "sample-tiles": ("hunyuan-video", "&frames=9&image=320x512&vae=tiling"),
    "sample-lists": ("wan2.1-t2v-1.3b", "&frames=21&image=256x256"),
    "leaves": ("hunyuan-video", "&frames=9&image=320x512&vae=tiling&offload=group-leaf"),
    "streams": ("flux.1-dev", "&image=128&offload=group-leaf&stream=1"),
    "blocks": ("flux.1-dev", "&image=128&offload=group-block:2"),
    "nf4": ("flux.1-dev", "&image=128&weights=nf4"),
    "cache": ("cogvideox-2b", "&frames=17&vae=tiling"),
    "notes": ("sd1.5", "&image=128&offload=group-leaf"),  # on values that equal layers of different lists read
    "gaps": ("mochi", "&frames=7&image=128x128"),  # in a list of layers
}


def query_of(name: str, asked: str) -> str:
    """Return the query of a preset's files, with six layers of its transformer if it has one."""
    files = files_of(name)
    if "transformer/config.json" in files:
        files["transformer/config.json"]["num_layers"] = 6
    return f"arch=config:{encode_config(json.dumps(files))}&gpu={GPU}{asked}"


def traced(query: str, calls: list[RepeatedCalls] | None, notes: BlockNotes | None = None) -> tuple[Tape, object]:
    """Return the tape of a query in bfloat16, and the kernels that its trace has noted."""
    gpu = find_gpu(GPU)
    device = Device("cuda", gpu.capability)
    tape = work._trace(parse_query(query), None, "bfloat16", 1, device, gpu, notes, calls)
    return tape, device.kernels()


@pytest.mark.parametrize("case", CASES)
def test_calls_that_are_logged_again_leave_the_tape_of_calls_that_run(case: str) -> None:
    query, ran, again = query_of(*CASES[case]), BlockNotes(), BlockNotes()
    assert traced(query, [], again) == traced(query, None, ran)
    assert again == ran


def test_sample_most_calls_of_equal_blocks_are_logged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    repeated: list[object] = []
    repeat = RepeatedCalls._repeat
    monkeypatch.setattr(RepeatedCalls, "_repeat", lambda self, *args: repeated.append(args) or repeat(self, *args))
    traced(query_of(*CASES["sample-sequential"]), [])
    assert len(repeated) >= 2 * (6 - 2)  # of six blocks in each of two steps, two run


def test_sample_a_call_is_traced_in_full_if_a_block_differs_from_the_ones_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block gets other inputs from the second step on, when its first call was not run."""
    from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

    own = FluxTransformerBlock.__call__
    calls: dict[int, int] = {}

    def call(block: nn.Module, hidden_states: torch.Tensor, **kwargs: object) -> object:
        number = calls[id(block)] = calls.get(id(block), 0) + 1
        if number > 1 and list(calls).index(id(block)) == 5:
            hidden_states = torch.cat([hidden_states, hidden_states])[: len(hidden_states)].mT.contiguous().mT
        return own(block, hidden_states=hidden_states, **kwargs)

    monkeypatch.setattr(FluxTransformerBlock, "__call__", call)
    query, gpu, again = query_of(*CASES["sample-sequential"]), find_gpu(GPU), list[RepeatedCalls]()
    with pytest.raises(TraceError, match="calls of equal modules differ"):
        traced(query, again)
    assert again[0].differ
    calls.clear()
    expected, _ = traced(query, None)
    calls.clear()
    monkeypatch.setattr(work, "_trace", lambda *args, trace=work._trace: (calls.clear(), trace(*args))[1])
    notes = BlockNotes()
    found = work.trace(parse_query(query), None, "bfloat16", 1, Device("cuda", gpu.capability), gpu=gpu, block_notes=notes)
    assert found == expected

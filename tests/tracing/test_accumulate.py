"""Accumulated gradients: which passes are traced, what lives between them, and that the passes left out would add nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from sizer.allocator.allocator import replay
from sizer.architecture import make_blueprint
from sizer.base.config_json import encode_config
from sizer.catalogue.gpus import GPUS
from sizer.estimating.custom import size_step
from sizer.estimating.work import work_of
from sizer.query.request import Request
from sizer.query.text import parse_query
from sizer.tape.affine import fit_affine
from sizer.tape.tape import Tape
from sizer.tracing import trace as tracing
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace
from tests.device.blueprints import blueprint
from tests.tracing.models import LLAMA

GPU = GPUS["a100-40gb"]
LLAMA_TEXT = f"arch=config:{encode_config(json.dumps(LLAMA))}&seq=128"
QUERIES = {
    "cnn": "arch=torchvision:resnet18&image=64&dtype=float32&optimizer=sgd-momentum",
    "llama": f"{LLAMA_TEXT}&dtype=bfloat16",
    "checkpointed": f"{LLAMA_TEXT}&dtype=amp-float16&checkpointing=1",
    "adafactor": f"{LLAMA_TEXT}&dtype=float32&optimizer=adafactor&optimizer_impl=loop",
    "head": f"{LLAMA_TEXT}&dtype=float32&train=head",
}


def tape_of(request: Request, passes: int, monkeypatch: pytest.MonkeyPatch, batch: int = 4, **options: bool) -> Tape:
    monkeypatch.setattr(tracing, "PASSES", passes)
    made = make_blueprint(request)
    module = build(made, checkpointing=request.checkpointing)
    device = Device("cuda", GPU.capability)
    return trace(made, module, work_of(request, *request.dtypes), batch=batch, device=device, **options)


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_more_passes_than_are_traced_would_change_nothing(query: str, monkeypatch: pytest.MonkeyPatch):
    request = parse_query(f"{query}&batch=4&accumulate=32")
    oracle = size_oracle_of(GPU)
    traced, longer = (tape_of(request, passes, monkeypatch).resolve(oracle) for passes in (tracing.PASSES, 9))
    assert len(longer.order) > 2 * len(traced.order)
    for expandable in (False, True):
        one, other = (replay(tape, backend="cuda", expandable_segments=expandable) for tape in (traced, longer))
        assert one.phases == other.phases
        assert one.at_peak == other.at_peak
        assert (one.peak_allocated_bytes, one.peak_reserved_bytes) == (
            other.peak_allocated_bytes,
            other.peak_reserved_bytes,
        )


def test_gradients_live_through_the_next_forward_pass():
    request = parse_query(f"{LLAMA_TEXT}&dtype=float32&batch=4&optimizer=sgd")
    once, twice = (
        trace(
            *((made := make_blueprint(request)), build(made)),
            replace(work_of(request, "float32"), accumulate=passes),
            batch=4,
            device=Device("cpu"),
        )
        for passes in (1, 2)
    )
    peaks = [
        next(use.peak_allocated_bytes for use in replay(tape, backend="cpu").phases if use.phase == "backward")
        for tape in (once, twice)
    ]
    gradients = sum(p.nbytes for p in build(make_blueprint(request)).parameters())
    # activations of the second pass stand beside all gradients, and by then the peak is there again
    assert gradients // 2 < peaks[1] - peaks[0] <= gradients


def test_a_line_over_the_batch_holds_with_passes(monkeypatch: pytest.MonkeyPatch):
    request = parse_query(f"{QUERIES['llama']}&batch=4&accumulate=4")
    tapes = [tape_of(request, 3, monkeypatch, batch=batch, short=batch == 3) for batch in (2, 3, 5)]
    fit_affine(tapes[0], tapes[1]).check(tapes[2])


def test_it_is_a_loop_of_ones_own():
    def setup():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).cuda()
        x = torch.ones(8, 256, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            for _ in range(3):
                loss = model(x).sum()
                loss = loss / 3
                loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad()

        return step

    theirs = size_step(setup, gpu=GPU.key).estimates[0]
    made = blueprint(lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)), 256)
    work = Work(mode="training", dtype="float32", accumulate=3)
    tape = trace(made, build(made), work, batch=8, device=Device("cuda", GPU.capability))
    ours = replay(tape, backend="cuda")
    assert (ours.peak_allocated_bytes, ours.peak_reserved_bytes) == (
        theirs.peak_allocated_bytes,
        theirs.peak_reserved_bytes,
    )

"""Every optimizer in every implementation: the estimate's peaks against PyTorch's own CUDA code, to the byte."""

from __future__ import annotations

from sizer.allocator.allocator import replay
from sizer.catalogue.gpus import GPUS
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.trace import build, trace
from tests.null_driver.optimizers import plan, works

GPU = "a100-40gb"


def test_optimizers_take_what_pytorchs_own_do(run_on_null):
    truth = run_on_null("tests.null_driver.optimizers", gpu=GPU)
    asked = works("float32")
    assert len(asked) == len(truth) > 30
    made, device = plan(), Device("cuda", GPUS[GPU].capability)
    found = []
    for work in asked:
        tape = trace(made, build(made), work, batch=8, device=device).resolve(size_oracle_of(GPUS[GPU]))
        timeline = replay(tape, backend="cuda")
        found.append([timeline.peak_allocated_bytes, timeline.peak_reserved_bytes])
    wrong = {
        (work.optimizer, work.optimizer_impl): (mine, theirs)
        for work, mine, theirs in zip(asked, found, truth, strict=True)
        if mine != theirs
    }
    assert wrong == {}

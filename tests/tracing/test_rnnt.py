"""The loss of RNN transducers, with or without torchaudio."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers.loss import loss_rnnt as rnnt

from sizer.tape.tape import Tape
from sizer.tracing.device import Device
from sizer.tracing.meta.loss_operators import LIKE_TORCHAUDIO
from sizer.tracing.recorder import Recorder
from sizer.tracing.trace import recording

BATCH, FRAMES, LABELS, CLASSES = 2, 5, 3, 7
LATTICE = BATCH * FRAMES * (LABELS + 1)


def step(kind: str, capability: tuple[int, int] | None) -> tuple[Tape, Recorder, torch.Tensor]:
    recorder = Recorder(Device(kind, capability))
    with recording(recorder):
        logits = torch.empty(BATCH, FRAMES, LABELS + 1, CLASSES, device="meta", requires_grad=True)
        lengths = [recorder.place(torch.full((BATCH,), count)) for count in (FRAMES, LABELS)]
        targets = recorder.place(torch.ones(BATCH, LABELS, dtype=torch.int64))
        loss = rnnt.rnnt_loss(logits, targets, *lengths, 0)
        loss.backward()
        recorder.log.mark("backward")
    return recorder.log.tape(batch=BATCH, stand_ins=tuple(recorder.notes)), recorder, logits


@pytest.mark.parametrize(
    ("kind", "capability", "counters"), [("cuda", (8, 0), 2 * BATCH * (LABELS + 1) * 4), ("cpu", None, 0)]
)
def test_the_loss_holds_what_the_operator_holds(kind: str, capability: tuple[int, int] | None, counters: int) -> None:
    tape, recorder, logits = step(kind, capability)
    # costs 2 * 4; gradients like the logits 2 * 5 * 4 * 7 * 4 = 1120; the lattice 5 floats a place: 5 * 40 * 4 = 800
    assert BATCH * 4 in tape.sizes
    assert tape.sizes.count(LATTICE * CLASSES * 4) >= 2  # the kept gradients, and what the backward pass makes of them
    assert LATTICE * 5 * 4 in tape.sizes
    assert counters in tape.sizes or not counters
    assert logits.grad is not None
    assert LIKE_TORCHAUDIO in recorder.notes


def test_the_real_torchaudio_is_there_again_afterwards() -> None:
    before, original = sys.modules.get("torchaudio"), rnnt.rnnt_loss
    step("cuda", (8, 0))
    assert sys.modules.get("torchaudio") is before
    assert rnnt.rnnt_loss is original

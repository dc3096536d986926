"""Lengths that models predict: what they are taken to be, and that what follows has that size."""

from __future__ import annotations

import pytest
import torch

from sizer.architecture.huggingface import huggingface_blueprint
from sizer.tape.tape import Tape
from sizer.tracing.device import Device
from sizer.tracing.recorder import Recorder
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace
from sizer.tracing.values.libraries import DURATIONS, PATCHES
from tests.architecture.rare_configs import RARE
from tests.tracing.known import known, under

SPEECH = {"hidden_size": 32, "vocab_size": 20, "encoder_layers": 1, "decoder_layers": 1, "encoder_linear_units": 16,
          "decoder_linear_units": 16, "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2, "num_mel_bins": 8,
          "speech_decoder_postnet_units": 8, "speech_decoder_postnet_layers": 1}  # fmt: skip


def traced(model_type: str, config: dict, length: int, mode: str, batch: int = 2) -> Tape:
    blueprint = huggingface_blueprint({"model_type": model_type, **config}, name="x", sequence_length=length, mode=mode)
    work = Work(mode=mode, dtype="float32", optimizer="none")
    return trace(blueprint, build(blueprint), work, batch=batch, device=Device("cuda", (8, 0)))


def sizes(tape: Tape, operator: str, module: str) -> set[int]:
    """Bytes of the blocks that an operator makes in a module."""
    return {
        tape.sizes[block]
        for block in range(len(tape.sizes))
        if tape.op_names[tape.ops[block]] == operator and tape.module_names[tape.modules[block]] == module
    }


def notes(tape: Tape) -> str:
    return "; ".join(tape.stand_ins)


@pytest.mark.parametrize(("length", "patches"), [(16, 5), (17, 6), (18, 6)])
def test_bytes_fall_into_patches_of_the_configs_size(length: int, patches: int) -> None:
    tape = traced("blt", RARE["blt"], length, "training")
    # patches begin at bytes 0 and 1, then every fourth: 5, 9, 13, 17, the last even where no byte is left for it
    # queries of the global transformer: 2 samples * patches * 64 values * 4 bytes
    made = sizes(tape, "aten.mm.default", "model.global_transformer.layers.0.self_attn.q_proj")
    assert made & {2 * count * 64 * 4 for count in range(1, 20)} == {2 * patches * 64 * 4}
    assert PATCHES.format(4) in notes(tape)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_phonemes_last_two_frames_each(mode: str) -> None:
    tape = traced("vits", RARE["vits"], 10, mode)
    # 10 phonemes * 2 frames, each 4 * 4 samples of sound: 2 samples * 320 * 4 bytes
    assert 2 * 10 * 2 * 16 * 4 in sizes(tape, "aten.tanh.default", "decoder")
    assert DURATIONS in notes(tape)


def test_phonemes_that_are_read_for_speech_last_two_frames_each() -> None:
    tape = traced("fastspeech2_conformer", SPEECH, 10, "inference")
    # the padded tensor of frames: 2 samples * 20 frames * 32 values * 4 bytes
    assert 2 * 20 * 32 * 4 in sizes(tape, "aten.zeros.default", "")
    assert DURATIONS in notes(tape)
    # in training the durations are given, and the predicted ones are only compared with them
    assert DURATIONS not in notes(traced("fastspeech2_conformer", SPEECH, 10, "training"))


def test_an_assumption_about_a_part_of_a_storage_leaves_the_rest_zero(recorder: Recorder) -> None:
    def halves() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(2, 4).split(2, dim=1)

    first, second = under(recorder, halves)
    recorder.values.assume(second, torch.full((2, 2), 3.0), "threes")
    assert known(recorder, second) == [[3.0, 3.0]] * 2
    assert known(recorder, first) == [[0.0, 0.0]] * 2
    assert recorder.values.assumption([first]) == "threes"

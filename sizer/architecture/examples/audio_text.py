"""Recipes for an audio clip inside a text (Qwen-Audio, Voxtral, ...): one `MultimodalInput` per family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sizer.architecture.examples.example_spec import ExampleSpec, floats, ones, read
from sizer.architecture.examples.multimodal_inputs import MultimodalInput, count_features, placeholder

WHISPER_FRAMES = 3000  # 30 s of mel frames, the input of a Whisper encoder
HALVED = (WHISPER_FRAMES - 1) // 2 + 1  # by its second convolution, of stride 2
FRAMES = 1000  # 10 s


def find_audio_input(spec: ExampleSpec) -> MultimodalInput:
    """Return the audio of each text, by the family's own recipe."""
    return FAMILIES[spec.config.model_type](spec)


def whisper_encoder(spec: ExampleSpec) -> MultimodalInput:
    """Return 30 s of mel frames (batch, bins, 3000) with their mask; the encoder halves them by a convolution and by pooling.

    3000 frames -> (3000 - 1) // 2 + 1 = 1500 -> (1500 - 2) // 2 + 1 = 750 features.
    """
    mask_name = "feature_attention_mask" if spec.takes("feature_attention_mask") else "input_features_mask"
    inputs = {"input_features": _frames_last(spec), mask_name: ones(spec.batch, WHISPER_FRAMES)}
    return _audio_input(spec, inputs, (HALVED - 2) // 2 + 1)


def merged_whisper_encoder(spec: ExampleSpec) -> MultimodalInput:
    """Return the same frames for an encoder that merges four of 1500 hidden states into one feature: 375."""
    inputs = {"input_features": _frames_last(spec), "input_features_mask": ones(spec.batch, WHISPER_FRAMES)}
    if spec.takes("padding_mask"):
        inputs["padding_mask"] = ones(spec.batch, 30 * 16_000)
    return _audio_input(spec, inputs, HALVED // 4)


def asked_whisper_encoder(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Voxtral: 30 s of mel frames without a mask; the encoder says how many features it yields."""
    inputs = {"input_features": _frames_last(spec)}
    first = {"input_features": inputs["input_features"][:1]}
    return _audio_input(spec, inputs, count_features(spec, "get_audio_features", first))


def frames(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Granite Speech: 10 s of mel frames (batch, 1000, bins).

    The encoder says how many features they yield.
    """
    bins = read(spec.config, "encoder_config.input_dim", default=160)
    inputs = {"input_features": floats(spec.batch, FRAMES, bins)}
    first = {"input_features": inputs["input_features"][:1]}
    return _audio_input(spec, inputs, count_features(spec, "get_audio_features", first))


def masked_frames(spec: ExampleSpec) -> MultimodalInput:
    """Return 10 s of mel frames (batch, 1000, bins) with their mask.

    `subsampling_factor` frames become one feature, rounded up.
    """
    part = spec.config.audio_config
    bins = read(part, "input_size", "num_mel_bins", "asr_config.num_mel_bins", default=80)
    inputs = {"input_features": floats(spec.batch, FRAMES, bins), "input_features_mask": ones(spec.batch, FRAMES)}
    return _audio_input(spec, inputs, -(-FRAMES // read(part, "subsampling_factor", default=1)))


def chunked_frames(spec: ExampleSpec) -> MultimodalInput:
    """Return 10 s of mel frames (batch, bins, 1000) for Qwen3-ASR, in chunks of 100.

    Three convolutions of stride 2 reduce a chunk, 100 -> 50 -> 25 -> 13: 130 features for the 10 chunks.
    """
    chunk = 2 * read(spec.config, "audio_config.n_window", default=50)
    bins = read(spec.config, "audio_config.num_mel_bins", default=128)
    kept = chunk
    for _ in range(3):
        kept = (kept - 1) // 2 + 1
    chunks = FRAMES // chunk
    frames = floats(spec.batch, bins, chunks * chunk)
    inputs = {"input_features": frames, "input_features_mask": ones(spec.batch, chunks * chunk)}
    return _audio_input(spec, inputs, chunks * kept)


def raw_audio(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of VibeVoice: 10 s of samples at 24 kHz; the encoder says how many features they yield."""
    values = floats(spec.batch, 1, 10 * 24_000)
    if spec.takes("padding_mask"):
        inputs = {"input_values": values, "padding_mask": ones(spec.batch, 10 * 24_000).bool()}
    else:
        inputs = {"input_values": values}
    return _audio_input(spec, inputs, count_features(spec, "get_audio_features", {"input_values": values[:1]}))


def _frames_last(spec: ExampleSpec) -> Tensor:
    bins = read(spec.config, "audio_config.num_mel_bins", "audio_config.n_mels", default=128)
    return floats(spec.batch, bins, WHISPER_FRAMES)


def _audio_input(spec: ExampleSpec, inputs: dict[str, Any], count: int) -> MultimodalInput:
    return MultimodalInput(inputs=inputs, token=placeholder(spec.config, "audio"), count=count, kind="audio clip")


FAMILIES: dict[str, Callable[[ExampleSpec], MultimodalInput]] = {
    "audioflamingo3": whisper_encoder,
    "fun_asr_nano": masked_frames,
    "glmasr": merged_whisper_encoder,
    "granite_speech": frames,
    "granite_speech_plus": frames,
    "moss_transcribe_diarize": merged_whisper_encoder,
    "musicflamingo": whisper_encoder,
    "nemo_speechlm": masked_frames,
    "qwen2_audio": whisper_encoder,
    "qwen3_asr": chunked_frames,
    "vibevoice_asr": raw_audio,
    "voxtral": asked_whisper_encoder,
}

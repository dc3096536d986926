"""Recipes for audio (raw samples, spectrograms, codes of a neural codec), and for encoders, codecs and vocoders on their own."""

from __future__ import annotations

import torch
from torch import Tensor

from sizer.architecture.examples.example_spec import ExampleSpec, Recipe, floats, ones, read, transduces

SECONDS = 10
SAMPLES_PER_SECOND = 16_000
FRAMES_PER_SECOND = 100


def waveform(spec: ExampleSpec) -> Tensor:
    """Return samples (batch, length) of one channel."""
    return floats(spec.batch, sample_count(spec))


def spectrogram(spec: ExampleSpec) -> Tensor:
    """Return mel frames (batch, frames, mel bins), time first."""
    return floats(spec.batch, frame_count(spec), mel_bins(spec))


def audio_mask(spec: ExampleSpec) -> Tensor | None:
    """Return the feature extractor's mask of audio without padding.

    This is (batch, frames) ones for mel frames, (batch, samples) for the raw audio of models with `feat_extract_norm` "layer";
    None for other models, which are trained without.
    """
    if spec.takes("input_features"):
        return ones(spec.batch, frame_count(spec))
    layered = spec.read("feat_extract_norm", "encoder.feat_extract_norm") == "layer"
    return ones(spec.batch, sample_count(spec)) if layered and spec.takes("input_values") else None


def sample_count(spec: ExampleSpec) -> int:
    """Return the samples of audio: the requested length if the model has no text, else 10 s at 16 kHz."""
    if spec.length is not None and not _writes(spec):
        return spec.length
    return SECONDS * spec.read("sampling_rate", "sample_rate", "audio_config.sampling_rate", default=SAMPLES_PER_SECOND)


def frame_count(spec: ExampleSpec) -> int:
    """Return the mel frames: the requested length if the model has no text, else 10 s at 100 frames a second."""
    if spec.length is not None and not _writes(spec):
        return spec.length
    return SECONDS * FRAMES_PER_SECOND


def _writes(spec: ExampleSpec) -> bool:
    """Return True if the length counts the tokens of a text that is read or written together with the audio."""
    return spec.takes("input_ids", "decoder_input_ids") and not transduces(spec.cls)


def mel_bins(spec: ExampleSpec) -> int:
    """Return the number of bins of a mel frame."""
    names = (
        "num_mel_bins",
        "n_mels",
        "feature_size",
        "input_feat_per_channel",
        "feature_projection_input_dim",
        "mel_dim",
    )
    nested = [f"{part}.{name}" for part in ("audio_config", "encoder_config", "encoder") for name in names]
    return spec.read(*names, *nested, default=80)


# ------------------------------------------------------------------------------------------------------------ encoders


LATENTS = 50  # steps of a codec's latents: 4 s at 12.5 a second


def whisper_frames(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return mel frames (batch, bins, frames) for a Whisper encoder, twice its number of positions.

    A mask is added if it takes one.
    """
    count = 2 * read(spec.config, "max_source_positions", default=1500)
    inputs = {"input_features": floats(spec.batch, mel_bins(spec), count)}
    return inputs | _mask(spec, count)


def _mask(spec: ExampleSpec, count: int) -> dict[str, Tensor]:
    return {"input_features_mask": ones(spec.batch, count)} if spec.takes("input_features_mask") else {}


def hidden_frames(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Granite's speech encoder: mel frames under the name `hidden_states`."""
    return {"hidden_states": floats(spec.batch, 1000, spec.config.input_dim)}


def vocoder(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return 100 frames of a spectrogram for a vocoder."""
    name = next(name for name in ("spectrogram", "mel_spectrogram", "input_features") if spec.takes(name))
    bins = read(spec.config, "model_in_dim", "num_mel_bins", "mel_dim", default=80)
    if name == "mel_spectrogram":
        return {name: floats(spec.batch, bins, 100)}
    return {name: floats(spec.batch, 100, bins)}


def codec(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return one second of audio for a neural codec, (batch, 1, samples)."""
    rate = read(spec.config, "sampling_rate", "sample_rate", default=24_000)
    return {"input_values": floats(spec.batch, read(spec.config, "audio_channels", default=1), rate)}


def whole_audio_blocks(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return 10 s of samples for Muse Spark's audio encoder, rounded up to a multiple of the samples per token."""
    block = read(spec.config, "samples_per_token", default=1920)
    return {"input_values": floats(spec.batch, -(-160_000 // block) * block)}


def mel_with_mask(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Gemma 3n's audio encoder: mel frames and which of them are padding (none)."""
    frames = floats(spec.batch, 1000, spec.config.input_feat_size)
    return {"audio_mel": frames, "audio_mel_mask": torch.zeros(spec.batch, 1000, dtype=torch.bool)}


def speech_frames(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Phi-4's audio encoder: mel frames (batch, 1000, bins) and their mask."""
    frames = floats(spec.batch, 1000, spec.config.input_size)
    return {"hidden_states": frames, "mask": ones(spec.batch, 1000).bool()}


def stacked_frames(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Granite Speech 5: 500 mel frames with their changes and neighbours, four times the bins."""
    bins = 4 * read(spec.config, "num_mel_bins", "encoder_config.num_mel_bins", default=80)
    return {"input_features": floats(spec.batch, 500, bins), "attention_mask": ones(spec.batch, 500)}


def low_rate_frames(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Fun-ASR's encoder: 167 stacked mel frames (10 s) with their mask."""
    width = read(spec.config, "input_size", "num_mel_bins", default=560)
    return {"input_features": floats(spec.batch, 167, width), "input_features_mask": ones(spec.batch, 167)}


def wide_mel_frames(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Gemma 4's audio encoder: 10 s of 128 mel bins and their mask."""
    return {"input_features": floats(spec.batch, 1000, 128), "attention_mask": ones(spec.batch, 1000).bool()}


def joined_mel_frames(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return 10 s of mel frames for the audio encoders of Qwen Omni, and their lengths.

    The frames of all samples are concatenated: (bins, batch * 1000).
    """
    lengths = torch.full((spec.batch,), 1000)
    inputs = {"input_features": floats(mel_bins(spec), spec.batch * 1000), "feature_lens": lengths}
    return inputs | ({"aftercnn_lens": (lengths - 1) // 2 + 1} if spec.takes("aftercnn_lens") else {})


def chunked_mel_frames(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Qwen3-ASR's encoder: 1000 mel frames (batch, bins, frames) and their mask."""
    return {
        "input_features": floats(spec.batch, mel_bins(spec), 1000),
        "input_features_mask": ones(spec.batch, 1000),
    }


def audio_as_hidden_states(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of VibeVoice's audio encoder: one second of audio (batch, 1, samples) under the name `hidden_states`."""
    return {"hidden_states": floats(spec.batch, read(spec.config, "channels", default=1), 24_000)}


def latents(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return latents (batch, channels, steps) for a codec's decoder."""
    return {"latents": floats(spec.batch, read(spec.config, "hidden_size"), LATENTS)}


FAMILIES: dict[str, Recipe] = {
    "audioflamingo3_encoder": whisper_frames,
    "dac": codec,
    "encodec": codec,
    "fastspeech2_conformer_hifigan": vocoder,
    "fun_asr_nano_encoder": low_rate_frames,
    "gemma3n_audio": mel_with_mask,
    "gemma4_audio": wide_mel_frames,
    "glmasr_encoder": whisper_frames,
    "granite_speech5_ctc": stacked_frames,
    "granite_speech5_encoder": stacked_frames,
    "granite_speech_encoder": hidden_frames,
    "granite_speech_plus_encoder": hidden_frames,
    "mimi": codec,
    "mimi_decoder": latents,
    "mimi_encoder": codec,
    "moss_transcribe_diarize_audio": whisper_frames,
    "muse_spark_audio": whole_audio_blocks,
    "pe_audio_encoder": codec,
    "phi4_multimodal_audio": speech_frames,
    "pocket_tts_audio_tokenizer": codec,
    "pocket_tts_audio_tokenizer_decoder": latents,
    "pocket_tts_audio_tokenizer_encoder": codec,
    "qwen2_5_omni_audio_encoder": joined_mel_frames,
    "qwen2_5_omni_bigvgan": vocoder,
    "qwen2_audio_encoder": whisper_frames,
    "qwen3_asr_encoder": chunked_mel_frames,
    "qwen3_omni_moe_audio_encoder": joined_mel_frames,
    "speecht5_hifigan": vocoder,
    "univnet": vocoder,
    "vibevoice_acoustic_tokenizer": codec,
    "vibevoice_acoustic_tokenizer_encoder": audio_as_hidden_states,
    "voxtral_encoder": whisper_frames,
    "xcodec": codec,
}

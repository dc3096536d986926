"""Recipes for sound: raw samples, spectrograms, codes of a neural codec."""

from __future__ import annotations

from torch import Tensor

from sizer.architecture.examples.setting import Setting, transduces
from sizer.architecture.examples.tensors import floats, ones

SECONDS = 10
SAMPLES_PER_SECOND = 16_000
FRAMES_PER_SECOND = 100


def waveform(setting: Setting) -> Tensor:
    """Samples (batch, length) of one channel."""
    return floats(setting.batch, sample_count(setting))


def spectrogram(setting: Setting) -> Tensor:
    """Mel frames (batch, frames, mel bins), time first."""
    return floats(setting.batch, frame_count(setting), mel_bins(setting))


def sound_mask(setting: Setting) -> Tensor | None:
    """The feature extractor's mask of sound without padding: (batch, frames) ones for mel frames, (batch, samples) for the
    raw sound of models with `feat_extract_norm` "layer"; None for the others, which are trained without.
    """
    if setting.takes("input_features"):
        return ones(setting.batch, frame_count(setting))
    layered = setting.read("feat_extract_norm", "encoder.feat_extract_norm") == "layer"
    return ones(setting.batch, sample_count(setting)) if layered and setting.takes("input_values") else None


def sample_count(setting: Setting) -> int:
    """Samples of sound: the length asked for where the model takes nothing else, else 10 s at 16 kHz."""
    if setting.length is not None and not _writes(setting):
        return setting.length
    return SECONDS * setting.read(
        "sampling_rate", "sample_rate", "audio_config.sampling_rate", default=SAMPLES_PER_SECOND
    )


def frame_count(setting: Setting) -> int:
    """Mel frames: the length asked for where the model takes nothing else, else 10 s at 100 frames a second."""
    if setting.length is not None and not _writes(setting):
        return setting.length
    return SECONDS * FRAMES_PER_SECOND


def _writes(setting: Setting) -> bool:
    """True where the length counts the tokens of a text that is read or written beside the sound."""
    return setting.takes("input_ids", "decoder_input_ids") and not transduces(setting.cls)


def mel_bins(setting: Setting) -> int:
    """Bins of a mel frame."""
    names = (
        "num_mel_bins",
        "n_mels",
        "feature_size",
        "input_feat_per_channel",
        "feature_projection_input_dim",
        "mel_dim",
    )
    nested = [f"{part}.{name}" for part in ("audio_config", "encoder_config", "encoder") for name in names]
    return setting.read(*names, *nested, default=80)

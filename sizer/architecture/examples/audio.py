"""Recipes for audio: raw samples, spectrograms, codes of a neural codec."""

from __future__ import annotations

from torch import Tensor

from sizer.architecture.examples.example_spec import ExampleSpec, transduces
from sizer.architecture.examples.tensors import floats, ones

SECONDS = 10
SAMPLES_PER_SECOND = 16_000
FRAMES_PER_SECOND = 100


def waveform(spec: ExampleSpec) -> Tensor:
    """Samples (batch, length) of one channel."""
    return floats(spec.batch, sample_count(spec))


def spectrogram(spec: ExampleSpec) -> Tensor:
    """Mel frames (batch, frames, mel bins), time first."""
    return floats(spec.batch, frame_count(spec), mel_bins(spec))


def audio_mask(spec: ExampleSpec) -> Tensor | None:
    """The feature extractor's mask of audio without padding: (batch, frames) ones for mel frames, (batch, samples) for the
    raw audio of models with `feat_extract_norm` "layer"; None for the others, which are trained without.
    """
    if spec.takes("input_features"):
        return ones(spec.batch, frame_count(spec))
    layered = spec.read("feat_extract_norm", "encoder.feat_extract_norm") == "layer"
    return ones(spec.batch, sample_count(spec)) if layered and spec.takes("input_values") else None


def sample_count(spec: ExampleSpec) -> int:
    """Samples of audio: the length asked for where the model takes nothing else, else 10 s at 16 kHz."""
    if spec.length is not None and not _writes(spec):
        return spec.length
    return SECONDS * spec.read("sampling_rate", "sample_rate", "audio_config.sampling_rate", default=SAMPLES_PER_SECOND)


def frame_count(spec: ExampleSpec) -> int:
    """Mel frames: the length asked for where the model takes nothing else, else 10 s at 100 frames a second."""
    if spec.length is not None and not _writes(spec):
        return spec.length
    return SECONDS * FRAMES_PER_SECOND


def _writes(spec: ExampleSpec) -> bool:
    """True where the length counts the tokens of a text that is read or written beside the audio."""
    return spec.takes("input_ids", "decoder_input_ids") and not transduces(spec.cls)


def mel_bins(spec: ExampleSpec) -> int:
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
    return spec.read(*names, *nested, default=80)

"""Recipes for audio that is read or written: speech recognition, speech synthesis, music."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.architecture.examples import audio, token_inputs
from sizer.architecture.examples.audio import mel_bins
from sizer.architecture.examples.example_spec import ExampleSpec, Recipe, floats, integers, read

CODES = 250  # steps of codec codes: 5 s at 50 a second


def whisper(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Whisper: 30 s as mel frames (batch, bins, 3000), as many as its encoder has positions times two."""
    return {"input_features": floats(spec.batch, mel_bins(spec), 2 * spec.config.max_source_positions)}


def encoded_speech(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of speech encoder-decoders: raw audio if the encoder begins with convolutions over it, else mel frames."""
    if hasattr(spec.config.encoder, "conv_kernel"):
        return {"input_values": audio.waveform(spec)}
    return {"input_features": audio.spectrogram(spec)}


def spectrogram_image(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Audio Spectrogram Transformer: mel frames (batch, frames, bins) under the name `input_values`."""
    return {"input_values": floats(spec.batch, spec.config.max_length, spec.config.num_mel_bins)}


def clap(spec: ExampleSpec) -> dict[str, Any]:
    """Return 10 s as mel frames (batch, 1, frames, bins) for CLAP, whether it was longer, and words if the class reads them."""
    audio = spec.part("audio_config")
    inputs: dict[str, Any] = {
        "input_features": floats(spec.batch, 4 if audio.enable_fusion else 1, 1001, audio.num_mel_bins),
        "is_longer": torch.zeros(spec.batch, 1, dtype=torch.bool),
    }
    if spec.takes("input_ids"):
        inputs |= token_inputs.words_and_mask(spec)
    return inputs


def clvp(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of CLVP: words and mel frames (batch, bins, frames)."""
    return token_inputs.words_and_mask(spec) | {"input_features": floats(spec.batch, 80, 500)}


def synthesis(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of FastSpeech 2: phonemes, and in training their durations, pitches and energies, and the spectrogram.

    In training how long, how high and how loud each is, and the spectrogram of two frames each.
    """
    config = read(spec.config, "model_config", default=spec.config)
    count = spec.tokens
    ids = integers(config.vocab_size - 1, spec.batch, count) + 1
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if spec.training:
        inputs |= {
            "spectrogram_labels": floats(spec.batch, 2 * count, config.num_mel_bins),
            "duration_labels": torch.full((spec.batch, count), 2),
            "pitch_labels": floats(spec.batch, count, 1),
            "energy_labels": floats(spec.batch, count, 1),
        }
    return inputs


def music(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of MusicGen: a description in words, and codes of music (batch * codebooks, steps).

    In training the codes are also the labels.

    In training as labels too.
    """
    decoder = spec.config.decoder
    ids = words = integers(1000, spec.batch, 64) + 10
    codes = integers(decoder.vocab_size - 1, spec.batch * decoder.num_codebooks, CODES)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(words), "decoder_input_ids": codes}
    if spec.training:
        inputs["labels"] = codes.view(spec.batch, decoder.num_codebooks, CODES).transpose(1, 2).contiguous()
    return inputs


def music_decoder(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return codes (batch * codebooks, steps) for MusicGen's decoder."""
    count = spec.config.num_codebooks
    codes = integers(spec.config.vocab_size - 1, spec.batch * count, CODES)
    inputs = {"input_ids": codes}
    if spec.training:
        inputs["labels"] = codes.view(spec.batch, count, CODES).transpose(1, 2).contiguous()
    return inputs


def depth_codes(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of CSM's depth decoder: the codes of one frame, (batch, codebooks)."""
    codes = integers(spec.config.vocab_size, spec.batch, spec.config.num_codebooks)
    return {"input_ids": codes}


def words_with_codes(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Kyutai's speech to text: a word and audio codes for each step, (batch, length, 1 + codebooks)."""
    config = spec.config
    words = integers(config.vocab_size - 1, spec.batch, spec.tokens, 1)
    codes = integers(config.codebook_vocab_size - 1, spec.batch, spec.tokens, config.num_codebooks)
    inputs = {"input_ids": torch.cat([words, codes], dim=-1)}
    return inputs | ({"labels": words[..., 0].clone()} if spec.training else {})


def latent_speech(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Pocket TTS and Phonon: a text, the start of the audio, placeholders for latent frames, and the frames.
    """
    config = spec.config
    ids = token_inputs.sentence(spec)
    frames = spec.tokens // 2
    ids[:, -frames - 1] = config.audio_bos_token_id
    ids[:, -frames:] = config.audio_latent_token_id
    latents = floats(spec.batch, frames, read(config, "latent_dim", "flow_head_config.latent_dim", default=32))
    return {"input_ids": ids, "labels" if spec.training else "audio_latents": latents}


def audio_tokens(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Inkling's audio encoder: 250 quantized mel frames."""
    config = spec.config
    bins = read(config, "n_mel_bins", "num_mel_bins", default=80)
    return {"audio_input_ids": integers(read(config, "mel_vocab_size", default=16), spec.batch, 250, bins)}


def beats(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Pop2Piano: 200 frames of embedded audio."""
    return {"input_features": floats(spec.batch, 200, spec.config.d_model)}


def audio_and_text(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of PE-Audio: one second of audio (batch, 1, samples) and a sentence about it."""
    rate = read(spec.config, "audio_config.dac_config.sampling_rate", default=48_000)
    return {"input_values": floats(spec.batch, 1, rate)} | token_inputs.words_and_mask(spec)


def frames_of_codes(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of CSM: at each step the codes of one frame of audio, (batch, length, codebooks)."""
    config = spec.config
    codes = integers(config.vocab_size - 1, spec.batch, spec.tokens, config.num_codebooks)
    return {"input_ids": codes} | ({"labels": codes.clone()} if spec.training else {})


def audio_with_features(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of NeuCodec and X-Codec 2: one second of audio, (batch, 1, samples), and its mel frames.

    The semantic encoder reads the mel frames.
    """
    frames = floats(
        spec.batch, 50, read(spec.config, "semantic_model_config.feature_projection_input_dim", default=160)
    )
    return {"input_values": floats(spec.batch, 1, 16_000), "input_features": frames}


def streamed_frames(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Voxtral Realtime's encoder: 10 s of mel frames (batch, bins, frames)."""
    return {"input_features": floats(spec.batch, mel_bins(spec), 1000)}


def streamed_speech(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return a word for every stretch of audio for Voxtral Realtime: (batch, length) with mel frames (batch, bins, frames).

    A convolution of stride 2 halves the frames; `downsample_factor` of the rest become one step, which is added to the word.
    """
    frames = 2 * spec.config.downsample_factor * spec.tokens
    features = floats(spec.batch, mel_bins(spec), frames)
    return token_inputs.words_and_mask(spec) | {"input_features": features}


def dialogue(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Dia: a text in bytes, and audio codes in nine channels, (batch, steps, channels).

    In training the codes are also the labels.

    In training as labels too.
    """
    decoder = spec.config.decoder_config
    ids = integers(spec.config.encoder_config.vocab_size, spec.batch, spec.tokens)
    codes = integers(1024, spec.batch, CODES, decoder.num_channels)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": codes}
    if spec.training:
        inputs["labels"] = codes.transpose(1, 2).flatten(0, 1).contiguous()
    return inputs


def codes_beside_each_other(spec: ExampleSpec) -> dict[str, Any]:
    """Return all codes of each step for Bark's fine model, (batch, length, codebooks); the model corrects the last codebook."""
    config = spec.config
    codes = integers(config.input_vocab_size - 1, spec.batch, spec.tokens, config.n_codes_total)
    return {"input_ids": codes, "codebook_idx": config.n_codes_total - 1}


def phonemes(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of VITS: the ids of phonemes (batch, length)."""
    ids = integers(spec.config.vocab_size - 1, spec.batch, spec.tokens) + 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


FAMILIES: dict[str, Recipe] = {
    "audio-spectrogram-transformer": spectrogram_image,
    "BarkFineModel": codes_beside_each_other,
    "clap": clap,
    "clap_audio_model": clap,
    "clvp": clvp,
    "csm": frames_of_codes,
    "dia": dialogue,
    "csm_depth_decoder_model": depth_codes,
    "fastspeech2_conformer": synthesis,
    "fastspeech2_conformer_with_hifigan": synthesis,
    "musicgen": music,
    "musicgen_decoder": music_decoder,
    "musicgen_melody": music,
    "musicgen_melody_decoder": music_decoder,
    "gradium_phonon_tts": latent_speech,
    "inkling_audio": audio_tokens,
    "kyutai_speech_to_text": words_with_codes,
    "pe_audio": audio_and_text,
    "pocket_tts": latent_speech,
    "pop2piano": beats,
    "speech-encoder-decoder": encoded_speech,
    "neucodec": audio_with_features,
    "vits": phonemes,
    "voxtral_realtime": streamed_speech,
    "voxtral_realtime_encoder": streamed_frames,
    "xcodec2": audio_with_features,
    "WhisperForConditionalGeneration": whisper,
    "WhisperForAudioClassification": whisper,
    "WhisperModel": whisper,
}

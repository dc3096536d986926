"""Recipes for sound that is read or written: speech recognition, speech synthesis, music."""

from __future__ import annotations

import torch
from torch import Tensor

from sizer.architecture.examples import audio, text
from sizer.architecture.examples.audio import mel_bins
from sizer.architecture.examples.setting import Recipe, Setting, read
from sizer.architecture.examples.tensors import floats, integers, ones

CODES = 250  # steps of codec codes: 5 s at 50 a second


def whisper(setting: Setting) -> dict[str, Tensor]:
    """Whisper: 30 s as mel frames (batch, bins, 3000), as many as its encoder has positions times two."""
    return {"input_features": floats(setting.batch, mel_bins(setting), 2 * setting.config.max_source_positions)}


def encoded_speech(setting: Setting) -> dict[str, Tensor]:
    """Speech encoder-decoder: raw sound where the encoder's first layers are convolutions over it, else mel frames."""
    if hasattr(setting.config.encoder, "conv_kernel"):
        return {"input_values": audio.waveform(setting)}
    return {"input_features": audio.spectrogram(setting)}


def spectrogram_picture(setting: Setting) -> dict[str, Tensor]:
    """Audio Spectrogram Transformer: mel frames (batch, frames, bins) under the name `input_values`."""
    return {"input_values": floats(setting.batch, setting.config.max_length, setting.config.num_mel_bins)}


def clap(setting: Setting) -> dict[str, object]:
    """CLAP: 10 s as mel frames (batch, 1, frames, bins), whether it was longer, and words where the class reads them."""
    audio = setting.part("audio_config")
    inputs: dict[str, object] = {
        "input_features": floats(setting.batch, 4 if audio.enable_fusion else 1, 1001, audio.num_mel_bins),
        "is_longer": torch.zeros(setting.batch, 1, dtype=torch.bool),
    }
    if setting.takes("input_ids"):
        inputs |= {"input_ids": text.sentence(setting), "attention_mask": ones(setting.batch, setting.length)}
    return inputs


def clvp(setting: Setting) -> dict[str, Tensor]:
    """CLVP: words and mel frames (batch, bins, frames)."""
    ids = text.sentence(setting)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "input_features": floats(setting.batch, 80, 500)}


def synthesis(setting: Setting) -> dict[str, Tensor]:
    """FastSpeech 2: phonemes; in training how long, how high and how loud each is, and the spectrogram of two frames each."""
    config = read(setting.config, "model_config", default=setting.config)
    count = setting.length
    ids = integers(config.vocab_size - 1, setting.batch, count) + 1
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if setting.training:
        inputs |= {
            "spectrogram_labels": floats(setting.batch, 2 * count, config.num_mel_bins),
            "duration_labels": torch.full((setting.batch, count), 2),
            "pitch_labels": floats(setting.batch, count, 1),
            "energy_labels": floats(setting.batch, count, 1),
        }
    return inputs


def music(setting: Setting) -> dict[str, Tensor]:
    """MusicGen: a description in words, and codes of music (batch * codebooks, steps); in training as labels too."""
    decoder = setting.config.decoder
    ids = words = integers(1000, setting.batch, 64) + 10
    codes = integers(decoder.vocab_size - 1, setting.batch * decoder.num_codebooks, CODES)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(words), "decoder_input_ids": codes}
    if setting.training:
        inputs["labels"] = codes.view(setting.batch, decoder.num_codebooks, CODES).transpose(1, 2).contiguous()
    return inputs


def music_decoder(setting: Setting) -> dict[str, Tensor]:
    """MusicGen's decoder alone: codes (batch * codebooks, steps)."""
    count = setting.config.num_codebooks
    codes = integers(setting.config.vocab_size - 1, setting.batch * count, CODES)
    inputs = {"input_ids": codes}
    if setting.training:
        inputs["labels"] = codes.view(setting.batch, count, CODES).transpose(1, 2).contiguous()
    return inputs


def depth_codes(setting: Setting) -> dict[str, Tensor]:
    """CSM's depth decoder: the codes of one frame, (batch, codebooks)."""
    codes = integers(setting.config.vocab_size, setting.batch, setting.config.num_codebooks)
    return {"input_ids": codes}


def words_with_codes(setting: Setting) -> dict[str, Tensor]:
    """Kyutai's speech to text: at each step a word and the codes of the sound, (batch, length, 1 + codebooks)."""
    config = setting.config
    words = integers(config.vocab_size - 1, setting.batch, setting.length, 1)
    codes = integers(config.codebook_vocab_size - 1, setting.batch, setting.length, config.num_codebooks)
    inputs = {"input_ids": torch.cat([words, codes], dim=-1)}
    return inputs | ({"labels": words[..., 0].clone()} if setting.training else {})


def latent_speech(setting: Setting) -> dict[str, Tensor]:
    """Pocket TTS, Phonon: a text, the start of the sound, one place for each of its latent frames, and the frames."""
    config = setting.config
    ids = text.sentence(setting)
    frames = setting.length // 2
    ids[:, -frames - 1] = config.audio_bos_token_id
    ids[:, -frames:] = config.audio_latent_token_id
    latents = floats(setting.batch, frames, read(config, "latent_dim", "flow_head_config.latent_dim", default=32))
    return {"input_ids": ids, "labels" if setting.training else "audio_latents": latents}


def sound_tokens(setting: Setting) -> dict[str, Tensor]:
    """Inkling's sound encoder: 250 quantised mel frames."""
    config = setting.config
    bins = read(config, "n_mel_bins", "num_mel_bins", default=80)
    return {"audio_input_ids": integers(read(config, "mel_vocab_size", default=16), setting.batch, 250, bins)}


def beats(setting: Setting) -> dict[str, Tensor]:
    """Pop2Piano: 200 frames of embedded sound."""
    return {"input_features": floats(setting.batch, 200, setting.config.d_model)}


def sound_and_words(setting: Setting) -> dict[str, Tensor]:
    """PE-Audio: one second of sound (batch, 1, samples) and a sentence about it."""
    rate = read(setting.config, "audio_config.dac_config.sampling_rate", default=48_000)
    ids = text.sentence(setting)
    return {"input_values": floats(setting.batch, 1, rate), "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def frames_of_codes(setting: Setting) -> dict[str, Tensor]:
    """CSM: at each step the codes of one frame of sound, (batch, length, codebooks)."""
    config = setting.config
    codes = integers(config.vocab_size - 1, setting.batch, setting.length, config.num_codebooks)
    return {"input_ids": codes} | ({"labels": codes.clone()} if setting.training else {})


def sound_with_features(setting: Setting) -> dict[str, Tensor]:
    """NeuCodec, X-Codec 2: one second of sound, (batch, 1, samples), and its mel frames for the semantic encoder."""
    frames = floats(
        setting.batch, 50, read(setting.config, "semantic_model_config.feature_projection_input_dim", default=160)
    )
    return {"input_values": floats(setting.batch, 1, 16_000), "input_features": frames}


def streamed_frames(setting: Setting) -> dict[str, Tensor]:
    """Voxtral Realtime's encoder: 10 s of mel frames (batch, bins, frames)."""
    return {"input_features": floats(setting.batch, mel_bins(setting), 1000)}


def streamed_speech(setting: Setting) -> dict[str, Tensor]:
    """Voxtral Realtime: a word (batch, length) for every stretch of sound, to which it is added: mel frames (batch, bins, frames).

    A convolution of stride 2 halves the frames; `downsample_factor` of what is left become one step.
    """
    ids = text.sentence(setting)
    frames = 2 * setting.config.downsample_factor * setting.length
    sound = floats(setting.batch, mel_bins(setting), frames)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "input_features": sound}


def dialogue(setting: Setting) -> dict[str, Tensor]:
    """Dia: a text in bytes, and the codes of its sound in nine channels, (batch, steps, channels); in training as labels too."""
    decoder = setting.config.decoder_config
    ids = integers(setting.config.encoder_config.vocab_size, setting.batch, setting.length)
    codes = integers(1024, setting.batch, CODES, decoder.num_channels)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": codes}
    if setting.training:
        inputs["labels"] = codes.transpose(1, 2).flatten(0, 1).contiguous()
    return inputs


def codes_beside_each_other(setting: Setting) -> dict[str, object]:
    """Bark's fine model: all codes of each step, (batch, length, codebooks), of which it corrects the last."""
    config = setting.config
    codes = integers(config.input_vocab_size - 1, setting.batch, setting.length, config.n_codes_total)
    return {"input_ids": codes, "codebook_idx": config.n_codes_total - 1}


def phonemes(setting: Setting) -> dict[str, Tensor]:
    """VITS: the ids of phonemes (batch, length)."""
    ids = integers(setting.config.vocab_size - 1, setting.batch, setting.length) + 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


FAMILIES: dict[str, Recipe] = {
    "audio-spectrogram-transformer": spectrogram_picture,
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
    "inkling_audio": sound_tokens,
    "kyutai_speech_to_text": words_with_codes,
    "pe_audio": sound_and_words,
    "pocket_tts": latent_speech,
    "pop2piano": beats,
    "speech-encoder-decoder": encoded_speech,
    "neucodec": sound_with_features,
    "vits": phonemes,
    "voxtral_realtime": streamed_speech,
    "voxtral_realtime_encoder": streamed_frames,
    "xcodec2": sound_with_features,
    "WhisperForConditionalGeneration": whisper,
    "WhisperForAudioClassification": whisper,
    "WhisperModel": whisper,
}

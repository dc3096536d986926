"""Recipes for parts of larger models on their own: vision towers, sound encoders, Q-Formers, vocoders."""

from __future__ import annotations

import torch
from torch import Tensor

from sizer.architecture.examples import pictures, vision
from sizer.architecture.examples.audio import frame_count, mel_bins
from sizer.architecture.examples.setting import Recipe, Setting, read
from sizer.architecture.examples.tensors import floats, ones

STACKED_PATCHES = frozenset({"paddleocr_vl_vision"})  # one more dimension in front of the rows
LATENTS = 50  # steps of a codec's latents: 4 s at 12.5 a second


def patch_grid_tower(setting: Setting) -> dict[str, Tensor]:
    """A Qwen-VL tower: the patches of all pictures as rows, under the name its forward uses, and their grids."""
    grid = pictures.grid_thw(setting)
    name = "hidden_states" if setting.takes("hidden_states") else "pixel_values"
    inputs = {name: pictures.patch_rows(setting, grid), "grid_thw": grid}
    if setting.config.model_type in STACKED_PATCHES:
        inputs[name] = inputs[name].unsqueeze(0)
    if setting.takes("merge_sizes"):
        inputs["merge_sizes"] = torch.full((setting.batch,), pictures.merge_size(setting.config))
    return inputs


def merged_grid_tower(setting: Setting) -> dict[str, Tensor]:
    """Inkling 2's tower: rows of merged patches."""
    return pictures.merged_patches(setting)


def cube_tower(setting: Setting) -> dict[str, Tensor]:
    """Inkling's tower: patches as small films."""
    return {"pixel_values": pictures.cubes(setting)}


def positioned_tower(setting: Setting) -> dict[str, Tensor]:
    """Gemma 4's tower: patches and their positions."""
    pool = read(setting.config, "pooling_kernel_size", default=1)
    return pictures.positioned_patches(setting, pool, name="pixel_position_ids")


def sized_tower(setting: Setting) -> dict[str, Tensor]:
    """Pixtral's tower: pixels, each picture's size with them."""
    sizes = torch.tensor([setting.image_size]).repeat(setting.batch, 1)
    return {"pixel_values": vision.image(setting), "image_sizes": sizes}


def tiled_tower(setting: Setting) -> dict[str, Tensor]:
    """Llama 3.2's tower: four tiles of which one is used."""
    inputs = pictures.aspect_ratio_inputs(setting)
    return {name: value for name, value in inputs.items() if setting.takes(name)}


def queries(setting: Setting) -> dict[str, Tensor]:
    """A Q-Former: 32 queries that read a picture's 257 features."""
    config = setting.config
    width = read(config, "encoder_hidden_size", "hidden_size")
    inputs = {
        "query_embeds": floats(setting.batch, 32, config.hidden_size),
        "encoder_hidden_states": floats(setting.batch, 257, width),
    }
    if setting.takes("input_ids"):
        words = pictures.question(config.vocab_size, setting.batch)
        inputs |= {"input_ids": words, "attention_mask": ones(setting.batch, 32 + words.shape[1])}
    return inputs


def whisper_frames(setting: Setting) -> dict[str, Tensor]:
    """A Whisper encoder: mel frames (batch, bins, frames), as many as its positions times two, with a mask where it is wanted."""
    count = 2 * read(setting.config, "max_source_positions", default=1500)
    inputs = {"input_features": floats(setting.batch, mel_bins(setting), count)}
    return inputs | _mask(setting, count)


def mel_frames(setting: Setting) -> dict[str, Tensor]:
    """An encoder of mel frames (batch, frames, bins) that wants their mask."""
    count = frame_count(setting)
    return {"input_features": floats(setting.batch, count, mel_bins(setting))} | _mask(setting, count)


def _mask(setting: Setting, count: int) -> dict[str, Tensor]:
    return {"input_features_mask": ones(setting.batch, count)} if setting.takes("input_features_mask") else {}


def hidden_frames(setting: Setting) -> dict[str, Tensor]:
    """Granite's speech encoder: mel frames under the name `hidden_states`."""
    return {"hidden_states": floats(setting.batch, 1000, setting.config.input_dim)}


def hidden_tokens(setting: Setting) -> dict[str, Tensor]:
    """An encoder of hidden states (batch, length, hidden size)."""
    return {"hidden_states": floats(setting.batch, setting.length or 256, setting.config.hidden_size)}


def hidden_pixels(setting: Setting) -> dict[str, Tensor]:
    """Florence-2's tower: pixels under the name `hidden_states`."""
    return {"hidden_states": floats(setting.batch, 3, 768, 768)}


def vocoder(setting: Setting) -> dict[str, Tensor]:
    """A vocoder: 100 frames of a spectrogram."""
    name = next(name for name in ("spectrogram", "mel_spectrogram", "input_features") if setting.takes(name))
    bins = read(setting.config, "model_in_dim", "num_mel_bins", "mel_dim", default=80)
    if name == "mel_spectrogram":
        return {name: floats(setting.batch, bins, 100)}
    return {name: floats(setting.batch, 100, bins)}


def codec(setting: Setting) -> dict[str, Tensor]:
    """A neural codec: one second of sound, (batch, 1, samples)."""
    rate = read(setting.config, "sampling_rate", "sample_rate", default=24_000)
    return {"input_values": floats(setting.batch, read(setting.config, "audio_channels", default=1), rate)}


def whole_blocks_of_sound(setting: Setting) -> dict[str, Tensor]:
    """Muse Spark's sound encoder: 10 s of samples, rounded up to a multiple of what becomes one token."""
    block = read(setting.config, "samples_per_token", default=1920)
    return {"input_values": floats(setting.batch, -(-160_000 // block) * block)}


def quantised_picture(setting: Setting) -> dict[str, Tensor]:
    """Janus' VQ-VAE: a picture with as many patches along each side as its codes have places."""
    side = setting.config.num_patches * 2 ** (len(setting.config.channel_multiplier) - 1)
    return {"pixel_values": floats(setting.batch, setting.config.in_channels, side, side)}


def mel_with_mask(setting: Setting) -> dict[str, Tensor]:
    """Gemma 3n's sound encoder: mel frames and which of them are padding (none)."""
    frames = floats(setting.batch, 1000, setting.config.input_feat_size)
    return {"audio_mel": frames, "audio_mel_mask": torch.zeros(setting.batch, 1000, dtype=torch.bool)}


def speech_frames(setting: Setting) -> dict[str, Tensor]:
    """Phi-4's sound encoder: mel frames (batch, 1000, bins) and their mask."""
    frames = floats(setting.batch, 1000, setting.config.input_size)
    return {"hidden_states": frames, "mask": ones(setting.batch, 1000).bool()}


def stacked_frames(setting: Setting) -> dict[str, Tensor]:
    """Granite Speech 5: 500 mel frames with their changes and neighbours, four times the bins."""
    bins = 4 * read(setting.config, "num_mel_bins", "encoder_config.num_mel_bins", default=80)
    return {"input_features": floats(setting.batch, 500, bins), "attention_mask": ones(setting.batch, 500)}


def low_rate_frames(setting: Setting) -> dict[str, Tensor]:
    """Fun-ASR's encoder: 167 stacked mel frames (10 s) with their mask."""
    width = read(setting.config, "input_size", "num_mel_bins", default=560)
    return {"input_features": floats(setting.batch, 167, width), "input_features_mask": ones(setting.batch, 167)}


def wide_mel_frames(setting: Setting) -> dict[str, Tensor]:
    """Gemma 4's sound encoder: 10 s of 128 mel bins and their mask."""
    return {"input_features": floats(setting.batch, 1000, 128), "attention_mask": ones(setting.batch, 1000).bool()}


def chunked_mel_frames(setting: Setting) -> dict[str, Tensor]:
    """Qwen3-ASR's encoder: 1000 mel frames (batch, bins, frames) and their mask."""
    return {
        "input_features": floats(setting.batch, mel_bins(setting), 1000),
        "input_features_mask": ones(setting.batch, 1000),
    }


def pooled_patches(setting: Setting) -> dict[str, Tensor]:
    """Molmo 2's adapter: features of 729 patches and which four of them each token pools."""
    config = setting.config
    width = config.hidden_size * len(config.vision_feature_layer)
    windows = torch.arange(setting.batch * 182 * 4).view(-1, 4)
    return {"image_features": floats(setting.batch, 729, width), "pooled_patches_idx": windows}


def rows_of_patches(setting: Setting) -> dict[str, Tensor]:
    """Molmo 2's tower: patches (pictures, patches, channels * patch * patch), as many as it has positions."""
    config = setting.config
    count = read(config, "num_position_embeddings", default=729)
    return {"pixel_values": floats(setting.batch, count, 3 * config.patch_size**2)}


def hidden_sound(setting: Setting) -> dict[str, Tensor]:
    """VibeVoice's sound encoder: one second of sound (batch, 1, samples) under the name `hidden_states`."""
    return {"hidden_states": floats(setting.batch, read(setting.config, "channels", default=1), 24_000)}


def frames_as_pictures(setting: Setting) -> dict[str, Tensor]:
    """X-CLIP's tower: the frames of all videos as pictures, (batch * frames, channels, height, width)."""
    return {"pixel_values": vision.video(setting).flatten(0, 1)}


def latents(setting: Setting) -> dict[str, Tensor]:
    """A codec's decoder: its latents (batch, channels, steps)."""
    return {"latents": floats(setting.batch, read(setting.config, "hidden_size"), LATENTS)}


FAMILIES: dict[str, Recipe] = {
    "audioflamingo3_encoder": whisper_frames,
    "blip_2_qformer": queries,
    "dac": codec,
    "encodec": codec,
    "fastspeech2_conformer_hifigan": vocoder,
    "flava_multimodal_model": hidden_tokens,
    "florence_vision": hidden_pixels,
    "fun_asr_nano_encoder": low_rate_frames,
    "gemma3n_audio": mel_with_mask,
    "gemma4_audio": wide_mel_frames,
    "gemma4_vision": positioned_tower,
    "glmasr_encoder": whisper_frames,
    "granite_speech5_ctc": stacked_frames,
    "granite_speech5_encoder": stacked_frames,
    "granite_speech_encoder": hidden_frames,
    "granite_speech_plus_encoder": hidden_frames,
    "inkling2_vision": merged_grid_tower,
    "inkling_vision": cube_tower,
    "instructblip_qformer": queries,
    "instructblipvideo_qformer": queries,
    "janus_vqgan": quantised_picture,
    "mimi": codec,
    "mimi_decoder": latents,
    "mimi_encoder": codec,
    "minicpm_ocr_vision": pictures.ribbon,
    "minicpmv4_7_vision": pictures.ribbon,
    "mllama_vision_model": tiled_tower,
    "molmo2_adapter": pooled_patches,
    "molmo2_vision": rows_of_patches,
    "moss_transcribe_diarize_audio": whisper_frames,
    "muse_spark_audio": whole_blocks_of_sound,
    "pe_audio_encoder": codec,
    "phi4_multimodal_audio": speech_frames,
    "pix2struct": pictures.flattened_patches,
    "pix2struct_vision_model": pictures.flattened_patches,
    "pixtral": sized_tower,
    "pocket_tts_audio_tokenizer": codec,
    "pocket_tts_audio_tokenizer_decoder": latents,
    "pocket_tts_audio_tokenizer_encoder": codec,
    "qwen2_5_omni_bigvgan": vocoder,
    "qwen2_audio_encoder": whisper_frames,
    "qwen3_asr_encoder": chunked_mel_frames,
    "siglip2_vision_model": pictures.naflex,
    "speecht5_hifigan": vocoder,
    "univnet": vocoder,
    "vibevoice_acoustic_tokenizer": codec,
    "vibevoice_acoustic_tokenizer_encoder": hidden_sound,
    "voxtral_encoder": whisper_frames,
    "xclip_vision_model": frames_as_pictures,
    "xcodec": codec,
}

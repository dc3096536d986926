"""Recipes for separate parts of larger models, with the outputs of other parts as inputs: features, queries, codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.architecture.examples import token_inputs, vision
from sizer.architecture.examples.example_spec import ExampleSpec, Recipe, floats, integers, ones, read

SAM_SIDE = 72  # patches of 14 along each side of SAM 3's image of 1008 pixels
PROMPT = 32  # tokens of a prompt
BYTES_PER_PATCH = 4
QUERIES = 200  # objects that SAM 3 searches for


def embedded(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return embeddings (batch, length, hidden size) for an inner decoder."""
    return {"inputs_embeds": floats(spec.batch, spec.length or 256, spec.config.hidden_size)}


def image_by_name(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of BridgeTower's tower: pixels under the name `image`."""
    return {"image": vision.image(spec)}


def patches_and_queries(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of DeepSeek-OCR 2's encoder: 256 patches and as many queries after them."""
    return {"inputs_embeds": floats(spec.batch, 512, spec.config.hidden_size), "num_patches": 256}


def resampled(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Idefics2's resampler: an image of 35 x 35 patches and their mask."""
    return {
        "context": floats(spec.batch, 1225, spec.config.hidden_size),
        "attention_mask": ones(spec.batch, 1225),
    }


def page_patches(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Kosmos-2.5's encoder: 2048 patches of a page, embedded."""
    patches = floats(spec.batch, 2048, spec.config.hidden_size)
    return {"hidden_states": patches, "attention_mask": ones(spec.batch, 2048)}


def draft(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Muse Glimmer's assistant: one block of embeddings to write, and the large model's states before it.

    The states are those of 256 tokens.
    """
    config = spec.config
    layers = len(read(config, "target_layer_ids", default=(0,)))
    return {
        "noise_embeds": floats(spec.batch, read(config, "block_size", default=16), config.hidden_size),
        "context_hidden_states": floats(spec.batch, 256, config.hidden_size * layers),
    }


def pyramid(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of SAM 3's fusing encoder: image features (batch, channels, 72, 72), their positions, and a prompt."""
    size = spec.config.hidden_size
    features = floats(spec.batch, size, SAM_SIDE, SAM_SIDE)
    return {
        "vision_features": [features],
        "vision_pos_embeds": [features.clone()],
        "text_features": floats(spec.batch, PROMPT, size),
        "text_mask": ones(spec.batch, PROMPT).bool(),
    }


def fused_features(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of SAM 3's decoder: fused features (batch, 72 * 72, channels), their positions and shape, and a prompt."""
    size = spec.config.hidden_size
    features = floats(spec.batch, SAM_SIDE**2, size)
    return {
        "vision_features": features,
        "vision_pos_encoding": features.clone(),
        "text_features": floats(spec.batch, PROMPT, size),
        "text_mask": ones(spec.batch, PROMPT).bool(),
        "spatial_shapes": torch.tensor([[SAM_SIDE, SAM_SIDE]]),
    }


def queries_and_pyramid(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of SAM 3's mask decoder: queries, three levels of features, the encoder's output, and a prompt."""
    size = spec.config.hidden_size
    return {
        "decoder_queries": floats(spec.batch, QUERIES, size),
        "backbone_features": [floats(spec.batch, size, SAM_SIDE * scale, SAM_SIDE * scale) for scale in (4, 2, 1)],
        "encoder_hidden_states": floats(spec.batch, SAM_SIDE**2, size),
        "prompt_features": floats(spec.batch, PROMPT, size),
        "prompt_mask": ones(spec.batch, PROMPT).bool(),
    }


def codes_in_channels(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Dia's decoder: codes (batch, 250, channels) and the hidden states of the text that they speak."""
    config = spec.config
    return {
        "input_ids": integers(1024, spec.batch, 250, config.num_channels),
        "encoder_hidden_states": floats(spec.batch, 256, config.cross_hidden_size),
    }


def codes_of_one_frame(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Moshi's depth decoder: a word, the codes of one frame (batch, codebooks), and the large model's states.
    """
    config = spec.config
    count = config.num_codebooks
    inputs = {
        "input_ids": integers(config.audio_vocab_size, spec.batch, count),
        "last_hidden_state": floats(spec.batch, count, config.input_size),
    }
    return inputs | ({"labels": inputs["input_ids"].clone()} if spec.training else {})


def groups_of_codes(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Qwen3-Omni's code predictor: the embeddings of one frame's codes without the last.

    The last group of codes is predicted.
    """
    config = spec.config
    inputs = {"inputs_embeds": floats(spec.batch, config.num_code_groups, config.hidden_size)}
    count = config.num_code_groups
    return inputs | ({"labels": integers(config.vocab_size, spec.batch, count)} if spec.training else {})


def reply_to_speak(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Qwen2.5-Omni's talker: the thinker's reply as embeddings and codes of speech."""
    config = spec.config
    count = min(spec.tokens, 1024)
    return {
        "inputs_embeds": floats(spec.batch, count, config.embedding_size),
        "input_text_ids": integers(1000, spec.batch, count),
        "input_ids": integers(8192, spec.batch, count),
        "attention_mask": ones(spec.batch, count),
    }


def noisy_spectrogram(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of Qwen2.5-Omni's diffusion transformer: a noisy spectrogram of 300 frames, its voice and its codes."""
    config = spec.config
    frames = 300
    return {
        "hidden_states": floats(spec.batch, frames, config.mel_dim),
        "condition_vector": floats(spec.batch, frames, config.mel_dim),
        "speaker_embedding": floats(spec.batch, frames, config.enc_emb_dim),
        "quantized_code": integers(config.num_embeds, spec.batch, frames // config.repeats),
        "time_step": floats(spec.batch),
    }


def codes_to_audio(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Qwen2.5-Omni's last part: codes of 300 frames of speech, a voice (batch, width) and its spectrogram."""
    config = spec.config.dit_config
    frames = 300
    return {
        "code": integers(config.num_embeds, spec.batch, frames // config.repeats),
        "conditioning": floats(spec.batch, config.enc_emb_dim),
        "reference_mel": floats(spec.batch, frames, config.mel_dim),
    }


def audio_chunks(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return mel frames (batch, bins, 1000) for dots' audio encoder, and the number of samples of each chunk."""
    config = spec.config
    return {
        "input_features": floats(spec.batch, read(config, "num_mel_bins", default=128), 1000),
        "chunk_sample_lengths": torch.full((spec.batch,), 1000 * config.hop_length),
    }


def mel_frames(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Nemotron's transcriber: 10 s of mel frames of its inner encoder's own width."""
    bins = read(spec.config, "asr_config.num_mel_bins", "num_mel_bins", default=128)
    return {"input_features": floats(spec.batch, 1000, bins), "attention_mask": ones(spec.batch, 1000)}


def compressed_patches(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the first tower's features of an image for Unlimited-OCR's second tower, (batch, hidden size, 16, 16)."""
    return {"patch_embeds": floats(spec.batch, spec.config.hidden_size, 16, 16)}


def audio_latents(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of VibeVoice's decoder of audio: 25 latents (batch, channels, 25)."""
    return {"hidden_states": floats(spec.batch, read(spec.config, "hidden_size", default=64), 25)}


def words_with_delay(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Voxtral Realtime's text model: words, and the embedding of how long it may wait."""
    inputs = {"input_ids": token_inputs.sentence(spec), "t_cond": floats(1, 1, spec.config.hidden_size)}
    return inputs | ({"labels": inputs["input_ids"].clone()} if spec.training and spec.takes("labels") else {})


def bytes_in_patches(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of BLT's local encoder: 512 bytes in patches of four."""
    count = 512 // BYTES_PER_PATCH
    patch = (torch.arange(512) // BYTES_PER_PATCH).repeat(spec.batch, 1)
    return {"input_ids": integers(256, spec.batch, 512), "patch_ids": patch, "num_patches": count}


def patches_to_bytes(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return 512 embedded bytes for BLT's local decoder, and the global transformer's outputs for their patches."""
    width = read(spec.config, "hidden_size_global", default=spec.config.hidden_size)
    return {
        "inputs_embeds": floats(spec.batch, 512, spec.config.hidden_size),
        "patch_embeds": floats(spec.batch, 512 // BYTES_PER_PATCH, width),
    }


FAMILIES: dict[str, Recipe] = {
    "blt_global_transformer": embedded,
    "blt_local_decoder": patches_to_bytes,
    "blt_local_encoder": bytes_in_patches,
    "bridgetower_vision_model": image_by_name,
    "deepseek_ocr2_encoder": patches_and_queries,
    "dia_decoder": codes_in_channels,
    "dots3_note_audio_encoder": audio_chunks,
    "idefics2_perceiver": resampled,
    "kosmos_2_5_vision_model": page_patches,
    "moshi_depth": codes_of_one_frame,
    "muse_glimmer_assistant": draft,
    "nemotron3_5_transcribe_audio": mel_frames,
    "nemotron3_5_transcribe_word_timestamp": embedded,
    "qwen2_5_omni_dit": noisy_spectrogram,
    "qwen2_5_omni_talker": reply_to_speak,
    "qwen2_5_omni_token2wav": codes_to_audio,
    "qwen3_omni_moe_talker_code_predictor": groups_of_codes,
    "sam3_detr_decoder": fused_features,
    "sam3_detr_encoder": pyramid,
    "sam3_lite_text_detr_decoder": fused_features,
    "sam3_lite_text_detr_encoder": pyramid,
    "sam3_lite_text_mask_decoder": queries_and_pyramid,
    "sam3_mask_decoder": queries_and_pyramid,
    "unlimited_ocr_vision_encoder": compressed_patches,
    "vibevoice_acoustic_tokenizer_decoder": audio_latents,
    "voxtral_realtime_text": words_with_delay,
}

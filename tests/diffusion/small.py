"""Files of small pipelines that no preset is of: kinds of parts and of calls that presets lack. Sizes are this project's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sizer.diffusion.bundle import INDEX

_CLIP = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_T5 = {"vocab_size": 1000, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4}
_VAE = {
    "block_out_channels": [32, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 4,
}
_FLOW = ("diffusers", "FlowMatchEulerDiscreteScheduler", {})
_UNET = {
    "sample_size": 32,
    "block_out_channels": [32, 64],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "attention_head_dim": 8,
    "cross_attention_dim": 64,
    "layers_per_block": 1,
}
_STABLE = {
    "text_encoder": ("transformers", "CLIPTextModel", _CLIP),
    "tokenizer": ("transformers", "CLIPTokenizer", {}),
    "scheduler": ("diffusers", "DDIMScheduler", {}),
    "vae": ("diffusers", "AutoencoderKL", _VAE),
}
_LLAMA = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "text_config": {
        **_LLAMA,
        "rope_parameters": {"mrope_section": [2, 2, 4], "rope_type": "default", "rope_theta": 1e6},
    },
    "vision_config": {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64},
}
_LONG = {**_CLIP, "projection_dim": 64, "max_position_embeddings": 248}
_HIDREAM = {
    "patch_size": 2, "in_channels": 16, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 4,
    "caption_channels": [64, 64], "text_emb_dim": 128, "num_routed_experts": 4, "num_activated_experts": 2,
    "axes_dims_rope": [16, 8, 8], "max_resolution": [64, 64], "llama_layers": [0, 1],
}  # fmt: skip
_MOVQ = {
    "block_out_channels": [32, 64],
    "down_block_types": ["DownEncoderBlock2D", "AttnDownEncoderBlock2D"],
    "up_block_types": ["AttnUpDecoderBlock2D", "UpDecoderBlock2D"],
    "latent_channels": 4,
    "norm_type": "spatial",
    "num_vq_embeddings": 12,
    "vq_embed_dim": 4,
}
_KANDINSKY = {
    "in_visual_dim": 16, "in_text_dim": 64, "in_text_dim2": 64, "time_dim": 32, "out_visual_dim": 16, "patch_size": [1, 2, 2],
    "model_dim": 64, "ff_dim": 128, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": [4, 6, 6], "visual_cond": False,
}  # fmt: skip
_COSMOS = {
    "in_channels": 16, "out_channels": 16, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "mlp_ratio": 2,
    "text_embed_dim": 64, "adaln_lora_dim": 8, "max_size": [8, 64, 64], "patch_size": [1, 2, 2], "rope_scale": [2.0, 1.0, 1.0],
    "concat_padding_mask": True, "extra_pos_embed_type": "learnable",
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    # Its scheduler computes timesteps from values on the device; images are encoded, and their frames decoded in chunks.
    "StableVideoDiffusionPipeline": {
        "unet": (
            "diffusers",
            "UNetSpatioTemporalConditionModel",
            {
                "block_out_channels": [32, 64],
                "down_block_types": ["CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"],
                "up_block_types": ["UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"],
                "addition_time_embed_dim": 32,
                "projection_class_embeddings_input_dim": 96,
                "cross_attention_dim": 64,
                "num_attention_heads": [2, 4],
                "num_frames": 4,
            },
        ),
        "image_encoder": (
            "transformers",
            "CLIPVisionModelWithProjection",
            {**_CLIP, "image_size": 32, "patch_size": 8, "projection_dim": 64},
        ),
        "feature_extractor": ("transformers", "CLIPImageProcessor", {}),
        "scheduler": (
            "diffusers",
            "EulerDiscreteScheduler",
            {"prediction_type": "v_prediction", "timestep_type": "continuous", "use_karras_sigmas": True, "sigma_max": 700.0},
        ),
        "vae": (
            "diffusers",
            "AutoencoderKLTemporalDecoder",
            {"block_out_channels": [32, 64], "down_block_types": ["DownEncoderBlock2D"] * 2},
        ),
    },
    # The text encoder's masks are made by torch.vmap; heads of 12 have no kernel for a mask; a guider calls the denoiser.
    "MotifVideoPipeline": {
        "text_encoder": (
            "transformers",
            "T5Gemma2Encoder",
            {
                "text_config": {
                    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                    "dropout_rate": 0.0,
                },
                "vision_config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4},
            },
        ),
        "tokenizer": ("transformers", "GemmaTokenizerFast", {}),
        "guider": ("diffusers", "ClassifierFreeGuidance", {}),
        "scheduler": _FLOW,
        "transformer": (
            "diffusers",
            "MotifVideoTransformer3DModel",
            {
                "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "num_single_layers": 1, "patch_size": 1,
                "text_embed_dim": 64, "rope_axes_dim": [4, 4, 4],
            },
        ),
        "vae": ("diffusers", "AutoencoderKLWan", {"base_dim": 8, "num_res_blocks": 1}),
    },
    "ChromaPipeline": {
        "text_encoder": ("transformers", "T5EncoderModel", _T5),
        "tokenizer": ("transformers", "T5TokenizerFast", {}),
        "scheduler": _FLOW,
        "transformer": (
            "diffusers",
            "ChromaTransformer2DModel",
            {
                "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2,
                "joint_attention_dim": 64, "axes_dims_rope": [8, 12, 12], "approximator_num_channels": 64,
                "approximator_hidden_dim": 64, "approximator_layers": 1,
            },
        ),
        "vae": ("diffusers", "AutoencoderKL", {**_VAE, "shift_factor": 0.1}),
    },
    "CogView4Pipeline": {
        "text_encoder": (
            "transformers",
            "GlmModel",
            {
                "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
            },
        ),
        "tokenizer": ("transformers", "PreTrainedTokenizerFast", {}),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler", {"base_shift": 0.25, "max_shift": 0.75}),
        "transformer": (
            "diffusers",
            "CogView4Transformer2DModel",
            {
                "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
                "text_embed_dim": 64, "time_embed_dim": 32, "condition_dim": 16,
            },
        ),
        "vae": ("diffusers", "AutoencoderKL", _VAE),
    },
    "AuraFlowPipeline": {
        "text_encoder": ("transformers", "UMT5EncoderModel", {**_T5, "feed_forward_proj": "gated-gelu"}),
        "tokenizer": ("transformers", "LlamaTokenizerFast", {}),
        "scheduler": _FLOW,
        "transformer": (
            "diffusers",
            "AuraFlowTransformer2DModel",
            {
                "sample_size": 32, "in_channels": 4, "out_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
                "attention_head_dim": 16, "num_attention_heads": 4, "caption_projection_dim": 64, "joint_attention_dim": 64,
                "pos_embed_max_size": 1024,
            },
        ),
        "vae": ("diffusers", "AutoencoderKL", _VAE),
    },
    "HiDreamImagePipeline": {
        **dict.fromkeys(("text_encoder", "text_encoder_2"), ("transformers", "CLIPTextModelWithProjection", _LONG)),
        **dict.fromkeys(("tokenizer", "tokenizer_2"), ("transformers", "CLIPTokenizer", {})),
        "text_encoder_3": ("transformers", "T5EncoderModel", _T5),
        "tokenizer_3": ("transformers", "T5Tokenizer", {}),
        "text_encoder_4": ("transformers", "LlamaForCausalLM", _LLAMA),
        "tokenizer_4": ("transformers", "PreTrainedTokenizerFast", {"model_max_length": 128}),
        "scheduler": _FLOW,
        "vae": ("diffusers", "AutoencoderKL", {**_VAE, "latent_channels": 16, "shift_factor": 0.1}),
        "transformer": ("diffusers", "HiDreamImageTransformer2DModel", _HIDREAM),
    },
    "HunyuanImagePipeline": {
        "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration", _QWEN),
        "tokenizer": ("transformers", "Qwen2Tokenizer", {}),
        "text_encoder_2": ("transformers", "T5EncoderModel", _T5),
        "tokenizer_2": ("transformers", "ByT5Tokenizer", {}),
        "scheduler": _FLOW,
        "guider": ("diffusers", "AdaptiveProjectedMixGuidance", {}),
        "ocr_guider": ("diffusers", "AdaptiveProjectedMixGuidance", {}),
        "transformer": (
            "diffusers",
            "HunyuanImageTransformer2DModel",
            {
                "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 1,
                "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": [1, 1], "guidance_embeds": False,
                "text_embed_dim": 64, "text_embed_2_dim": 64, "rope_axes_dim": [8, 8],
            },
        ),
        "vae": (
            "diffusers",
            "AutoencoderKLHunyuanImage",
            {
                "in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": [32, 64, 64, 64],
                "layers_per_block": 1, "spatial_compression_ratio": 8, "sample_size": 128, "scaling_factor": 0.5,
            },
        ),
    },
    "HunyuanVideo15Pipeline": {
        "text_encoder": ("transformers", "Qwen2_5_VLTextModel", _QWEN["text_config"]),
        "tokenizer": ("transformers", "Qwen2Tokenizer", {}),
        "text_encoder_2": ("transformers", "T5EncoderModel", _T5),
        "tokenizer_2": ("transformers", "ByT5Tokenizer", {}),
        "scheduler": _FLOW,
        "guider": ("diffusers", "ClassifierFreeGuidance", {}),
        "transformer": (
            "diffusers",
            "HunyuanVideo15Transformer3DModel",
            {
                "in_channels": 9, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2,
                "num_refiner_layers": 1, "mlp_ratio": 2.0, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 64,
                "text_embed_2_dim": 64, "image_embed_dim": 16, "rope_axes_dim": [4, 4, 8], "target_size": 64, "task_type": "t2v",
            },
        ),
        "vae": (
            "diffusers",
            "AutoencoderKLHunyuanVideo15",
            {
                "in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": [16, 32], "layers_per_block": 1,
                "spatial_compression_ratio": 4, "temporal_compression_ratio": 2, "downsample_match_channel": False,
                "upsample_match_channel": False,
            },
        ),
    },
    "Kandinsky3Pipeline": {
        "text_encoder": ("transformers", "T5EncoderModel", _T5),
        "tokenizer": ("transformers", "T5TokenizerFast", {}),
        "scheduler": ("diffusers", "DDPMScheduler", {"beta_schedule": "squaredcos_cap_v2"}),
        "unet": (
            "diffusers",
            "Kandinsky3UNet",
            {
                "in_channels": 4, "time_embedding_dim": 32, "groups": 8, "attention_head_dim": 16, "layers_per_block": 3,
                "block_out_channels": [32, 64], "cross_attention_dim": 64, "encoder_hid_dim": 64,
            },
        ),
        "movq": ("diffusers", "VQModel", _MOVQ),
    },
    "Kandinsky5T2VPipeline": {
        "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration", _QWEN),
        "tokenizer": ("transformers", "Qwen2VLProcessor", {}),
        "text_encoder_2": ("transformers", "CLIPTextModel", _CLIP),
        "tokenizer_2": ("transformers", "CLIPTokenizer", {}),
        "scheduler": _FLOW,
        "transformer": ("diffusers", "Kandinsky5Transformer3DModel", _KANDINSKY),
        "vae": (
            "diffusers",
            "AutoencoderKLHunyuanVideo",
            {
                "block_out_channels": [32, 64, 64, 64], "latent_channels": 16, "layers_per_block": 1,
                "spatial_compression_ratio": 8, "temporal_compression_ratio": 4,
            },
        ),
    },
    "CosmosTextToWorldPipeline": {
        "text_encoder": ("transformers", "T5EncoderModel", _T5),
        "tokenizer": ("transformers", "T5TokenizerFast", {}),
        "scheduler": ("diffusers", "EDMEulerScheduler", {"sigma_max": 80, "sigma_data": 0.5}),
        "transformer": ("diffusers", "CosmosTransformer3DModel", _COSMOS),
        "vae": (
            "diffusers",
            "AutoencoderKLCosmos",
            {
                "latent_channels": 16, "encoder_block_out_channels": [8, 16, 16, 16], "decode_block_out_channels": [8, 16, 16, 16],
                "attention_resolutions": [8], "resolution": 64, "num_layers": 1, "spatial_compression_ratio": 8,
                "temporal_compression_ratio": 8,
            },
        ),
    },
    "Cosmos2TextToImagePipeline": {
        "text_encoder": ("transformers", "T5EncoderModel", _T5),
        "tokenizer": ("transformers", "T5TokenizerFast", {}),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler", {"use_karras_sigmas": True}),
        "transformer": ("diffusers", "CosmosTransformer3DModel", _COSMOS),
        "vae": ("diffusers", "AutoencoderKLWan", {"base_dim": 8, "num_res_blocks": 1}),
    },
    "StableDiffusionPAGPipeline": {**_STABLE, "unet": ("diffusers", "UNet2DConditionModel", _UNET)},
    "LatentConsistencyModelPipeline": {
        **_STABLE,
        "scheduler": ("diffusers", "LCMScheduler", {}),
        "unet": ("diffusers", "UNet2DConditionModel", {**_UNET, "time_cond_proj_dim": 32}),
    },
}  # fmt: skip


def small_files(kind: str) -> dict[str, Any]:
    """Return the files of a small pipeline of a class, as they are pasted."""
    parts = SMALL[kind]
    index = {"_class_name": kind} | {name: [library, part] for name, (library, part, _) in parts.items()}
    if kind.startswith(("StableDiffusion", "Latent")):
        index |= {"safety_checker": [None, None], "feature_extractor": [None, None], "requires_safety_checker": False}
    files = {f"{name}/{'scheduler_' if name == 'scheduler' else ''}config.json": config for name, (_, _, config) in parts.items()}
    return {INDEX: index} | files


def save_pipeline(folder: str | Path) -> dict[str, dict]:
    """Save a small Stable Diffusion with random weights and a tokenizer of letters; return its JSON files, by path."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    files = small_files("LatentConsistencyModelPipeline")
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(f"{one}</w>" for one in letters)]
    words += [f"word{number}</w>" for number in range(_CLIP["vocab_size"] - 2 - len(words))]
    vocabulary = {word: number for number, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    pipe = diffusers.StableDiffusionPipeline(
        vae=diffusers.AutoencoderKL.from_config(files["vae/config.json"]),
        text_encoder=CLIPTextModel(CLIPTextConfig(**files["text_encoder/config.json"], max_position_embeddings=77)),
        tokenizer=CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77),
        unet=diffusers.UNet2DConditionModel.from_config(files["unet/config.json"]),
        scheduler=diffusers.DDIMScheduler.from_config(files["scheduler/scheduler_config.json"]),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(folder)
    paths = [path for path in Path(folder).rglob("*.json") if path.name.endswith("config.json") or path.name == INDEX]
    return {str(path.relative_to(folder)): json.loads(path.read_text(encoding="utf-8")) for path in paths}

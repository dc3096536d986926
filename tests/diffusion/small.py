"""Files of small pipelines that no preset is of: kinds of parts and of calls that presets lack. Sizes are this project's own."""

from __future__ import annotations

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

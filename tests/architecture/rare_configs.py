"""Tiny configs of models whose inputs are unlike others': sessions, atoms, transcripts, sound beside every word."""

from __future__ import annotations

from tests.architecture.tiny_configs import VISION, WIDTHS

TEXT = {**WIDTHS, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512, "head_dim": 8}
BYTES = {**WIDTHS, "vocab_size": 260, "num_key_value_heads": 4, "max_position_embeddings": 512}
ENCODER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
BARK = {
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "block_size": 64,
    "input_vocab_size": 40,
    "output_vocab_size": 40,
}

RARE: dict[str, dict] = {
    "bark": {"semantic_config": BARK, "coarse_acoustics_config": BARK, "fine_acoustics_config": BARK,
             "codec_config": {"model_type": "encodec"}},
    "blip-2": {
        "vision_config": VISION, "qformer_config": {**WIDTHS, "vocab_size": 64, "encoder_hidden_size": 32}, "num_query_tokens": 4,
        "text_config": {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 48,
                        "vocab_size": 128, "max_position_embeddings": 512, "word_embed_proj_dim": 32},
    },
    "blt": {
        "vocab_size": 260, "max_position_embeddings": 512, "encoder_hash_byte_group_vocab": 100,
        "encoder_hash_byte_group_size": [3, 4], "patcher_config": BYTES, "encoder_config": {**BYTES, "hidden_size_global": 64},
        "decoder_config": {**BYTES, "hidden_size_global": 64}, "global_config": {**BYTES, "hidden_size": 64},
    },
    "esmfold2": {
        "pairwise_hidden_size": 32, "pair_transition_intermediate_size": 32, "folding_trunk_num_hidden_layers": 1, "num_loops": 0,
        "lm_encoder": {"num_hidden_layers": 1}, "confidence_head": {"num_hidden_layers": 1},
        "msa_encoder": {"num_hidden_layers": 1, "hidden_size": 16, "outer_hidden_size": 8, "num_attention_heads": 2, "head_dim": 8,
                        "intermediate_size": 16},
        "structure_head": {"diffusion_module": {"num_hidden_layers": 1}}, "esmc_config": {**WIDTHS, "vocab_size": 64},
    },
    "glm_image": {
        "text_config": {**TEXT, "rope_parameters": ROPE, "vision_vocab_size": 64, "pad_token_id": 0, "eos_token_id": 61},
        "vision_config": {"hidden_size": 32, "depth": 1, "num_heads": 4, "intermediate_size": 48, "patch_size": 16},
        "vq_config": {"embed_dim": 16, "num_embeddings": 40, "latent_channels": 32},
        "image_token_id": 100, "image_start_token_id": 60, "image_end_token_id": 61,
    },
    "granitemoehybrid": {
        **TEXT, "layer_types": ["mamba", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
        "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 16,
    },
    "moonshine": {
        "hidden_size": 32, "encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 1, "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 128,
    },
    "parakeet_tdt": {
        "encoder_config": {**ENCODER, "num_mel_bins": 16, "subsampling_conv_channels": 8}, "vocab_size": 20, "blank_token_id": 19,
        "decoder_hidden_size": 16, "joint_hidden_size": 16, "num_decoder_layers": 1, "pad_token_id": 0,
    },
    "sam2_video": {
        "image_size": 128, "prompt_encoder_config": {"hidden_size": 128, "image_size": 128},
        "vision_config": {
            "model_type": "sam2_vision_model", "backbone_channel_list": [128, 64, 32, 16], "fpn_hidden_size": 128,
            "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
            "backbone_config": {
                "model_type": "sam2_hiera_det_model", "hidden_size": 16, "image_size": [128, 128],
                "embed_dim_per_stage": [16, 32, 64, 128], "num_attention_heads_per_stage": [1, 2, 4, 8],
                "blocks_per_stage": [1, 2, 2, 1], "window_size_per_stage": [4, 2, 4, 2], "global_attention_blocks": [4],
                "window_positional_embedding_background_size": [4, 4],
            },
        },
        "mask_decoder_config": {"hidden_size": 128, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 32},
        "memory_attention_hidden_size": 128, "memory_attention_feed_forward_hidden_size": 32, "memory_attention_num_layers": 1,
        "memory_attention_rope_feat_sizes": [8, 8], "memory_encoder_hidden_size": 128, "memory_encoder_output_channels": 64,
        "mask_downsampler_embed_dim": 128, "memory_fuser_embed_dim": 128, "memory_fuser_intermediate_dim": 128,
        "memory_fuser_num_layers": 1,
    },
    "step3p7": {
        "image_token_id": 100, "vision_config": {**ENCODER, "image_size": 112, "patch_size": 14},
        "text_config": {**TEXT, "num_hidden_layers": 1, "sliding_window": 32, "num_attention_groups": 2, "num_local_experts": 4,
                        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "share_expert_dim": 16},
    },
    "tvp": {
        **WIDTHS, "vocab_size": 128, "max_position_embeddings": 64, "max_grid_row_position_embeddings": 16,
        "max_grid_col_position_embeddings": 16, "visual_prompt_size": 8, "max_img_size": 64, "num_frames": 2,
        "backbone_config": {"model_type": "resnet", "out_features": ["stage4"], "embedding_size": 16,
                            "hidden_sizes": [16, 16, 16, 32], "depths": [1, 1, 1, 1]},
    },
    "vits": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 48, "flow_size": 32, "vocab_size": 38,
        "spectrogram_bins": 33, "upsample_initial_channel": 32, "upsample_rates": [4, 4], "upsample_kernel_sizes": [8, 8],
        "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1]], "prior_encoder_num_flows": 1,
        "posterior_encoder_num_wavenet_layers": 1, "prior_encoder_num_wavenet_layers": 1, "duration_predictor_num_flows": 2,
        "duration_predictor_filter_channels": 32,
    },
    "voxtral_realtime": {
        "audio_config": {**ENCODER, "num_mel_bins": 16, "head_dim": 8, "num_key_value_heads": 4}, "text_config": TEXT,
    },
}  # fmt: skip

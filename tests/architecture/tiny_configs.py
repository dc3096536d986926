"""One tiny config per family of transformers models: small enough for a real training step in a fraction of a second."""

from __future__ import annotations

WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VISION = {**WIDTHS, "image_size": 32, "patch_size": 8}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA = {"model_type": "llama", **WIDTHS, "vocab_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 64}
CLIP_VISION = {"model_type": "clip_vision_model", **VISION, "projection_dim": 16}
BERT = {"model_type": "bert", **WIDTHS, "vocab_size": 128, "max_position_embeddings": 64}
BART = {
    "model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
CONV_SOUND = {
    **WIDTHS,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
}

TINY: dict[str, dict] = {
    # text
    "bert": BERT,
    "roberta": {**BERT, "model_type": "roberta", "max_position_embeddings": 66, "pad_token_id": 1},
    "convbert": {**BERT, "model_type": "convbert", "embedding_size": 32},
    "modernbert": {**BERT, "model_type": "modernbert", **SPECIAL},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64},
    "llama": LLAMA,
    "qwen3_moe": {
        **LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "mamba": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 4},
    "t5": {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 128,
           "decoder_start_token_id": 0},
    "bart": BART,
    "layoutlm": {**BERT, "model_type": "layoutlm"},
    "tapas": {**BERT, "model_type": "tapas"},
    "encoder-decoder": {
        "model_type": "encoder-decoder", "encoder": BERT, "decoder": {**BERT, "is_decoder": True, "add_cross_attention": True},
        "decoder_start_token_id": 2, "pad_token_id": 0,
    },
    # pictures and videos
    "vit": {"model_type": "vit", **VISION, "encoder_stride": 8},
    "resnet": {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "swin": {"model_type": "swin", "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2],
             "window_size": 4, "encoder_stride": 8},
    "segformer": {"model_type": "segformer", "hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1],
                  "num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 16},
    "vit_mae": {"model_type": "vit_mae", **VISION, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1,
                "decoder_num_attention_heads": 4, "decoder_intermediate_size": 48},
    "dinov2": {"model_type": "dinov2", **VISION},
    "videomae": {"model_type": "videomae", **VISION, "num_frames": 4, "tubelet_size": 2},
    "timesformer": {"model_type": "timesformer", **VISION, "num_frames": 2},
    "sam": {
        "model_type": "sam", "vision_config": {**VISION, "global_attn_indexes": [1], "window_size": 2, "output_channels": 16,
                                               "mlp_dim": 48, "image_size": 64, "num_pos_feats": 8},
        "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
        "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 16, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    },
    # pictures and text
    "clip": {
        "model_type": "clip", "projection_dim": 16, "vision_config": CLIP_VISION,
        "text_config": {**WIDTHS, "vocab_size": 128, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1},
    },
    "llava": {"model_type": "llava", "text_config": LLAMA, "vision_config": CLIP_VISION, "image_token_index": 100},
    "qwen2_vl": {
        "model_type": "qwen2_vl", "image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102,
        "text_config": {**WIDTHS, "vocab_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 1024,
                        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
        "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 4, "hidden_size": 32, "patch_size": 14},
    },
    "idefics3": {
        "model_type": "idefics3", "image_token_id": 100, "scale_factor": 2, "text_config": LLAMA,
        "vision_config": {**VISION},
    },
    "vision-encoder-decoder": {
        "model_type": "vision-encoder-decoder", "encoder": {"model_type": "vit", **VISION},
        "decoder": {**BERT, "is_decoder": True, "add_cross_attention": True}, "decoder_start_token_id": 2, "pad_token_id": 0,
    },
    # sound
    "whisper": {
        "model_type": "whisper", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 128, "max_source_positions": 50,
        "max_target_positions": 32, "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "wav2vec2": {"model_type": "wav2vec2", **CONV_SOUND, "vocab_size": 32, "num_conv_pos_embeddings": 16,
                 "num_conv_pos_embedding_groups": 2},
    "audio-spectrogram-transformer": {"model_type": "audio-spectrogram-transformer", **WIDTHS, "max_length": 64,
                                      "num_mel_bins": 32},
    # numbers
    "patchtst": {"model_type": "patchtst", "d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16,
                 "context_length": 32, "patch_length": 8, "num_targets": 3},
    "time_series_transformer": {"model_type": "time_series_transformer", "prediction_length": 6, "context_length": 12,
                                "lags_sequence": [1, 2, 3], "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
                                "num_time_features": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
    "decision_transformer": {"model_type": "decision_transformer", "hidden_size": 32, "n_layer": 1, "n_head": 4,
                             "state_dim": 3, "act_dim": 2},
}  # fmt: skip

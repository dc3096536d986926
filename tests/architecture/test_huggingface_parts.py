"""Inner parts of larger models on their own: tiny ones run a real step on the inputs that are made for them."""

from __future__ import annotations

import pytest
import torch

from sizer.architecture.heads import fitting_heads
from sizer.architecture.huggingface import huggingface_blueprint, read_architecture

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
PARTS = {
    "blt_global_transformer": {**SIZES, **HEADS},
    "bridgetower_vision_model": {**SIZES, "hidden_size": 64, "patch_size": 16, "image_size": 32},
    "dia_decoder": {**SIZES, **HEADS, "cross_num_attention_heads": 2, "cross_head_dim": 8, "cross_num_key_value_heads": 2,
                    "cross_hidden_size": 16},
    "idefics2_perceiver": {"hidden_size": 16, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
                           "resampler_head_dim": 8, "num_key_value_heads": 2},
    "kosmos_2_5_vision_model": {**SIZES, "num_attention_heads": 2, "head_dim": 8, "patch_embed_hidden_size": 16},
    "moshi_depth": {**HEADS, "vocab_size": 100, "hidden_size": 16, "input_size": 24, "num_hidden_layers": 1,
                    "audio_vocab_size": 50, "ffn_dim": 48},
    "qwen3_omni_moe_talker_code_predictor": {**SIZES, **HEADS, "vocab_size": 100, "num_code_groups": 4,
                                             "layer_types": ["full_attention"], "max_window_layers": 1},
    "sam3_detr_decoder": {"hidden_size": 16, "num_layers": 1, "num_queries": 4, "num_attention_heads": 2, "intermediate_size": 24},
    "sam3_detr_encoder": {"hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "intermediate_size": 24},
    "sam3_mask_decoder": {"hidden_size": 16, "num_upsampling_stages": 2, "num_attention_heads": 2},
}  # fmt: skip

# transformers 5.17 keeps the classes of some of them to itself, 5.23 does not.
RUNNABLE = [model_type for model_type in PARTS if fitting_heads(read_architecture({"model_type": model_type}))]


def test_most_parts_have_a_class_of_their_own() -> None:
    assert len(RUNNABLE) >= 6


@pytest.mark.parametrize("model_type", RUNNABLE)
def test_a_part_takes_what_it_is_given(model_type: str) -> None:
    blueprint = huggingface_blueprint({"model_type": model_type, **PARTS[model_type]}, name=model_type)
    torch.manual_seed(0)
    module = blueprint.build().train()
    loss = blueprint.loss(module, blueprint.example(1, True))
    loss.backward()
    assert any(parameter.grad is not None for parameter in module.parameters())
    with torch.no_grad():
        blueprint.predict(module.eval(), blueprint.example(2, False))

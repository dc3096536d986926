"""Models without a step, or without one that trains them: what they say instead, and what can be run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from sizer.architecture.blueprint import no_gradient
from sizer.architecture.heads import choose_part, no_training, parts_of
from sizer.architecture.huggingface import huggingface_blueprint, read_architecture
from sizer.base.errors import ConfigError, RequestError, TraceError
from tests.architecture.rare_configs import RARE, ROPE, TEXT


def blueprint(model_type: str, **options):
    return huggingface_blueprint({"model_type": model_type, **RARE.get(model_type, {})}, name=model_type, **options)


def test_a_model_without_a_forward_is_counted_and_names_the_heads_of_its_parts():
    plan = blueprint("bark")
    with torch.device("meta"):
        assert sum(p.numel() for p in plan.build().parameters()) > 10**4
    parts = "head=BarkSemanticModel or BarkCoarseModel or BarkFineModel or EncodecModel"
    with pytest.raises(TraceError, match=f"^BarkModel has no forward; estimate one of its parts: {parts}$"):
        plan.example(1, True)


@pytest.mark.parametrize("head", ["BarkSemanticModel", "BarkFineModel"])
def test_a_part_of_it_can_be_asked_for_and_trained(head):
    plan = blueprint("bark", head=head)
    assert (plan.class_name, plan.sequence_length) == (head, 64)
    plan.loss(plan.build().train(), plan.example(2, True)).backward()


def test_heads_of_parts_are_allowed_only_where_nothing_else_runs():
    llava = AutoConfig.for_model("llava")
    assert parts_of(llava) == []
    assert choose_part(llava, "CLIPVisionModel") is llava
    with pytest.raises(RequestError, match=r"allowed .*BarkCoarseModel, .*BarkModel, BarkSemanticModel"):
        blueprint("bark", head="BarkWholeModel")


def test_a_codec_that_others_call_says_how():
    with pytest.raises(
        TraceError, match="ChameleonVQVAE has no forward: other models call its encode; estimate the model"
    ):
        huggingface_blueprint({"model_type": "chameleon_vqgan"}, name="x").example(1, True)


def test_a_forward_under_inference_mode_trains_nothing_but_can_be_run():
    plan = blueprint("sam2_video")
    with pytest.raises(
        TraceError, match=r"Sam2VideoModel runs under torch\.inference_mode, so it cannot be trained; mode="
    ):
        plan.example(2, True)
    assert plan.example(2, False).kwargs["frames"].shape == (2, 3, 128, 128)


def test_a_forward_with_gradients_trains():
    from transformers import BertModel, RobertaModel

    assert no_training(BertModel) is None
    assert no_training(RobertaModel) is None


def test_frozen_weights_are_told_from_outputs_without_a_gradient():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert no_gradient(frozen).startswith("all weights of Linear are frozen")
    assert no_gradient(nn.Linear(2, 2)).startswith("the outputs of Linear have no tensor with a gradient")


def test_a_model_that_finds_its_own_work_says_what_to_estimate_instead():
    with pytest.raises(
        TraceError, match="as many objects as it finds in a video, which depends on real images and weights"
    ):
        huggingface_blueprint({"model_type": "sam3_video"}, name="x").example(1, False)


def test_a_model_that_takes_one_sample_at_a_time_says_so():
    plan = blueprint("tvp", sequence_length=16)
    with pytest.raises(TraceError, match="TvpForVideoGrounding fails on more than one sample"):
        plan.example(2, True)
    plan.loss(plan.build().train(), plan.example(1, True)).backward()


def test_an_encoder_of_another_width_than_the_text_is_named():
    text = {**TEXT, "rope_parameters": ROPE}
    vision = {"depth": 1, "embed_dim": 32, "num_heads": 4, "hidden_size": 64, "patch_size": 14}
    parts = {"text_config": text, "vision_config": vision}
    tokens = {"image_token_id": 100, "vision_start_token_id": 102}
    plan = huggingface_blueprint({"model_type": "qwen2_vl", **parts, **tokens}, name="x")
    with pytest.raises(
        TraceError, match="the encoder of images in this config yields features of another width than its text"
    ):
        plan.loss(plan.build().train(), plan.example(1, True))


def test_a_config_that_transformers_refuses_is_told_with_the_key_and_the_reason():
    with pytest.raises(ConfigError, match=r"'hidden_size': .*expected int, got str"):
        read_architecture({"model_type": "llama", "hidden_size": "big"})

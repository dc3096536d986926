"""Models whose inputs are unlike others': tiny ones run a real step on the inputs that are made for them."""

from __future__ import annotations

import pytest
import torch

from sizer.architecture.huggingface import huggingface_blueprint
from tests.architecture.oldest import needs_sam2_video
from tests.architecture.rare_configs import RARE

LENGTHS = {"blt": 16, "esmfold2": 8, "moonshine": 16, "granitemoehybrid": 16, "voxtral_realtime": 16, "vits": 16}
# BLT's config lacks a field that transformers' cache reads, a Granite of Mamba layers alone has nothing to count its tokens by.
WITHOUT_CACHE = {"blt", "granitemoehybrid"}


def plan(model_type: str, **options):
    config = {"model_type": model_type, **RARE[model_type]}
    return huggingface_blueprint(config, name=model_type, sequence_length=LENGTHS.get(model_type), **options)


@pytest.mark.parametrize("model_type", sorted(RARE.keys() - {"bark", "sam2_video", "tvp"}))
def test_a_step_runs_for_real(model_type):
    blueprint = plan(model_type)
    torch.manual_seed(0)
    module = blueprint.build().train()
    blueprint.loss(module, blueprint.example(2, True)).backward()
    assert any(parameter.grad is not None for parameter in module.parameters())
    if model_type not in WITHOUT_CACHE:
        with torch.no_grad():
            blueprint.predict(module.eval(), blueprint.example(2, False))


@needs_sam2_video
def test_objects_are_followed_from_frame_to_frame():
    blueprint = plan("sam2_video")
    with torch.no_grad():
        output = blueprint.predict(blueprint.build().eval(), blueprint.example(3, False))
    assert output.frame_idx == 1  # the second of two frames
    assert output.pred_masks.shape[0] == 3  # an object for every sample of the batch


def test_a_protein_is_made_of_its_residues_atoms():
    inputs = plan("esmfold2").example(2, False).kwargs
    # ACDEFGHI: 5 + 6 + 8 + 9 + 11 + 4 + 10 + 8 = 61 heavy atoms, padded to 64
    assert inputs["ref_pos"].shape == (2, 64, 3)
    assert inputs["atom_attention_mask"].sum(dim=-1).tolist() == [61, 61]
    assert inputs["input_ids"].shape == (2, 8)


def test_a_transducer_reads_the_blank_and_its_transcript():
    blueprint = plan("parakeet_tdt")
    inputs = blueprint.example(2, True).kwargs
    # 1000 mel frames / 32 = 31 word pieces, the blank (19) before them; the encoder halves the frames three times
    assert inputs["labels"].shape == (2, 31)
    assert inputs["decoder_input_ids"].tolist() == [[19, *row] for row in inputs["labels"].tolist()]
    assert blueprint.example(2, False).kwargs["decoder_input_ids"].tolist() == [[19], [19]]
    assert blueprint.sequence_length == 1000  # of mel frames


def test_sound_is_added_to_every_word():
    # each word stands for 2 * 4 mel frames: a convolution of stride 2, four steps joined
    assert plan("voxtral_realtime").example(1, True).kwargs["input_features"].shape == (1, 16, 16 * 8)


def test_a_picture_to_draw_has_a_grid_of_its_own():
    inputs = plan("glm_image").example(2, False).kwargs
    # 448 / 16 = 28 patches a side in the picture to start from; 1152 / 32 = 36 and 768 / 32 = 24 in the one to draw
    assert inputs["image_grid_thw"].tolist() == [[1, 28, 28], [1, 36, 24]] * 2
    assert inputs["images_per_sample"].tolist() == [2, 2]
    assert inputs["pixel_values"].shape == (2 * 28 * 28, 3 * 16 * 16)
    ids = inputs["input_ids"][0]
    assert (ids == 100).sum() == 28 * 28
    assert (ids[0], ids[1 + 28 * 28]) == (60, 61)


def test_training_switches_the_cache_off_where_the_inner_model_takes_the_switch():
    assert plan("granitemoehybrid").example(2, True).kwargs["use_cache"] is False
    assert "use_cache" not in plan("granitemoehybrid").example(2, False).kwargs

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from sizer.architecture.examples.example_spec import (
    ExampleSpec,
    floats,
    forward_parameters,
    integers,
    read,
    special_tokens,
    text_config,
    words,
)
from sizer.architecture.greedy_generation import is_text
from sizer.architecture.heads import choose_head
from sizer.architecture.huggingface import huggingface_blueprint
from sizer.architecture.sizes import (
    config_image,
    has_position_table,
    line_of_text,
    position_limit,
    resized,
    usual_image,
    usual_length,
)
from sizer.base.errors import RequestError
from tests.architecture.oldest import has_model
from tests.architecture.rare_configs import RARE
from tests.architecture.tiny_configs import BERT, LLAMA, TINY, VISION


def inputs(config: dict, *, batch: int = 2, training: bool = True, **options) -> dict:
    return huggingface_blueprint(config, name="x", **options).example(batch, training).kwargs


# ---- tensors --------------------------------------------------------------------------------------------------------


def test_floats_repeat_one_sample():
    made = floats(3, 2, 4)
    assert made.shape == (3, 2, 4)
    assert torch.equal(made[0], made[2])
    assert 0 <= made.min() < made.max() < 1


def test_integers_stay_below_their_bound():
    assert integers(5, 4, 100).unique().tolist() == [0, 1, 2, 3, 4]
    assert integers(0, 2).tolist() == [0, 0]  # nothing to choose from: the only class there is


def test_words_are_none_of_the_special_tokens():
    assert words(6, frozenset({2, 5, 99, -1}), 2, 50).unique().tolist() == [1, 3, 4], "0 may be what pads"
    assert words(2, frozenset({0, 1}), 1, 20).unique().tolist() == [0, 1]  # all are special: then any


def test_special_tokens_are_found_by_their_names():
    config = AutoConfig.for_model("llava", image_token_index=77)
    config.eos_token_id = [5, 6]
    assert {77, 5, 6} <= special_tokens(config)


def test_dotted_paths_are_read_through_nested_configs():
    config = AutoConfig.for_model("clip", vision_config={"image_size": 48})
    assert read(config, "no_such", "vision_config.no_such", "vision_config.image_size") == 48
    assert read(config, "no_such", default=1) == 1


def test_the_forward_of_a_class_is_read_through_its_decorators():
    cls, _ = choose_head(AutoConfig.for_model("llama"), None)
    assert {"input_ids", "labels", "use_cache"} <= set(forward_parameters(cls))
    assert "self" not in forward_parameters(cls)


def test_the_text_of_a_model_with_two_decoders_is_the_one_that_reads():
    parts = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {}}
    assert text_config(AutoConfig.for_model("musicgen", **parts)).model_type == "t5"


# ---- text -----------------------------------------------------------------------------------------------------------


def test_a_decoder_gets_packed_tokens_without_a_mask():
    made = inputs(LLAMA)
    assert made.keys() == {"input_ids", "labels", "use_cache"}
    assert torch.equal(made["labels"], made["input_ids"])
    assert not {1, 2} & set(made["input_ids"].flatten().tolist())  # begin and end of LLaMA's vocabulary


def test_an_encoder_gets_what_its_tokenizer_returns():
    made = inputs({**BERT, "pad_token_id": 0, "eos_token_id": 5})
    assert made.keys() == {"input_ids", "attention_mask", "labels"}
    assert made["attention_mask"].min() == 1
    assert made["input_ids"][:, -1].tolist() == [5, 5]
    assert 0 not in made["input_ids"]


def test_every_seventh_token_is_hidden_from_a_masked_language_model():
    made = inputs(BERT)
    shown = made["labels"] != -100
    assert shown.sum().item() == 2 * 10  # positions 0, 7, ..., 63 of 64 tokens
    assert torch.equal(made["labels"][shown], made["input_ids"][shown])


def test_an_encoder_decoder_shifts_its_labels_itself():
    assert inputs(TINY["bart"]).keys() == {"input_ids", "attention_mask", "labels", "use_cache"}
    assert inputs(TINY["bart"], training=False).keys() == {"input_ids", "attention_mask", "decoder_input_ids"}


def test_an_encoder_decoder_that_cannot_shift_is_given_both():
    made = inputs({**TINY["t5"], "decoder_start_token_id": None}, sequence_length=8)
    assert made["decoder_input_ids"].shape == made["labels"].shape == (2, 8)


def test_a_multiple_choice_head_gets_four_texts_per_question():
    made = inputs(BERT, head="BertForMultipleChoice", sequence_length=8)
    assert made["input_ids"].shape == made["attention_mask"].shape == (2, 4, 8)
    assert made["labels"].shape == (2,)


def test_a_question_has_a_start_and_an_end():
    made = inputs(BERT, head="BertForQuestionAnswering", sequence_length=8)
    assert made["start_positions"].shape == made["end_positions"].shape == (2,)
    assert 1 <= made["start_positions"].min() <= made["end_positions"].max() < 8


def test_a_decoder_that_classifies_is_given_a_padding_token():
    blueprint = huggingface_blueprint(LLAMA, name="x", head="LlamaForSequenceClassification")
    assert any("names no padding token; LlamaForSequenceClassification needs one, and 2" in n for n in blueprint.notes)
    with torch.device("meta"):
        assert blueprint.build().config.pad_token_id == 2
    assert 2 not in blueprint.example(2, True).kwargs["input_ids"]


# ---- pictures and sound ---------------------------------------------------------------------------------------------


def test_a_detector_is_given_objects_with_boxes_inside_the_picture():
    config = {"model_type": "yolos", **VISION, "image_size": [32, 48], "num_detection_tokens": 4, "num_labels": 3}
    made = inputs(config)
    assert made["pixel_values"].shape == (2, 3, 32, 48)
    assert [set(target) for target in made["labels"]] == [{"class_labels", "boxes"}] * 2
    boxes = made["labels"][0]["boxes"]
    assert boxes.shape == (5, 4)
    assert (boxes[:, :2] - boxes[:, 2:] / 2).min() >= 0
    assert (boxes[:, :2] + boxes[:, 2:] / 2).max() <= 1
    assert made["labels"][0]["class_labels"].max() < 3


def test_a_segmenter_is_given_masks_that_cover_the_picture():
    config = AutoConfig.for_model("mask2former")
    cls, _ = choose_head(config, None)
    setting = ExampleSpec(config=config, cls=cls, batch=2, training=True, length=None, image_size=(20, 30))
    from sizer.architecture.examples.prompts import segments

    made = segments(setting)
    assert [mask.shape for mask in made["mask_labels"]] == [(5, 20, 30)] * 2
    assert made["mask_labels"][0].sum(dim=0).unique().tolist() == [1]  # each pixel in one mask


@pytest.mark.parametrize(
    ("family", "options", "count"),
    [
        ("step3p7", {}, 4),  # 112 / 14 = 8 patches a side, folded by 2 and by 2: 2 * 2
        ("llava", {}, 16),  # 32 / 8 = 4 patches a side: 4 * 4, the class token left out
        ("qwen2_vl", {}, 256),  # 448 / 14 = 32 patches a side, 2 x 2 merged: 16 * 16
        ("qwen2_vl", {"image_size": (56, 112)}, 8),  # 4 x 8 patches: 2 * 4
        ("idefics3", {}, 4),  # 4 x 4 patches, 2 x 2 folded into one: 2 * 2
    ],
)
def test_a_picture_has_as_many_placeholders_as_the_encoder_yields_features(family, options, count):
    config = TINY.get(family) or {"model_type": family, **RARE[family]}
    made = inputs(config, **options)
    token = config.get("image_token_id", config.get("image_token_index"))
    assert (made["input_ids"] == token).sum(dim=-1).tolist() == [count, count]
    assert made["attention_mask"].min() == 1


@pytest.mark.parametrize(
    ("model_type", "count"),
    [
        # 3000 mel frames -> (3000 - 1) // 2 + 1 = 1500 by the strided convolution -> (1500 - 2) // 2 + 1 = 750 by pooling
        ("qwen2_audio", 750),
        ("audioflamingo3", 750),
        # 1500, of which four become one
        ("glmasr", 375),
        # 1000 mel frames in 10 chunks of 100 -> 50 -> 25 -> 13 each
        ("qwen3_asr", 130),
    ],
)
def test_a_sound_has_as_many_placeholders_as_the_encoder_yields_features(model_type, count):
    blueprint = huggingface_blueprint({"model_type": model_type}, name="x")
    token = read(AutoConfig.for_model(model_type), "audio_token_id", "audio_token_index")
    made = blueprint.example(1, False).kwargs
    assert (made["input_ids"] == token).sum().item() == count
    assert any(f"holds one audio clip ({count} of them)" in note for note in blueprint.notes)


def test_a_text_grows_to_hold_its_picture():
    # LLaMA's 2048 tokens hold 24 x 24 = 576 placeholders; a 64-token one is made 16 + 256 tokens long
    assert huggingface_blueprint({"model_type": "llava"}, name="x").sequence_length == 2048
    assert huggingface_blueprint(TINY["llava"], name="x").sequence_length == 272


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "idefics3"])
def test_a_model_that_reads_images_can_be_given_text_alone(family):
    blueprint = huggingface_blueprint(TINY[family], name=family, sequence_length=8, text_alone=True)
    inputs = blueprint.example(2, False).kwargs
    assert is_text(blueprint.example(2, False))
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (2, 8)
    assert blueprint.text_example is None
    assert "The texts contain no image." in blueprint.notes
    beside = huggingface_blueprint(TINY[family], name=family).text_example(1, False)
    assert is_text(beside) and beside.kwargs["input_ids"].shape[1] > 8


@pytest.mark.parametrize("family", ["llama", "clip", "vit", "t5"])
def test_a_model_without_images_in_its_text_is_refused_text_alone(family):
    with pytest.raises(RequestError, match=r"^inputs: .* reads no images or sound within its text"):
        huggingface_blueprint(TINY[family], name=family, text_alone=True)


def test_whisper_reads_thirty_seconds_and_writes_as_many_tokens_as_it_has_positions():
    made = inputs({"model_type": "whisper"}, batch=1)
    assert made["input_features"].shape == (1, 80, 3000)  # 1500 positions after a convolution of stride 2
    assert made["labels"].shape == (1, 448)


def test_a_transcript_is_shorter_than_the_encoders_output():
    made = inputs({"model_type": "wav2vec2"}, batch=1)
    # 10 s at 16 kHz = 160,000 samples; 12.5 letters a second; the encoder yields 499 frames
    assert made["input_values"].shape == (1, 160_000)
    assert made["labels"].shape == (1, 125)
    assert made["labels"].min() > 0  # 0 is CTC's blank


def test_only_wav2vec2_with_layer_norms_gets_a_mask():
    assert "attention_mask" not in inputs(TINY["wav2vec2"], sequence_length=1600)
    assert "attention_mask" in inputs({**TINY["wav2vec2"], "feat_extract_norm": "layer"}, sequence_length=1600)


def test_contrastive_models_return_their_loss_when_told_to():
    assert inputs(TINY["clip"])["return_loss"] is True
    assert "return_loss" not in inputs(TINY["clip"], training=False)


# ---- sizes ----------------------------------------------------------------------------------------------------------


def length_of(model_type: str, **fields) -> int | None:
    config = AutoConfig.for_model(model_type, **fields)
    return usual_length(config, choose_head(config, None)[0])


@pytest.mark.parametrize(
    ("model_type", "length"),
    [
        ("llama", 2048),
        ("gpt2", 1024),  # its positions
        ("bert", 512),
        ("roberta", 510),  # 512 positions, the first pad + 1 = 2 never used
        ("modernbert", 512),
        ("t5", 1024),
        ("bart", 1024),
        ("big_bird", 4096),
        ("clip", 77),
        ("prophetnet", 510),  # 512 positions, pad + 1 = 1 never used, one looked ahead
        ("whisper", 448),
        ("mamba", 64),
        ("wav2vec2", 160_000),
        ("wav2vec2-bert", 1000),
        ("parakeet_rnnt", 1000),  # mel frames: its decoder reads their transcript
        ("vits", 64),
        ("vit", None),
    ],
)
def test_the_usual_length(model_type, length):
    assert length_of(model_type) == length


def test_a_decoder_with_fewer_positions_is_shorter():
    assert length_of("llama", max_position_embeddings=100) == 100


@pytest.mark.parametrize(
    ("model_type", "bounded"),
    [("gpt2", True), ("bert", True), ("opt", True), ("gptj", True), ("llama", False), ("t5", False), ("bloom", True),
     ("deberta-v2", True), ("mpnet", True), ("xlnet", False), ("jamba", False)],
)  # fmt: skip
def test_which_positions_are_a_table(model_type, bounded):
    assert has_position_table(AutoConfig.for_model(model_type)) is bounded


def test_a_config_without_a_limit_has_none():
    assert position_limit(AutoConfig.for_model("bloom")) is None
    assert position_limit(AutoConfig.for_model("xlnet")) is None  # it says -1


@pytest.mark.parametrize(
    ("model_type", "size"),
    [("vit", (224, 224)), ("resnet", (224, 224)), ("yolos", (512, 864)), ("detr", (800, 1066)), ("segformer", (512, 512)),
     ("sam", (1024, 1024)), ("qwen2_vl", (448, 448)), ("llava", (336, 336)), ("tvp", (448, 448)),
     ("sam2_video", (1024, 1024)), ("deepseek_ocr2_vision", (1024, 1024)), ("bert", None)],
)  # fmt: skip
def test_the_usual_image(model_type, size):
    if not has_model(model_type):
        pytest.skip(f"this transformers has no model class for {model_type}")
    config = AutoConfig.for_model(model_type)
    assert usual_image(config, choose_head(config, None)[0]) == size


def test_a_line_of_text_is_as_high_as_its_backbone_folds_to_three_rows():
    size = lambda **fields: line_of_text(AutoConfig.for_model("pp_ocrv5_mobile_rec", **fields))  # noqa: E731
    # the default halves the height in its stem and in four stages: 3 * 2 ** 5 rows
    assert size() == (96, 320)
    # the published one keeps it in the first of these, halves the width alone in another, and the height once more in the last
    block = lambda wide, stride: [3, wide, wide, stride, False]  # noqa: E731
    stages = [
        [block(16, 1)],
        [block(16, 1)],
        [block(16, [2, 1])],
        [block(16, [1, 2])],
        [block(16, [2, 1]), block(16, [2, 1])],
    ]
    backbone = {"model_type": "pp_lcnet_v3", "block_configs": stages, "stem_stride": 2}
    assert size(backbone_config=backbone) == (48, 320)  # 3 * 2 * 2 * 2 * 2
    assert line_of_text(AutoConfig.for_model("pp_ocrv5_server_rec")) is None


def test_a_config_is_copied_before_its_image_size_changes():
    config = AutoConfig.for_model("clip")
    assert config_image(resized(config, (64, 64))) == (64, 64)
    assert config_image(config) == (224, 224)


def test_a_model_without_interpolation_is_built_for_the_size_asked_for():
    blueprint = huggingface_blueprint(TINY["sam"], name="sam", image_size=(128, 128))
    assert any("Built for 128x128 pixels instead of 64x64." in note for note in blueprint.notes)

"""Tokens that a config leaves out: which id stands in for them, and that a note says so."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from sizer.architecture.heads import choose_head
from sizer.architecture.huggingface import huggingface_blueprint
from sizer.architecture.special_tokens import with_special_tokens
from tests.architecture.rare_configs import RARE
from tests.architecture.tiny_configs import LLAMA, TINY


def completed(model_type: str, head: str | None = None, **fields: object):
    config = AutoConfig.for_model(model_type, **fields)
    return with_special_tokens(config, choose_head(config, head)[0])


def test_a_placeholder_is_the_last_word_without_another_meaning():
    config, notes = completed("voxtral", text_config={"vocab_size": 64, "eos_token_id": 63, "pad_token_id": 62})
    assert config.audio_token_id == 61
    assert notes == ("The config names no audio_token_id; 61, the last word without another meaning, was taken.",)


def test_the_video_of_a_model_that_reads_nothing_else_gets_the_placeholder():
    config, _ = completed("instructblipvideo")
    # OPT's vocabulary has 50,272 words; the last is none of its special ones
    assert config.video_token_index == 50_271


def test_the_model_is_built_and_fed_with_the_token_that_was_taken():
    blueprint = huggingface_blueprint({"model_type": "blip-2", **RARE["blip-2"]}, name="x")
    with torch.device("meta"):
        token = blueprint.build().config.image_token_id
    assert token == 127
    assert (blueprint.example(1, False).kwargs["input_ids"] == token).sum().item() == 4  # one for each of its queries


def test_an_id_that_the_code_reads_and_the_config_lacks_is_added():
    config, notes = completed("qwen2_5_omni_thinker")
    assert config.vision_start_token_id == config.text_config.vocab_size - 1
    assert [note.partition(";")[0] for note in notes] == ["The config names no vision_start_token_id"]


def test_an_encoder_decoder_shifts_its_labels_with_a_padding_token():
    config, notes = completed("moonshine")
    assert config.pad_token_id == 2  # the end of a text
    assert "names no padding token; MoonshineForConditionalGeneration needs one, and 2 was taken" in notes[0]


@pytest.mark.parametrize("family", ["llama", "llava", "qwen2_vl", "bart", "whisper", "bert"])
def test_a_config_that_names_its_tokens_is_left_alone(family):
    fields = {name: value for name, value in TINY[family].items() if name != "model_type"}
    config = AutoConfig.for_model(family, **fields)
    assert with_special_tokens(config, choose_head(config, None)[0]) == (config, ())


def test_the_config_that_was_given_is_not_changed():
    config = AutoConfig.for_model("llama", **{k: v for k, v in LLAMA.items() if k != "model_type"})
    made, _ = with_special_tokens(config, choose_head(config, "LlamaForSequenceClassification")[0])
    assert (config.pad_token_id, made.pad_token_id) == (None, 2)

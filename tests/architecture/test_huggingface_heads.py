from __future__ import annotations

import pytest
from transformers import AutoConfig

from sizer.architecture.heads import choose_head, fitting_heads, has_no_forward
from sizer.architecture.huggingface import huggingface_blueprint
from sizer.base.errors import BuildError, RequestError


def usual(model_type: str, **fields) -> str:
    cls, _ = choose_head(AutoConfig.for_model(model_type, **fields), None)
    return cls.__name__


@pytest.mark.parametrize(
    ("model_type", "head"),
    {
        "llama": "LlamaForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "bert": "BertForMaskedLM",
        "roberta": "RobertaForMaskedLM",
        "t5": "T5ForConditionalGeneration",
        "bart": "BartForConditionalGeneration",
        "whisper": "WhisperForConditionalGeneration",
        "wav2vec2": "Wav2Vec2ForCTC",
        "vit": "ViTForImageClassification",
        "clip": "CLIPModel",
        "llava": "LlavaForConditionalGeneration",
        "qwen2_vl": "Qwen2VLForConditionalGeneration",
        "qwen2_vl_text": "Qwen2VLTextModel",
        "detr": "DetrForObjectDetection",
        "dpt": "DPTForDepthEstimation",
        "mask2former": "Mask2FormerForUniversalSegmentation",
        "videomae": "VideoMAEForVideoClassification",
        "sam": "SamModel",
        "time_series_transformer": "TimeSeriesTransformerForPrediction",
        "clip_vision_model": "CLIPVisionModel",
    }.items(),
)
def test_the_usual_head_of_a_type(model_type, head):
    assert usual(model_type) == head


def test_a_decoder_is_not_a_masked_language_model():
    assert usual("bert", is_decoder=True) == "BertLMHeadModel"


def test_a_type_without_classes_of_its_own_is_built_by_those_of_another():
    assert usual("glmga") == "Glm46VForConditionalGeneration"


def test_a_part_is_built_by_the_class_that_its_package_keeps_to_itself():
    assert usual("qwen2_vl_vision") == "Qwen2VisionTransformerPretrainedModel"


def test_the_heads_that_fit():
    heads = fitting_heads(AutoConfig.for_model("vit"))
    assert {"ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling"} <= heads.keys()
    assert not any(name.endswith("PreTrainedModel") for name in heads)
    assert all(cls.config_class.model_type == "vit" for cls in heads.values())


def test_the_head_asked_for_wins():
    config = AutoConfig.for_model("bert", architectures=["BertForMaskedLM"])
    cls, notes = choose_head(config, "BertForSequenceClassification")
    assert (cls.__name__, notes) == ("BertForSequenceClassification", ())


@pytest.mark.parametrize(
    ("head", "cls"),
    [
        ("AutoModelForSequenceClassification", "BertForSequenceClassification"),
        ("AutoModelForCausalLM", "BertLMHeadModel"),
        ("AutoModel", "BertModel"),
    ],
)
def test_an_auto_class_is_the_class_of_its_type(head, cls):
    assert choose_head(AutoConfig.for_model("bert"), head)[0].__name__ == cls


def test_an_auto_class_without_one_for_the_type_is_refused():
    with pytest.raises(RequestError, match="head does not fit a bert config"):
        choose_head(AutoConfig.for_model("bert"), "AutoModelForCTC")


def test_the_configs_own_architecture_comes_next():
    config = AutoConfig.for_model("bert", architectures=["BertForTokenClassification"])
    cls, notes = choose_head(config, None)
    assert (cls.__name__, notes) == ("BertForTokenClassification", ())


def test_a_missing_architecture_is_noted():
    _, notes = choose_head(AutoConfig.for_model("llama"), None)
    assert notes == ("The config names no architecture; LlamaForCausalLM is the usual head of llama.",)


def test_an_architecture_that_does_not_fit_is_noted():
    cls, (note,) = choose_head(AutoConfig.for_model("llama", architectures=["MyOwnLlama"]), None)
    assert cls.__name__ == "LlamaForCausalLM"
    assert note.startswith(
        "The config names 'MyOwnLlama', which this version of transformers does not build from a llama"
    )


@pytest.mark.parametrize("head", ["GPT2LMHeadModel", "os", "__builtins__", "LlamaPreTrainedModel", ""])
def test_a_head_that_does_not_fit_is_refused(head):
    with pytest.raises(RequestError, match=r"head does not fit a llama config: given .*, allowed LlamaForCausalLM, "):
        huggingface_blueprint({"model_type": "llama"}, name="llama", head=head)


def test_a_misspelt_head_is_answered_with_the_nearest():
    with pytest.raises(RequestError, match=r"; did you mean LlamaForCausalLM\?"):
        huggingface_blueprint({"model_type": "llama"}, name="llama", head="LlamaForCasualLM")


def test_a_part_without_a_class_is_refused():
    with pytest.raises(
        BuildError, match=r"transformers has no model class for this type: .*'t5_gemma_module'"
    ):
        choose_head(AutoConfig.for_model("t5_gemma_module"), None)


def test_a_class_that_only_holds_others_has_no_forward():
    assert has_no_forward(fitting_heads(AutoConfig.for_model("bark"))["BarkModel"])
    assert not has_no_forward(fitting_heads(AutoConfig.for_model("bert"))["BertModel"])

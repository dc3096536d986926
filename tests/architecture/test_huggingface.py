from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from sizer.architecture.blueprint import stand_in_loss
from sizer.architecture.heads import fitting_heads
from sizer.architecture.huggingface import NOTE_LIMIT, from_config, huggingface_blueprint, read_architecture
from sizer.base.codec import LIMIT_TEXT
from sizer.base.errors import BuildError, ConfigError, RequestError, TraceError
from sizer.device.trial.trial import one_thread
from sizer.query.request import Request
from tests.architecture.tiny_configs import BERT, LLAMA, TINY

# Lengths that keep a real step on two cores short: tokens, samples of sound. The others run at their usual length.
LENGTHS = {"t5": 32, "mamba": 16, "wav2vec2": 1600, "qwen2_vl": 300}


def tiny(family: str, **options):
    return huggingface_blueprint(TINY[family], name=family, sequence_length=LENGTHS.get(family), **options)


def real(blueprint) -> nn.Module:
    """The blueprint's module with real, initialised weights on the CPU."""
    torch.manual_seed(0)
    return blueprint.build()


# The encoder-decoder class says at every loss that it computes it itself since 4.12.
@pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces:FutureWarning")
@pytest.mark.parametrize("family", TINY)
def test_a_step_runs_for_real(family):
    blueprint = tiny(family)
    with one_thread():
        module = real(blueprint)
        loss = blueprint.loss(module.train(), blueprint.example(2, True))
        loss.backward()
        with torch.no_grad():
            output = blueprint.predict(module.eval(), blueprint.example(2, False))
    assert loss.shape == ()
    assert loss.isfinite()
    assert sum(p.grad is not None for p in module.parameters()) > 0.5 * len(list(module.parameters()))
    assert output is not None
    assert type(module).__name__ == blueprint.class_name
    assert {p.dtype for p in module.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces:FutureWarning")
@pytest.mark.parametrize("family", TINY)
def test_every_head_of_a_family_is_trained_for_real(family):
    with one_thread():
        for head in fitting_heads(read_architecture(TINY[family])):
            blueprint = tiny(family, head=head)
            loss = blueprint.loss(real(blueprint).train(), blueprint.example(2, True))
            loss.backward()
            assert loss.shape == (), head
            assert loss.isfinite(), head


@pytest.mark.parametrize("family", TINY)
def test_it_builds_on_meta_without_touching_memory(family):
    blueprint = tiny(family)
    with torch.device("meta"):
        module = blueprint.build()
    # wav2vec2's mask embedding is a torch.FloatTensor(...), which ignores the device: 32 real numbers, named by the census
    real_ones = [name for name, p in module.named_parameters() if p.device.type != "meta"]
    assert real_ones == (["wav2vec2.masked_spec_embed"] if family == "wav2vec2" else [])


def test_tied_weights_stay_tied_on_meta():
    with torch.device("meta"):
        module = tiny("bert").build()
    assert module.cls.predictions.decoder.weight is module.bert.embeddings.word_embeddings.weight


def test_each_build_is_a_module_of_its_own():
    blueprint = tiny("gpt2")
    with torch.device("meta"):
        assert blueprint.build() is not blueprint.build()


@pytest.mark.parametrize("family", TINY)
def test_examples_are_the_same_at_every_call(family):
    blueprint = tiny(family)
    first, second = (flatten(blueprint.example(2, True).kwargs) for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {tensor.device.type for tensor in first.values()} == {"cpu"}
    assert {t.dtype for t in first.values() if t.is_floating_point()} <= {torch.float32}


def flatten(value, path="") -> dict[str, torch.Tensor]:
    """The tensors of nested lists and dicts by their path."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {name: tensor for key, item in items for name, tensor in flatten(item, f"{path}.{key}").items()}


@pytest.mark.parametrize("family", sorted(set(TINY) - {"qwen2_vl"}))
def test_the_batch_is_the_leading_size(family):
    tensors = flatten(tiny(family).example(3, True).kwargs)
    assert {tensor.shape[0] for tensor in tensors.values()} == {3}


def test_qwen_packs_the_patches_of_all_pictures():
    # 448 pixels / 14 per patch = 32 x 32 patches a picture, each a row of 3 channels * 2 frames * 14 * 14 = 1176 values
    kwargs = tiny("qwen2_vl").example(3, True).kwargs
    assert kwargs["pixel_values"].shape == (3 * 32 * 32, 1176)
    assert kwargs["image_grid_thw"].tolist() == [[1, 32, 32]] * 3


def test_training_uses_no_cache_and_inference_the_models_default():
    blueprint = tiny("llama")
    assert blueprint.example(2, True).kwargs["use_cache"] is False
    assert "use_cache" not in blueprint.example(2, False).kwargs
    assert "labels" not in blueprint.example(2, False).kwargs
    with torch.no_grad():
        output = blueprint.predict(real(blueprint).eval(), blueprint.example(2, False))
    assert output.past_key_values.get_seq_length() == 64


def test_the_loss_is_the_models_own():
    blueprint = tiny("gpt2")
    module, example = real(blueprint).eval(), blueprint.example(2, True)
    shifted = module(example.kwargs["input_ids"]).logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(shifted, example.kwargs["input_ids"][:, 1:].flatten())
    assert blueprint.loss(module, example).item() == pytest.approx(expected.item(), rel=1e-5)
    assert not any("loss" in note for note in blueprint.notes)


def test_a_base_model_is_trained_on_the_means_of_its_outputs():
    blueprint = huggingface_blueprint(BERT, name="bert", head="BertModel")
    module, example = real(blueprint).eval(), blueprint.example(2, True)
    output = module(**example.kwargs)
    expected = output.last_hidden_state.mean() + output.pooler_output.mean()
    assert blueprint.loss(module, example).item() == pytest.approx(expected.item(), abs=1e-6)
    assert any("BertModel has no loss;" in note for note in blueprint.notes)


def test_a_head_that_refuses_labels_gets_none():
    # DPTForDepthEstimation raises NotImplementedError("Training is not implemented yet") when it is given labels.
    config = {"model_type": "dpt", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32,
              "intermediate_size": 48, "patch_size": 16, "is_hybrid": False, "backbone_out_indices": [0, 1, 2, 3],
              "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8}  # fmt: skip
    blueprint = huggingface_blueprint(config, name="dpt")
    assert "labels" not in blueprint.example(2, True).kwargs
    assert blueprint.loss(real(blueprint).train(), blueprint.example(2, True)).requires_grad
    assert any("DPTForDepthEstimation has no loss;" in note for note in blueprint.notes)


def test_outputs_without_a_gradient_cannot_be_trained_on():
    with pytest.raises(TraceError, match="the outputs of Linear have no tensor with a gradient"):
        stand_in_loss({"codes": torch.zeros(3)}, nn.Linear(1, 1))


def test_checkpointing_is_the_models_own_switch():
    blueprint = tiny("llama")
    with torch.device("meta"):
        module = blueprint.build()
    assert not module.model.layers[0].gradient_checkpointing
    blueprint.checkpoint(module)
    assert module.model.layers[0].gradient_checkpointing


def test_checkpointing_is_none_where_the_class_has_no_switch():
    with torch.device("meta"):
        assert not tiny("decision_transformer").build().supports_gradient_checkpointing
    assert tiny("decision_transformer").checkpoint is None


def test_a_class_that_promises_checkpointing_without_a_layer_for_it_says_so():
    class Promising(nn.Module):
        def activation_checkpointing_enable(self):
            raise ValueError("Promising is not compatible with gradient checkpointing.")

    with pytest.raises(BuildError, match="Promising has no layer that can be checkpointed; leave checkpointing off"):
        tiny("llama").checkpoint(Promising())


@pytest.mark.parametrize(("asked", "used"), [("sdpa", "sdpa"), ("eager", "eager")])
def test_attention_is_what_was_asked_for(asked, used):
    with torch.device("meta"):
        module = tiny("llama", attention=asked).build()
    assert module.config._attn_implementation == used


def test_attention_falls_back_with_a_note():
    blueprint = tiny("convbert", attention="sdpa")
    with torch.device("meta"):
        assert blueprint.build().config._attn_implementation == "eager"
    assert "ConvBertForMaskedLM does not support sdpa attention; its own (eager) attention was used." in blueprint.notes
    assert not any("attention" in note for note in tiny("resnet").notes)  # it has none


def test_each_part_takes_the_attention_it_supports():
    with torch.device("meta"):
        module = tiny("llava").build()
    assert {m.config._attn_implementation for m in module.modules() if hasattr(m, "config")} == {"sdpa"}


def test_blueprints_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'name'"):
        tiny("bert").name = "other"


def test_an_unknown_type_is_refused():
    with pytest.raises(ConfigError, match=r"transformers refused this config: .*given model_type 'no_such'"):
        huggingface_blueprint({"model_type": "no_such"}, name="x")


def test_a_refused_value_is_named():
    with pytest.raises(ConfigError, match=r"transformers refused this config: .*hidden_size"):
        huggingface_blueprint({**LLAMA, "hidden_size": "large"}, name="x")


def test_the_reason_for_a_refusal_stands_at_its_end_however_long_the_value():
    with pytest.raises(
        ConfigError, match=r"field 'pad_token_id'.*\.\.\.\] doesn't match any type in .*expected int"
    ) as caught:
        huggingface_blueprint({**LLAMA, "pad_token_id": ["x"] * 500}, name="x")
    assert len(str(caught.value)) < 520


def test_keys_that_were_not_read_are_listed_up_to_a_length_that_an_answer_may_have():
    config = {**BERT, **{f"key_{number:0200}": 1 for number in range(1_000)}}
    note = from_config(Request(source="config", name="x"), config).notes[0]
    assert note.startswith("not read from the config: key_000") and note.endswith(" and 952 more")
    assert len(note) < NOTE_LIMIT + 100 < LIMIT_TEXT


def test_a_build_that_fails_says_so_in_one_short_line():
    blueprint = huggingface_blueprint({**BERT, "hidden_size": 33}, name="x")
    with pytest.raises(
        BuildError, match="BertForMaskedLM could not be built from this config: The hidden size"
    ) as caught:
        blueprint.build()
    assert len(str(caught.value)) < 260
    assert "\n" not in str(caught.value)


# ---- lengths and sizes ----------------------------------------------------------------------------------------------


def test_a_text_longer_than_its_table_of_positions_is_refused():
    with pytest.raises(
        RequestError, match=r"seq: GPT2LMHeadModel has a table of positions: given 65 tokens, allowed 1 to 64"
    ):
        huggingface_blueprint(TINY["gpt2"], name="gpt2", sequence_length=65)
    assert huggingface_blueprint(TINY["gpt2"], name="gpt2", sequence_length=64).sequence_length == 64


def test_rotated_positions_take_any_length_with_a_note():
    blueprint = huggingface_blueprint(LLAMA, name="llama", sequence_length=100)
    assert blueprint.sequence_length == 100
    assert any("100 tokens exceed the 64 positions" in note for note in blueprint.notes)


def test_a_length_for_a_model_without_text_is_refused():
    with pytest.raises(
        RequestError, match="seq: ResNetForImageClassification reads no text and no audio: given 8; leave seq out"
    ):
        huggingface_blueprint(TINY["resnet"], name="resnet", sequence_length=8)


def test_an_image_size_for_a_model_without_pictures_is_refused():
    with pytest.raises(RequestError, match="image: LlamaForCausalLM takes no images: given 32x32; leave image out"):
        huggingface_blueprint(LLAMA, name="llama", image_size=(32, 32))


def test_a_text_too_short_for_its_picture_is_refused():
    # 32 pixels / 8 per patch = 4 x 4 = 16 patches, one token each; one token in front and one behind
    with pytest.raises(RequestError, match=r"seq: one image takes 16 tokens .*: given 17 tokens, allowed at least 18"):
        huggingface_blueprint(TINY["llava"], name="llava", sequence_length=17)
    assert huggingface_blueprint(TINY["llava"], name="llava", sequence_length=18).sequence_length == 18


def test_another_image_size_is_used():
    blueprint = tiny("resnet", image_size=(48, 64))
    assert blueprint.image_size == (48, 64)
    assert blueprint.example(2, False).kwargs["pixel_values"].shape == (2, 3, 48, 64)


def test_another_image_size_interpolates_the_positions():
    blueprint = tiny("vit", image_size=(48, 48))
    assert blueprint.example(2, True).kwargs["interpolate_pos_encoding"] is True
    with one_thread():
        blueprint.loss(real(blueprint).train(), blueprint.example(2, True)).backward()
    assert "interpolate_pos_encoding" not in tiny("vit").example(2, True).kwargs

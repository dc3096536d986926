"""Example inputs for every transformers class; the tests run each of them.

A recipe turns an `ExampleSpec` into the keyword arguments of a forward. There is one per parameter name (`BY_PARAMETER`), and
one per model type or class with dependent inputs (`FAMILIES`); labels are added by task.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sizer.architecture.blueprint import Example
from sizer.architecture.examples import (
    audio,
    documents,
    labels,
    multimodal_text,
    prompts,
    sequences,
    speech,
    submodules,
    token_inputs,
    vision,
    vision_towers,
)
from sizer.architecture.examples.example_spec import ExampleSpec, Recipe, transduces
from sizer.architecture.examples.multimodal_inputs import MultimodalInput

FAMILIES: dict[str, Recipe] = {
    "autoformer": sequences.lagged_series,
    "DecisionTransformerModel": sequences.episode,
    "informer": sequences.lagged_series,
    "patchtsmixer": sequences.patched_series,
    "patchtst": sequences.patched_series,
    "time_series_transformer": sequences.lagged_series,
    "timesfm": sequences.plain_series,
    "timesfm2_5": sequences.plain_series,
    **submodules.FAMILIES,
    **vision_towers.FAMILIES,
    **audio.FAMILIES,
    **speech.FAMILIES,
    **documents.FAMILIES,
    **prompts.FAMILIES,
    **vision.FAMILIES,
    **sequences.FAMILIES,
}


def text_or_audio_mask(spec: ExampleSpec) -> Tensor | None:
    """Return the mask that a tokenizer or a feature extractor returns with the inputs; None if there is none."""
    return token_inputs.token_mask(spec) if spec.takes("input_ids", "inputs") else audio.audio_mask(spec)


BY_PARAMETER = {
    "input_ids": token_inputs.sentence,
    "attention_mask": text_or_audio_mask,
    "bbox": token_inputs.boxes_of_words,
    "lang_ids": token_inputs.language,
    "xpath_tags_seq": token_inputs.xpath_tags,
    "xpath_subs_seq": token_inputs.xpath_subscripts,
    "pixel_values": vision.image,
    "bool_masked_pos": vision.hidden_patches,
    "input_values": audio.waveform,
    "input_features": audio.spectrogram,
}


def make_example(spec: ExampleSpec) -> Example:
    """Return the inputs of one step: real CPU tensors, the same at every call."""
    with torch.device("cpu"):
        inputs = inputs_of(spec)
        if spec.interpolate:
            inputs["interpolate_pos_encoding"] = True
        if spec.training:
            inputs = labels.targets(spec, inputs) | inputs
            if spec.switches_cache:
                inputs["use_cache"] = False
    return Example(kwargs=inputs)


def inputs_of(spec: ExampleSpec) -> dict[str, Any]:
    """Return the keyword arguments of the class's forward without labels."""
    if "MultipleChoice" in spec.class_name:
        return token_inputs.as_choices(_plain_inputs(replace(spec, batch=spec.batch * token_inputs.CHOICES)), spec.batch)
    return _plain_inputs(spec)


def _plain_inputs(spec: ExampleSpec) -> dict[str, Any]:
    recipe = _family(spec)
    if spec.text_alone:
        inputs = multimodal_text.text_alone(spec)
    elif recipe is not None:
        inputs = recipe(spec)
    else:
        multimodal_input = multimodal_text.multimodal_input_of(spec)
        inputs = (
            by_parameter(spec)
            if multimodal_input is None
            else multimodal_text.text_with_placeholders(spec, multimodal_input)
        )
    if spec.takes("decoder_input_ids") and not (spec.training and token_inputs.derives_decoder_input(spec)):
        write = labels.transcript_so_far if transduces(spec.cls) else token_inputs.translation
        inputs.setdefault("decoder_input_ids", write(spec, inputs))
    return inputs


def multimodal_input_of(spec: ExampleSpec) -> MultimodalInput | None:
    """Return the image or audio inside the example's texts; None if there is none."""
    return None if spec.text_alone or _family(spec) else multimodal_text.multimodal_input_of(spec)


def _family(spec: ExampleSpec) -> Recipe | None:
    return FAMILIES.get(spec.class_name) or FAMILIES.get(spec.config.model_type)


def by_parameter(spec: ExampleSpec) -> dict[str, Any]:
    """Return one tensor for every parameter of the forward with a separate recipe."""
    if spec.takes("grid_thw"):
        return vision_towers.patch_grid_tower(spec)
    omitted = multimodal_text.left_out(spec)
    made = {name: make(spec) for name, make in BY_PARAMETER.items() if spec.takes(name) and name not in omitted}
    if spec.takes("spatial_shapes"):
        made |= vision.naflex(spec)
    return {name: value for name, value in made.items() if value is not None}


def has_own_loss(spec: ExampleSpec) -> bool:
    """Return True if the class returns its own loss in training."""
    return labels.has_own_loss(spec, inputs_of(spec))

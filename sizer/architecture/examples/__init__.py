"""Example inputs for every transformers class: right by construction, because each runs for real in the tests.

A recipe turns a `Setting` into the keyword arguments of a forward. There is one per parameter name (`BY_PARAMETER`), and one
per model type or class whose inputs depend on each other (`FAMILIES`); labels are added by task.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sizer.architecture.blueprint import Example
from sizer.architecture.examples import (
    audio,
    documents,
    encoders,
    labels,
    multimodal_text,
    patches,
    prompts,
    proteins,
    series,
    speech,
    submodules,
    text,
    towers,
    video_tracking,
    vision,
)
from sizer.architecture.examples.media import Medium
from sizer.architecture.examples.setting import Recipe, Setting, transduces

FAMILIES: dict[str, Recipe] = {
    "autoformer": series.lagged_series,
    "DecisionTransformerModel": series.episode,
    "informer": series.lagged_series,
    "patchtsmixer": series.patched_series,
    "patchtst": series.patched_series,
    "time_series_transformer": series.lagged_series,
    "timesfm": series.plain_series,
    "timesfm2_5": series.plain_series,
    **submodules.FAMILIES,
    **towers.FAMILIES,
    **encoders.FAMILIES,
    **speech.FAMILIES,
    **documents.FAMILIES,
    **prompts.FAMILIES,
    **video_tracking.FAMILIES,
    **proteins.FAMILIES,
}


def text_or_sound_mask(setting: Setting) -> Tensor | None:
    """The mask that a tokenizer or a feature extractor returns with the inputs; None where there is none."""
    return text.token_mask(setting) if setting.takes("input_ids", "inputs") else audio.sound_mask(setting)


BY_PARAMETER = {
    "input_ids": text.sentence,
    "attention_mask": text_or_sound_mask,
    "bbox": text.boxes_of_words,
    "lang_ids": text.language,
    "xpath_tags_seq": text.xpath_tags,
    "xpath_subs_seq": text.xpath_subscripts,
    "pixel_values": vision.image,
    "bool_masked_pos": vision.hidden_patches,
    "input_values": audio.waveform,
    "input_features": audio.spectrogram,
}


def make_example(setting: Setting) -> Example:
    """The inputs of one step: real CPU tensors, the same at every call."""
    with torch.device("cpu"):
        inputs = inputs_of(setting)
        if setting.interpolate:
            inputs["interpolate_pos_encoding"] = True
        if setting.training:
            inputs = labels.targets(setting, inputs) | inputs
            if setting.switches_cache:
                inputs["use_cache"] = False
    return Example(kwargs=inputs)


def inputs_of(setting: Setting) -> dict[str, object]:
    """The keyword arguments of the class's forward without labels."""
    if "MultipleChoice" in setting.class_name:
        return text.as_choices(_plain_inputs(replace(setting, batch=setting.batch * text.CHOICES)), setting.batch)
    return _plain_inputs(setting)


def _plain_inputs(setting: Setting) -> dict[str, object]:
    recipe = _family(setting)
    if recipe is not None:
        inputs = recipe(setting)
    else:
        medium = multimodal_text.medium_of(setting)
        inputs = by_parameter(setting) if medium is None else multimodal_text.story(setting, medium)
    if setting.takes("decoder_input_ids") and not (setting.training and text.derives_decoder_input(setting)):
        write = labels.transcript_so_far if transduces(setting.cls) else text.translation
        inputs.setdefault("decoder_input_ids", write(setting, inputs))
    return inputs


def medium_of(setting: Setting) -> Medium | None:
    """The picture or sound that the example's texts hold; None where they hold none."""
    return None if _family(setting) else multimodal_text.medium_of(setting)


def _family(setting: Setting) -> Recipe | None:
    return FAMILIES.get(setting.class_name) or FAMILIES.get(setting.config.model_type)


def by_parameter(setting: Setting) -> dict[str, object]:
    """One tensor for every parameter of the forward that has a recipe of its own."""
    if setting.takes("grid_thw"):
        return towers.patch_grid_tower(setting)
    silent = multimodal_text.left_out(setting)
    made = {name: make(setting) for name, make in BY_PARAMETER.items() if setting.takes(name) and name not in silent}
    if setting.takes("spatial_shapes"):
        made |= patches.naflex(setting)
    return {name: value for name, value in made.items() if value is not None}


def has_own_loss(setting: Setting) -> bool:
    """True where the class returns its own loss when it is trained."""
    return labels.has_own_loss(setting, inputs_of(setting))

"""Training targets of a head: one small recipe per task, chosen by the class's name and its forward's parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sizer.architecture.examples.example_spec import (
    IGNORED_LABEL,
    ExampleSpec,
    floats,
    integers,
    read,
    special_tokens,
    words,
)
from sizer.architecture.examples.token_inputs import translation
from sizer.architecture.examples.vision import BOXES, boxes

MASKED_SHARE = 7  # every 7th token is hidden from a masked language model: the 15 % of BERT's training

Target = Callable[[ExampleSpec, dict[str, Any]], object]


def continuation(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return the input ids themselves (batch, length): each token is predicted from those before it."""
    return inputs["input_ids"].clone()


def hidden_words(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return the ids of every 7th token, (batch, length), -100 elsewhere."""
    ids = inputs["input_ids" if "input_ids" in inputs else "inputs"]
    return torch.where(torch.arange(ids.shape[-1]) % MASKED_SHARE == 0, ids, IGNORED_LABEL)


def transcript(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return token ids of the spoken text, (batch, n).

    Raw audio gets 12 a second (letters), mel frames 3 a second (word pieces).

    CTC needs fewer tokens than the encoder has output frames.
    """
    audio = inputs["input_values" if "input_values" in inputs else "input_features"]
    count = max(1, audio.shape[1] // (1280 if "input_values" in inputs else 32))
    return words(spec.config.vocab_size, special_tokens(spec.config), spec.batch, count)


def transcript_so_far(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return the input of a transducer's decoder.

    In training it is the blank and the transcript, (batch, 1 + n); else only the initial blank.
    """
    blank = torch.full((spec.batch, 1), read(spec.config, "blank_token_id", default=0))
    return torch.cat([blank, transcript(spec, inputs)], dim=1) if spec.training else blank


def class_of_sample(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return one class per sample, (batch,)."""
    return integers(spec.config.num_labels, spec.batch)


def class_of_token(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return one class per token, (batch, length)."""
    return integers(spec.config.num_labels, spec.batch, spec.tokens)


def one_of_two(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return the number of the right answer, (batch,)."""
    return integers(2, spec.batch)


def position(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return a position in the text per sample, (batch,)."""
    return integers(max(1, spec.tokens - 2), spec.batch) + 1


def class_of_pixel(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return one class per pixel, (batch, height, width)."""
    return integers(spec.config.num_labels, spec.batch, *spec.sides)


def depth_of_pixel(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return a depth per pixel, (batch, height, width) float32."""
    return floats(spec.batch, *spec.sides) + 0.5


def objects(spec: ExampleSpec, inputs: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return per image a dict of `class_labels` (5,) and `boxes` (5, 4), as object detectors take them."""
    kinds = integers(spec.config.num_labels, BOXES)
    return [{"class_labels": kinds.clone(), "boxes": boxes(BOXES)} for _ in range(spec.batch)]


def true(spec: ExampleSpec, inputs: dict[str, Any]) -> bool:
    """Return True for the switch `return_loss`."""
    return True


def hidden_frames(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return a mask of the hidden output frames of wav2vec 2, (batch, frames) bool: every other frame."""
    return (torch.arange(frame_count(spec, inputs)) % 2 == 0).repeat(spec.batch, 1)


def other_frames(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return the negative frames for each output frame, (batch, frames, negatives)."""
    frames = frame_count(spec, inputs)
    return integers(frames, spec.batch, frames, spec.config.num_negatives)


def frame_count(spec: ExampleSpec, inputs: dict[str, Any]) -> int:
    """Return the output frames of an encoder with convolutions over raw audio; the number of mel frames does not change."""
    frames = inputs["input_values" if "input_values" in inputs else "input_features"].shape[1]
    kernels, strides = getattr(spec.config, "conv_kernel", ()), getattr(spec.config, "conv_stride", ())
    for kernel, stride in zip(kernels, strides, strict=False):
        frames = (frames - kernel) // stride + 1
    return frames


def frames_of_speakers(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return the speaker (of two) in each output frame, (batch, frames, labels) one-hot."""
    frames = frame_count(spec, inputs)
    kinds = integers(spec.config.num_labels, spec.batch, frames)
    return torch.nn.functional.one_hot(kinds, spec.config.num_labels)


# The first substring in the class's name determines the `labels`.
BY_TASK: tuple[tuple[str, Target], ...] = (
    ("SequenceClassification", class_of_sample),
    ("TokenClassification", class_of_token),
    ("MultipleChoice", one_of_two),
    ("NextSentencePrediction", one_of_two),
    ("ImageClassification", class_of_sample),
    ("VideoClassification", class_of_sample),
    ("AudioClassification", class_of_sample),
    ("AudioFrameClassification", frames_of_speakers),
    ("XVector", class_of_sample),
    ("ObjectDetection", objects),
    ("SemanticSegmentation", class_of_pixel),
    ("DepthEstimation", depth_of_pixel),
    ("MaskedLM", hidden_words),
    ("CTC", transcript),
    ("RNNT", transcript),
    ("TDT", transcript),
)
# Other parameters with which a forward returns its own loss.
BY_PARAMETER: dict[str, Target] = {
    "start_positions": position,
    "end_positions": position,
    "next_sentence_label": one_of_two,
    "sentence_order_label": one_of_two,
    "return_loss": true,
    "mask_time_indices": hidden_frames,
    "sampled_negative_indices": other_frames,
}
FOR_PRETRAINING = frozenset({"mask_time_indices", "sampled_negative_indices"})  # base models take them too, without effect
# Label arguments that recipes of single families add, and classes that return a loss without labels.
LABEL_ARGUMENTS = frozenset(
    {"labels", "mask_labels", "future_values", "target_values", "spectrogram_labels", "actions", "bool_masked_pos"}
)
LOSS_WITHOUT_LABELS = frozenset(
    {"ViTMAEForPreTraining", "VideoMAEForPreTraining", "PatchTSTForPretraining", "PatchTSMixerForPretraining"}
)
# Classes with a forward that takes labels and fails on them in transformers 5.23: their losses get unknown arguments, or
# (GLM-Image) a vocabulary size that differs from the head's.
UNTRAINABLE = frozenset(
    {
        "GlmImageForConditionalGeneration",
        "Nemotron3_5AsrForRNNT",
        "NemotronAsrStreamingForRNNT",
        "ShieldGemma2ForImageClassification",
        "VideomtForUniversalSegmentation",
    }
)
REFUSAL = re.compile(r"labels is not None:\s*raise ")


def targets(spec: ExampleSpec, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with which the class's forward returns its own loss, by parameter name; empty without one."""
    pretrained = "ForPreTraining" in spec.class_name
    made = {name: make for name, make in BY_PARAMETER.items() if pretrained or name not in FOR_PRETRAINING}
    found = {name: make(spec, inputs) for name, make in made.items() if spec.takes(name)}
    make = task_labels(spec, inputs)
    if "labels" not in inputs and make is not None:
        found["labels"] = make(spec, inputs)
    return found


def has_own_loss(spec: ExampleSpec, inputs: dict[str, Any]) -> bool:
    """Return True if the class, trained on these inputs and their targets, returns its own loss."""
    return bool(targets(spec, inputs) or LABEL_ARGUMENTS & inputs.keys() or spec.class_name in LOSS_WITHOUT_LABELS)


def task_labels(spec: ExampleSpec, inputs: dict[str, Any]) -> Target | None:
    """Return the recipe for `labels`, by the class's name.

    Otherwise an encoder-decoder gets a target text, and a decoder the text itself.

    None if the forward takes no labels, or only raises an error for them.
    """
    if not spec.takes("labels") or refuses_labels(spec.cls):  # type: ignore[arg-type]  # as in example_spec.takes
        return None
    named = next((make for part, make in BY_TASK if part in spec.class_name), None)
    if named is not None:
        return named
    if spec.takes("decoder_input_ids"):
        return translation
    return continuation if "input_ids" in inputs else None


@cache
def refuses_labels(cls: type[PreTrainedModel]) -> bool:
    """Return True if the class's forward raises when it is given labels ("Training is not implemented yet")."""
    return cls.__name__ in UNTRAINABLE or bool(REFUSAL.search(inspect.getsource(cls.forward)))

"""Recipes for models with prompts for regions or objects: SAM, open-vocabulary detectors, matching."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.architecture.examples import token_inputs, vision
from sizer.architecture.examples.example_spec import ExampleSpec, Recipe, floats, integers, ones, read

CLS, SEP, FULL_STOP = 101, 102, 1012  # ids in BERT's vocabulary
CLASSES = 4  # names of objects to look for in every image


def point(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of SAM: an image and one point of the object in its middle, (batch, 1, 1, 2) as (x, y)."""
    height, width = spec.sides
    points = torch.tensor([width / 2, height / 2]).repeat(spec.batch, 1, 1, 1)
    return {"pixel_values": vision.image(spec), "input_points": points, "input_labels": ones(spec.batch, 1, 1)}


def names(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of OWL-ViT: an image and four names to look for, (batch * 4, length) token ids."""
    ids = token_inputs.sentence(spec).repeat_interleave(CLASSES, dim=0)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": vision.image(spec)}


def pair(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Keypoint matchers: two images of the same thing, (batch, 2, channels, height, width)."""
    return {"pixel_values": floats(spec.batch, 2, vision.channels(spec), *spec.sides)}


def tiled_image(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of ViTMatte: an image and its trimap as a fourth channel."""
    return {"pixel_values": floats(spec.batch, 4, *spec.sides)}


def video_frames(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of VideoMAE, TimeSformer, ViViT: frames (batch, frames, channels, height, width)."""
    inputs: dict[str, Tensor] = {"pixel_values": vision.video(spec)}
    if "PreTraining" in spec.class_name:
        inputs["bool_masked_pos"] = _hidden_tubes(spec)
    return inputs


def _hidden_tubes(spec: ExampleSpec) -> Tensor:
    count = vision.patches(spec) * (vision.frames(spec) // read(spec.config, "tubelet_size", default=1))
    return (torch.arange(count) % 2 == 0).repeat(spec.batch, 1)


def video(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return frames under the name `pixel_values_videos`, with words if the model reads them too."""
    inputs = {"pixel_values_videos": vision.video(spec)}
    if spec.takes("input_ids"):
        inputs |= token_inputs.words_and_mask(spec)
    return inputs


def video_and_words(spec: ExampleSpec) -> dict[str, Any]:
    """Return frames and a sentence about them for TVP and X-CLIP; in training TVP also gets duration, begin and end."""
    inputs = {"pixel_values": vision.video(spec)} | token_inputs.words_and_mask(spec)
    if spec.training and "VideoGrounding" in spec.class_name:
        inputs["labels"] = [torch.full((spec.batch,), seconds) for seconds in (30.0, 5.0, 12.0)]
    return inputs


def universal_segments(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of Mask2Former, MaskFormer, EoMT: an image, and in training five masks with their classes per image."""
    inputs: dict[str, Any] = {"pixel_values": vision.image(spec)}
    if spec.training:
        inputs |= segments(spec)
    return inputs


def segments(spec: ExampleSpec) -> dict[str, list[Tensor]]:
    """Return per image five horizontal strips as masks (5, height, width) and their classes (5,)."""
    height, width = spec.sides
    rows = torch.arange(height) * vision.BOXES // height
    masks = (
        (rows[None, :, None] == torch.arange(vision.BOXES)[:, None, None]).float().expand(-1, -1, width).contiguous()
    )
    kinds = integers(spec.config.num_labels, vision.BOXES)
    images = range(spec.batch)
    return {"mask_labels": [masks.clone() for _ in images], "class_labels": [kinds.clone() for _ in images]}


def task_and_segments(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of OneFormer: an image, the task as words, and in training the masks and the words for each query."""
    config = spec.config
    inputs = universal_segments(spec)
    inputs["task_inputs"] = integers(config.text_encoder_vocab_size, spec.batch, config.task_seq_len).float()
    if spec.training and config.is_training:
        queries = config.num_queries - config.text_encoder_n_ctx
        inputs["text_inputs"] = integers(config.text_encoder_vocab_size, spec.batch, queries, config.max_seq_len)
    return inputs


def classes_and_task(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of OmDet-Turbo: an image, four names of classes, and the task as a sentence."""
    length = 8
    classes = integers(1000, spec.batch * CLASSES, length) + 100
    task = integers(1000, spec.batch, length) + 100
    return {
        "pixel_values": vision.image(spec),
        "classes_input_ids": classes,
        "classes_attention_mask": torch.ones_like(classes),
        "tasks_input_ids": task,
        "tasks_attention_mask": torch.ones_like(task),
        "classes_structure": torch.full((spec.batch,), CLASSES),
    }


def painted_example(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of SegGPT: an image, a second one with its mask as the prompt, and in training the mask to paint.

    It stacks two of them to its size.
    """
    half = floats(spec.batch, 3, spec.sides[0] // 2, spec.sides[1])
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks", *(("labels",) if spec.training else ()))
    return {name: half.clone() for name in names}


def robot(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of PI0: three cameras, a command in words, the robot's state, and in training the next fifty actions."""
    config = spec.config
    inputs = {
        "state": floats(spec.batch, config.max_state_dim),
        **token_inputs.words_and_mask(spec),
        "pixel_values": floats(spec.batch, 1, 3, *spec.sides),
        "pixel_attention_mask": ones(spec.batch, 1),
    }
    if spec.training:
        inputs["actions"] = floats(spec.batch, config.chunk_size, config.max_action_dim)
    return inputs


def answers(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of ViLT: an image and a question; in training a score for every possible answer."""
    inputs = token_inputs.words_and_mask(spec) | {"pixel_values": vision.image(spec)}
    if spec.training and "QuestionAnswering" in spec.class_name:
        inputs["labels"] = floats(spec.batch, spec.config.num_labels)
    return inputs


def named_objects(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return an image and names to detect for Grounding DINO.

    Its code recognizes the marks in "[CLS] a b . c d . ... [SEP]" by their ids.
    """
    ids = token_inputs.sentence(spec)
    ids[:, 3::3] = FULL_STOP
    ids[:, 0], ids[:, -2], ids[:, -1] = CLS, FULL_STOP, SEP
    return {"pixel_values": vision.image(spec), "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def video_and_text(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of PE-Audio-Video: frames, one second of audio, and a sentence about them if the model reads it."""
    return video(spec) | {"input_values": floats(spec.batch, 1, 48_000)}


def masked_image_and_text(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return an image for FLAVA with every other patch masked, the image for its codebook, and words, some of them masked."""
    config = spec.config
    words = token_inputs.sentence(spec)
    side = config.image_config.image_size // config.image_config.patch_size
    hidden = (torch.arange(side * side) % 2 == 0).view(side, side).repeat(spec.batch, 1, 1)
    inputs = {
        "input_ids": words,
        "input_ids_masked": words.clone(),
        "attention_mask": torch.ones_like(words),
        "pixel_values": vision.image(spec),
        "codebook_pixel_values": floats(spec.batch, 3, 8 * side, 8 * side),
        "bool_masked_pos": hidden,
    }
    if spec.training:
        inputs |= {"mlm_labels": words.clone(), "itm_labels": torch.ones(spec.batch, dtype=torch.int64)}
    return inputs


def clipseg(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return an image and the name of an object for CLIPSeg; in training the mask (batch, height, width)."""
    inputs = {"pixel_values": vision.image(spec)} | token_inputs.words_and_mask(spec)
    if spec.training and "Segmentation" in spec.class_name:
        inputs["labels"] = floats(spec.batch, *spec.sides)
    return inputs


FAMILIES: dict[str, Recipe] = {
    "clipseg": clipseg,
    "edgetam": point,
    "efficientloftr": pair,
    "eomt": universal_segments,
    "eomt_dinov3": universal_segments,
    "FlavaForPreTraining": masked_image_and_text,
    "grounding-dino": named_objects,
    "lightglue": pair,
    "mask2former": universal_segments,
    "maskformer": universal_segments,
    "omdet-turbo": classes_and_task,
    "mm-grounding-dino": named_objects,
    "oneformer": task_and_segments,
    "owlv2": names,
    "owlvit": names,
    "pe_audio_video": video_and_text,
    "pe_audio_video_encoder": video_and_text,
    "pe_video": video,
    "pe_video_encoder": video,
    "pi0": robot,
    "sam": point,
    "sam2": point,
    "sam3_tracker": point,
    "sam_hq": point,
    "seggpt": painted_example,
    "superglue": pair,
    "timesformer": video_frames,
    "tvp": video_and_words,
    "videomae": video_frames,
    "videoprism": video,
    "videoprism_vision_model": video,
    "videomt": video,
    "vilt": answers,
    "vitmatte": tiled_image,
    "vivit": video_frames,
    "vjepa2": video,
    "xclip": video_and_words,
}

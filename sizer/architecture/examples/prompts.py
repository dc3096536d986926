"""Recipes for models that are told where to look, or what to look for: SAM, open-vocabulary detectors, matching."""

from __future__ import annotations

import torch
from torch import Tensor

from sizer.architecture.examples import text, vision
from sizer.architecture.examples.setting import Recipe, Setting, read
from sizer.architecture.examples.tensors import floats, integers, ones

CLS, SEP, FULL_STOP = 101, 102, 1012  # in BERT's vocabulary
CLASSES = 4  # names of objects to look for in every picture


def point(setting: Setting) -> dict[str, Tensor]:
    """SAM: a picture and one point in its middle, (batch, 1, 1, 2) as (x, y), marked as belonging to the object."""
    height, width = setting.image_size
    points = torch.tensor([width / 2, height / 2]).repeat(setting.batch, 1, 1, 1)
    return {"pixel_values": vision.image(setting), "input_points": points, "input_labels": ones(setting.batch, 1, 1)}


def names(setting: Setting) -> dict[str, Tensor]:
    """OWL-ViT: a picture and four names to look for, (batch * 4, length) token ids."""
    ids = text.sentence(setting).repeat_interleave(CLASSES, dim=0)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": vision.image(setting)}


def pair(setting: Setting) -> dict[str, Tensor]:
    """Keypoint matchers: two pictures of the same thing, (batch, 2, channels, height, width)."""
    return {"pixel_values": floats(setting.batch, 2, vision.channels(setting), *setting.image_size)}


def picture_in_tiles(setting: Setting) -> dict[str, Tensor]:
    """ViTMatte: a picture and its trimap as a fourth channel."""
    return {"pixel_values": floats(setting.batch, 4, *setting.image_size)}


def video_frames(setting: Setting) -> dict[str, Tensor]:
    """VideoMAE, TimeSformer, ViViT: frames (batch, frames, channels, height, width)."""
    inputs: dict[str, Tensor] = {"pixel_values": vision.video(setting)}
    if "PreTraining" in setting.class_name:
        inputs["bool_masked_pos"] = _hidden_tubes(setting)
    return inputs


def _hidden_tubes(setting: Setting) -> Tensor:
    count = vision.patches(setting) * (vision.frames(setting) // read(setting.config, "tubelet_size", default=1))
    return (torch.arange(count) % 2 == 0).repeat(setting.batch, 1)


def video(setting: Setting) -> dict[str, Tensor]:
    """Frames under the name `pixel_values_videos`, with words where the model reads them too."""
    inputs = {"pixel_values_videos": vision.video(setting)}
    if setting.takes("input_ids"):
        inputs |= {"input_ids": text.sentence(setting), "attention_mask": ones(setting.batch, setting.length)}
    return inputs


def video_and_words(setting: Setting) -> dict[str, object]:
    """TVP, X-CLIP: frames and a sentence about them; in training TVP is told how long they last, and where it begins and ends."""
    inputs = {"pixel_values": vision.video(setting), "input_ids": text.sentence(setting),
              "attention_mask": ones(setting.batch, setting.length)}  # fmt: skip
    if setting.training and "VideoGrounding" in setting.class_name:
        inputs["labels"] = [torch.full((setting.batch,), seconds) for seconds in (30.0, 5.0, 12.0)]
    return inputs


def universal_segments(setting: Setting) -> dict[str, object]:
    """Mask2Former, MaskFormer, EoMT: a picture, and in training five masks with their classes per picture."""
    inputs: dict[str, object] = {"pixel_values": vision.image(setting)}
    if setting.training:
        inputs |= segments(setting)
    return inputs


def segments(setting: Setting) -> dict[str, list[Tensor]]:
    """Per picture five horizontal strips as masks (5, height, width) and their classes (5,)."""
    height, width = setting.image_size
    rows = torch.arange(height) * vision.BOXES // height
    masks = (
        (rows[None, :, None] == torch.arange(vision.BOXES)[:, None, None]).float().expand(-1, -1, width).contiguous()
    )
    kinds = integers(setting.config.num_labels, vision.BOXES)
    pictures = range(setting.batch)
    return {"mask_labels": [masks.clone() for _ in pictures], "class_labels": [kinds.clone() for _ in pictures]}


def task_and_segments(setting: Setting) -> dict[str, object]:
    """OneFormer: a picture, the task as words, and in training the masks and the words for each query."""
    config = setting.config
    inputs = universal_segments(setting)
    inputs["task_inputs"] = integers(config.text_encoder_vocab_size, setting.batch, config.task_seq_len).float()
    if setting.training and config.is_training:
        queries = config.num_queries - config.text_encoder_n_ctx
        inputs["text_inputs"] = integers(config.text_encoder_vocab_size, setting.batch, queries, config.max_seq_len)
    return inputs


def classes_and_task(setting: Setting) -> dict[str, Tensor]:
    """OmDet-Turbo: a picture, four names of classes, and the task as a sentence."""
    length = 8
    classes = integers(1000, setting.batch * CLASSES, length) + 100
    task = integers(1000, setting.batch, length) + 100
    return {
        "pixel_values": vision.image(setting),
        "classes_input_ids": classes,
        "classes_attention_mask": torch.ones_like(classes),
        "tasks_input_ids": task,
        "tasks_attention_mask": torch.ones_like(task),
        "classes_structure": torch.full((setting.batch,), CLASSES),
    }


def painted_example(setting: Setting) -> dict[str, Tensor]:
    """SegGPT: a picture, one with its mask as the prompt, in training the mask to paint; it stacks two of them to its size."""
    half = floats(setting.batch, 3, setting.image_size[0] // 2, setting.image_size[1])
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks", *(("labels",) if setting.training else ()))
    return {name: half.clone() for name in names}


def robot(setting: Setting) -> dict[str, Tensor]:
    """PI0: three cameras, a command in words, the robot's state, and in training the next fifty actions."""
    config = setting.config
    ids = text.sentence(setting)
    inputs = {
        "state": floats(setting.batch, config.max_state_dim),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": floats(setting.batch, 1, 3, *setting.image_size),
        "pixel_attention_mask": ones(setting.batch, 1),
    }
    if setting.training:
        inputs["actions"] = floats(setting.batch, config.chunk_size, config.max_action_dim)
    return inputs


def video_segments(setting: Setting) -> dict[str, object]:
    """VidEoMT: the frames of a video; the class refuses to be trained on them."""
    return {"pixel_values_videos": vision.video(setting)}


def answers(setting: Setting) -> dict[str, Tensor]:
    """ViLT: a picture and a question; in training a score for every possible answer."""
    ids = text.sentence(setting)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": vision.image(setting)}
    if setting.training and "QuestionAnswering" in setting.class_name:
        inputs["labels"] = floats(setting.batch, setting.config.num_labels)
    return inputs


def named_objects(setting: Setting) -> dict[str, Tensor]:
    """Grounding DINO: a picture and names to look for, "[CLS] a b . c d . ... [SEP]", whose marks its code knows by their ids."""
    ids = text.sentence(setting)
    ids[:, 3::3] = FULL_STOP
    ids[:, 0], ids[:, -2], ids[:, -1] = CLS, FULL_STOP, SEP
    return {"pixel_values": vision.image(setting), "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def film_and_words(setting: Setting) -> dict[str, Tensor]:
    """PE-Audio-Video: frames, one second of sound, and where the model reads it a sentence about them."""
    return video(setting) | {"input_values": floats(setting.batch, 1, 48_000)}


def masked_film(setting: Setting) -> dict[str, Tensor]:
    """FLAVA: a picture of which every other patch is hidden, the same picture for its codebook, and words, some of them hidden."""
    config = setting.config
    words = text.sentence(setting)
    side = config.image_config.image_size // config.image_config.patch_size
    hidden = (torch.arange(side * side) % 2 == 0).view(side, side).repeat(setting.batch, 1, 1)
    inputs = {
        "input_ids": words,
        "input_ids_masked": words.clone(),
        "attention_mask": torch.ones_like(words),
        "pixel_values": vision.image(setting),
        "codebook_pixel_values": floats(setting.batch, 3, 8 * side, 8 * side),
        "bool_masked_pos": hidden,
    }
    if setting.training:
        inputs |= {"mlm_labels": words.clone(), "itm_labels": torch.ones(setting.batch, dtype=torch.int64)}
    return inputs


def clipseg(setting: Setting) -> dict[str, Tensor]:
    """CLIPSeg: a picture and a name for what to find; in training the mask (batch, height, width)."""
    inputs = {"pixel_values": vision.image(setting), "input_ids": text.sentence(setting),
              "attention_mask": ones(setting.batch, setting.length)}  # fmt: skip
    if setting.training and "Segmentation" in setting.class_name:
        inputs["labels"] = floats(setting.batch, *setting.image_size)
    return inputs


FAMILIES: dict[str, Recipe] = {
    "clipseg": clipseg,
    "edgetam": point,
    "efficientloftr": pair,
    "eomt": universal_segments,
    "eomt_dinov3": universal_segments,
    "FlavaForPreTraining": masked_film,
    "grounding-dino": named_objects,
    "lightglue": pair,
    "mask2former": universal_segments,
    "maskformer": universal_segments,
    "omdet-turbo": classes_and_task,
    "mm-grounding-dino": named_objects,
    "oneformer": task_and_segments,
    "owlv2": names,
    "owlvit": names,
    "pe_audio_video": film_and_words,
    "pe_audio_video_encoder": film_and_words,
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
    "videomt": video_segments,
    "vilt": answers,
    "vitmatte": picture_in_tiles,
    "vivit": video_frames,
    "vjepa2": video,
    "xclip": video_and_words,
}

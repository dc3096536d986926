"""Diffusion pipelines: the arguments of a diffusers pipeline call that a query can set."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

PRESETS = Path(__file__).parents[1] / "diffusion" / "presets"  # a JSON file each
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}", re.ASCII)
CAST = "fp8-cast"  # layerwise casting: stored in float8, computed with in the question's dtype
PART_WEIGHTS = ("nf4", "nf4-dq", "int8", CAST)
PART_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}", re.ASCII)
TRAINS_OF_DENOISERS = ("all", "adapter")
DENOISERS = ("transformer", "unet")  # the names of the part that denoises
SECOND_DENOISER = "transformer_2"  # denoises the last steps if there are two denoisers, as in Wan 2.2
OFFLOADS = ("none", "model", "sequential", "group-leaf")  # and "group-block:N"
MAX_BLOCKS = 999  # per group
VAES = ("tiling", "slicing")
PIPELINE_OUTPUTS = ("image", "video", "latent")
OPTIONAL_PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder", SECOND_DENOISER)
MAX_FRAMES = 1_000
FRAMES = ("frames", "video_length", "num_frames")  # names of a call's argument for the frames of a video
# Inputs that diffusers' example scripts encode before training: all, prompts (the VAE stays), latents (the text encoders stay),
# none.
CACHED = ALL_CACHED, PROMPTS_CACHED, LATENTS_CACHED, NOTHING_CACHED = ("all", "prompts", "latents", "none")


def is_pipeline_preset(name: str) -> bool:
    """Return True if a preset has this name. diffusers need not be installed, and no preset is read."""
    return _NAME.fullmatch(name) is not None and (PRESETS / f"{name}.json").is_file()


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Return the names of all presets of pipelines."""
    return tuple(sorted(file.name.removesuffix(".json") for file in PRESETS.glob("*.json")))


def pipeline_preset_of(repository: str) -> str | None:
    """Return the preset of a hub repository, or of a copy by another owner; if there are several, the shortest name."""
    known = _repositories()
    copies = {name.rpartition("/")[2]: preset for name, preset in known.items()}
    asked = repository.lower()
    return known.get(asked) or (copies.get(asked.rpartition("/")[2]) if "/" in asked else None)


@functools.cache
def _repositories() -> dict[str, str]:
    """Return the preset of each repository, in lower case."""
    named = sorted(pipeline_names().items(), key=lambda item: len(item[0]), reverse=True)
    return {repository.lower(): preset for preset, (_, repository) in named}


@functools.cache
def pipeline_names() -> dict[str, tuple[str, str]]:
    """Return the title and the repository of each preset."""
    files = {file.name.removesuffix(".json"): json.loads(file.read_text(encoding="utf-8")) for file in PRESETS.glob("*.json")}
    return {preset: (found["title"], found["repository"]) for preset, found in files.items()}


@functools.cache
def makes_images(name: str) -> bool:
    """Return True for a preset whose call takes no frames; False for a preset of videos, and for another name."""
    if not is_pipeline_preset(name):
        return False
    call = json.loads((PRESETS / f"{name}.json").read_text(encoding="utf-8"))["call"]
    return not any(frames in call for frames in FRAMES)

"""The files that describe a pipeline: model_index.json and the config of each part, of a preset or pasted."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from sizer.base.config_json import FLOAT_TAG, TAGGED_FLOATS
from sizer.base.errors import ConfigError, RefusedValueError, quote
from sizer.catalogue.pipelines import DENOISERS, PRESETS
from sizer.catalogue.sources import close_name, resolve

INDEX = "model_index.json"
# Values for a part's library in an index: a package, or a folder of diffusers' pipelines with its own classes.
LIBRARIES = (
    *("diffusers", "transformers", "ace_step", "audioldm2", "deepfloyd_if", "kandinsky", "kolors", "latent_diffusion", "ltx"),
    *("ltx2", "shap_e", "stable_audio", "stable_audio_3", "stable_diffusion", "wuerstchen"),
)
EXAMPLE = "write for example arch=diffusers:flux.1-dev"
PRESETS_ALLOWED = "a pipeline that `python -m sizer models` lists, a hub id org/name, or the JSON files of a pipeline"
SCHEDULER, TOKENIZER = "scheduler", "tokenizer"
GUIDER = "Guidance"
_NO_WEIGHTS = ("Tokenizer", "Processor", "FeatureExtractor", "Scheduler", GUIDER)
# In the names of pipelines that accept images in a call, even optionally; and of pipelines that need a video or other inputs.
_READS_IMAGES = (
    *("Img2Img", "ImageToVideo", "Image2Video", "Control", "Adapter", "Inpaint", "Edit", "Kontext", "FluxFill"),
)
_NOT_CALLED = (
    *("VideoToVideo", "Video2Video", "Redux", "Upscale", "Depth2Img", "Pix2Pix", "Condition", "EditPlus", "EditInpaint"),
    *("LEdits", "GlmImage", "Layered", "FunControl", "AnimateControl", "AnimateDiffControlNet", "SparseControlNet", "VACE"),
    *("DiffEdit", "HunyuanVideoImageToVideo", "VisualCloze", "OmniGen", "SuperResolution", "Upsample", "BriaFiboEdit"),
    *("ShapE", "AudioLDM"),
)
CHECKER = "safety_checker"  # in the first pipelines: its class belongs to one of diffusers' pipelines, not to diffusers itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a pipeline: the class that its index names, and its config."""

    name: str
    library: str
    kind: str
    config: Mapping[str, Any]

    @property
    def has_weights(self) -> bool:
        """Return False for tokenizers, processors, schedulers and guiders."""
        return has_weights(self.kind) and self.name != SCHEDULER


def has_weights(kind: str) -> bool:
    """Return False for the class of a tokenizer, a processor, a scheduler or a guider."""
    return not any(word in kind for word in _NO_WEIGHTS)


def file_of(name: str, kind: str) -> str | None:
    """Return the path of the file that configures a part of a class; None if no value of it changes memory."""
    if has_weights(kind):
        return f"{name}/config.json"
    if "Scheduler" in kind:
        return f"{name}/scheduler_config.json"
    if GUIDER in kind:
        return f"{name}/guider_config.json"
    return f"{name}/tokenizer_config.json" if "Tokenizer" in kind else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A pipeline as its files describe it.

    - `options`: constructor arguments of its class other than its parts. `call`: arguments of a usual call.
    - `float32`: parts that are loaded in float32 for any dtype.
    - `prompt_tokens`: number of tokens of a prompt, by tokenizer.
    - `absent`: parts without a class, which pipelines accept as None. `left_out`: parts that are not built here.
    """

    title: str
    pipeline: str
    parts: tuple[Part, ...]
    absent: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    call: Mapping[str, object] = field(default_factory=dict)
    float32: tuple[str, ...] = ()
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def with_weights(self) -> tuple[str, ...]:
        """Return the names of the parts that have weights."""
        return tuple(part.name for part in self.parts if part.has_weights)

    @property
    def named(self) -> tuple[str, ...]:
        """Return the names of all that the index says of a pipeline: parts, with a class or without, and options."""
        return (*(part.name for part in self.parts), *self.absent, *self.left_out, *self.options)

    @property
    def reads_images(self) -> bool:
        """Return True if the name of the pipeline says that its call starts from images."""
        return any(word in self.pipeline for word in _READS_IMAGES)

    @property
    def denoiser(self) -> str:
        """Return the name of the part that denoises; empty if there is none by a usual name."""
        return next((name for name in DENOISERS if name in self.with_weights), "")


def find_preset(name: str) -> str:
    """Return the preset that a text names, without regard to case and separators.

    Raises:
        RefusedValueError: There is no such preset.
    """
    found = resolve("diffusers", name)
    if found is None:
        raise RefusedValueError(PRESETS_ALLOWED, close_name("diffusers", name) or EXAMPLE)
    return found


@functools.cache
def preset_data(name: str) -> dict[str, Any]:
    """Return the JSON of a preset, with all files. A preset made `of` another inherits its files and changes their keys."""
    data = json.loads((PRESETS / f"{name}.json").read_text(encoding="utf-8"))
    if "of" not in data:
        return data
    files, changed = preset_data(data["of"])["files"], data["files"]
    return data | {"files": {path: {**files.get(path, {}), **changed.get(path, {})} for path in files | changed}}


@functools.cache
def read_preset(name: str) -> Bundle:
    """Return the pipeline of a preset."""
    data = preset_data(name)
    return read_bundle(
        data["files"],
        title=data["title"],
        call=data["call"],
        float32=tuple(data["float32"]),
        prompt_tokens=data["prompt_tokens"],
    )


def read_bundle(files: Mapping[str, Any], *, title: str = "", **usual: Any) -> Bundle:
    """Return the pipeline that files describe, by their paths; `usual` are other fields of Bundle.

    Raises:
        ConfigError: A file is missing or has another form, or a class is neither diffusers' nor transformers'.
    """
    files = {path: _with_floats(content) for path, content in files.items()}
    index = files.get(INDEX)
    if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
        raise ConfigError(
            f"{INDEX} is missing or names no pipeline",
            given=", ".join(sorted(files)[:5]) or "no files",
            allowed=f"{INDEX} with _class_name, and config.json of each part",
            todo="copy these files from the pipeline's repository",
        )
    kind = index["_class_name"]
    if any(word in kind for word in _NOT_CALLED):
        raise needs_inputs(kind, "inputs that are not made here, such as a video or several images")
    parts, absent, left_out, options = [], [], [], {}
    for name, value in index.items():
        if name.startswith("_"):
            continue
        if not isinstance(value, list) or not all(isinstance(one, str | None) for one in value):
            options[name] = value
        elif len(value) == 2 and value[1] is None:
            absent.append(name)
        elif name == CHECKER:
            left_out.append(name)
        else:
            parts.append(_read_part(files, name, value))
    return Bundle(
        title=title or index["_class_name"],
        pipeline=index["_class_name"],
        parts=tuple(parts),
        absent=tuple(absent),
        left_out=tuple(left_out),
        options=options,
        **usual,
    )


def needs_inputs(pipeline: str, inputs: str) -> ConfigError:
    """Return the error for a pipeline call that needs inputs other than a prompt, an image and a mask."""
    return ConfigError(
        f"{pipeline} needs {inputs}",
        given=quote(pipeline),
        allowed="pipelines of text, of an image, or of an image and a mask, to images and videos",
        todo="ask for another pipeline of the same model: change _class_name in model_index.json",
    )


def _with_floats(value: object) -> object:
    """Return a JSON value with infinity and NaN instead of `read_config`'s tagged objects."""
    if isinstance(value, dict):
        if value.keys() == {FLOAT_TAG} and value[FLOAT_TAG] in TAGGED_FLOATS:
            return TAGGED_FLOATS[value[FLOAT_TAG]]
        return {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def _read_part(files: Mapping[str, object], name: str, value: list) -> Part:
    if len(value) != 2 or value[0] not in LIBRARIES or not isinstance(value[1], str):
        raise ConfigError(
            f"part {name!r} is not a class of diffusers or transformers",
            given=json.dumps(value)[:200],
            allowed="a library, diffusers or transformers, and a class of it",
            todo="code of a repository is never run: ask for a pipeline of diffusers' own classes",
        )
    library, kind = value
    if kind == "MultiControlNetModel":
        raise ConfigError(
            f"{name} is several ControlNets",
            given=quote(kind),
            allowed="one ControlNet, such as ControlNetModel",
            todo=f"write its class in {INDEX}, and keep the config of one of them",
        )
    found = {
        PurePosixPath(path).name: content
        for path, content in files.items()
        if PurePosixPath(path).parent.name == name and isinstance(content, dict)
    }
    part = Part(name=name, library=library, kind=kind, config=next(iter(found.values()), {}))
    if part.config.get("encoder_hid_dim_type") == "ip_image_proj" or "ip_adapter" in name:
        raise ConfigError(
            f"{name} belongs to an IP-Adapter, which is not built",
            given=quote(kind),
            allowed="the pipeline without it",
            todo="copy the files again from the pipeline's repository, where no adapter was loaded",
        )
    if part.has_weights and "config.json" not in found:
        raise ConfigError(
            f"{name}/config.json is missing",
            given=", ".join(sorted(files)[:8]),
            allowed="the config of each part that the index names",
            todo=f"add {name}/config.json of the pipeline's repository",
        )
    return part

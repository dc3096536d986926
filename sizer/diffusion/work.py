"""A pipeline's call, traced: the load, each part from its first use on, and the memory after the call."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn

from sizer.architecture.module_census import take_census
from sizer.base.errors import ConfigError, RequestError, TraceError
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.pipelines import CAST, DENOISERS, FRAMES, SECOND_DENOISER, preset_names
from sizer.diffusion.building import IMAGES, LONGEST, build_pipeline, has_guardrail, reads_images
from sizer.diffusion.bundle import INDEX, Bundle, read_bundle, read_preset
from sizer.diffusion.placing import INT8, MODEL, NF4, NF4_TWICE, NONE, denoisers_of, place
from sizer.diffusion.repeated_calls import RepeatedCalls
from sizer.diffusion.tokens import UnknownWords
from sizer.distributed.described_gpus import accelerator_of, devices_answer
from sizer.report.census import Census
from sizer.tape.tape import AFTER, PIPELINE_PHASES, BlockNotes, PhaseOfStep, Tape
from sizer.tracing.device import Device
from sizer.tracing.meta.accelerators import OnMeta, devices_told, modes_in_callbacks
from sizer.tracing.meta.host_memory import HostMemory
from sizer.tracing.recorder import Recorder
from sizer.tracing.trace import explain_errors, recording, repeatable
from sizer.tracing.watch import StepWatcher

if TYPE_CHECKING:
    from sizer.query.request import Request

_USUAL_SIZE = (512, 512)  # of an image for a pipeline without a default
DENOISING_STEPS = 2  # the first may keep tensors, the second repeats; further steps are identical to it
_SIZES = ("height", "width")
_TEXT = "text_encoder"
# The query key for an argument of a call, by words in a pipeline's messages.
_KEY_OF = {"max_sequence_length": "seq", "height": "image", "width": "image", "num_frames": "frames", "video_length": "frames"}
# Pipelines whose calls set num_videos_per_prompt to 1, or repeat an image's encoding for each prompt and not for each video of a
# prompt (pipelines/cogvideo, pipelines/wan/pipeline_wan_i2v.py, diffusers 0.42).
_SEVERAL_PROMPTS = ("CogVideoX", "WanImageToVideo")
_CALLED = ("decode", "encode", "encode_prompt", "get_image_features")  # methods that pipelines call in addition to `forward`


def count(
    request: Request, config: dict | None = None
) -> tuple[Census, tuple[str, ...], dict[str, int | tuple[int, int] | None]]:
    """Return the census of a pipeline's parts, notes on its call, and the call's `image_size` and `frames`.

    Raises:
        RequestError, ConfigError, BuildError: The pipeline cannot be built, or does not support the request.
    """
    bundle = bundle_of(request, config)
    with torch.device("meta"):
        pipe = build_pipeline(bundle, torch.bfloat16, without=request.without or (), tokens=request.sequence_length)
        parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
        call = call_of(pipe, bundle, request, batch=1)
        taken = sizes_taken(pipe, bundle, request, call)
    weights = weights_of(request, parts)
    census = replace(take_census(nn.ModuleDict(parts), name=bundle.title), class_name=bundle.pipeline)
    arguments = ", ".join(
        [f"{name}={value}" for name, value in call.items() if isinstance(value, int | float)]
        + [f"{name}={image.height}x{image.width}" for name, image in call.items() if name in IMAGES]
    )
    notes = [
        f"{bundle.pipeline} is called with {arguments}.",
        *rounding_notes(pipe, call, taken),
        f"{DENOISING_STEPS} denoising steps are traced: further steps repeat them.",
    ]
    notes += [f"{name} is left out: pass {name}=None to from_pretrained." for name in bundle.left_out]
    if has_guardrail(pipe):
        notes.append("The safety checker is left out: its weights are in the package cosmos_guardrail.")
    if "image_encoder" in parts and not reads_images(bundle):
        notes.append("image_encoder is built, and not called: it is of an IP-Adapter, which is not built.")
    if INT8 in weights.values():
        notes.append("int8 is a lower bound: bitsandbytes keeps outlier columns, and their number depends on the data.")
    return census, tuple(notes), taken


def trace(
    request: Request,
    config: dict | None,
    dtype: str,
    batch: int,
    device: Device,
    *,
    gpu: Gpu,
    block_notes: BlockNotes | None = None,
) -> Tape:
    """Return the tape (bytes per block) of a pipeline's call for `batch` images or videos per prompt.

    Its phases are "load", each part by name, and "after". Size queries are not resolved.

    Raises:
        RequestError, ConfigError, BuildError: The pipeline cannot be built, or does not support the request.
        TraceError: The call cannot be traced.
    """
    calls: list[RepeatedCalls] = []
    try:
        return _trace(request, config, dtype, batch, device, gpu, block_notes, calls)
    except TraceError:
        if not calls or not calls[0].differ:
            raise
    if block_notes is not None:
        block_notes.tensors.clear()
        block_notes.ends.clear()
    return _trace(request, config, dtype, batch, device, gpu, block_notes, None)


def _trace(
    request: Request,
    config: dict | None,
    dtype: str,
    batch: int,
    device: Device,
    gpu: Gpu,
    block_notes: BlockNotes | None,
    calls: list[RepeatedCalls] | None,
) -> Tape:
    """Return the tape of a call. With `calls`, equal calls of modules are logged again; the list gets what repeats them."""
    bundle = bundle_of(request, config)
    recorder = Recorder(device)
    recorder.block_notes = block_notes
    watcher = StepWatcher(recorder)
    host, deferred = recorder.host, recorder.deferred
    with (
        accelerator(gpu),
        repeatable(),
        recording(recorder),
        watcher.watching(),
        explain_errors(recorder),
        detected_anew(),
    ):
        host.setting_up = True
        with (
            torch.device("meta"),
            OnMeta(host, deferred) as mode,
            modes_in_callbacks(mode),
            devices_told(host, deferred, device.kind),
            deferred.setting_up(),
        ):
            pipe = build_pipeline(
                bundle, getattr(torch, dtype), without=request.without or (), tokens=request.sequence_length
            )
            host.begin()  # a checkpoint is read in its dtype; parts were made in float32 here
            parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
            if calls is not None:
                calls.append(RepeatedCalls(pipe, recorder))
            place(
                pipe,
                dtype=getattr(torch, dtype),
                offload=request.offloading,
                stream=request.stream,
                vae=request.vae or (),
                weights=weights_of(request, parts),
            )
            call = call_of(pipe, bundle, request, batch)
        host.setting_up, host.copied_bytes = False, 0
        watcher.loaded()
        _note_end(recorder, "load")
        with (
            OnMeta(host, deferred) as mode,
            modes_in_callbacks(mode),
            devices_told(host, deferred, device.kind),
            _phases_marked(pipe, recorder),
            _blending_twice(pipe),
            _copies_counted(pipe, host) as of_steps,
            torch.no_grad(),
            calls[0].repeated() if calls else nullcontext(),
            _remedied(bundle, request, pipe, call, recorder),
        ):
            pipe(**call)
        recorder.log.mark(AFTER)
        _note_end(recorder, AFTER)
    tape = recorder.log.tape(batch=batch, stand_ins=tuple(recorder.notes), host_bytes=host.peak_bytes)
    steps, bytes_of_steps = of_steps
    each = 0 if request.offloading in (NONE, MODEL) else bytes_of_steps // max(steps, 1)
    return replace(tape, copied=(host.copied_bytes - each * steps, each))


def list_names() -> list[dict[str, str]]:
    """Return the presets, each with the class of its pipeline as its family."""
    return [{"name": name, "family": read_preset(name).pipeline} for name in preset_names()]


def bundle_of(request: Request, config: dict | None) -> Bundle:
    """Return the pipeline that a request names, or the one in its files.

    Raises:
        ConfigError: A file is missing or has another form, or a class is neither diffusers' nor transformers'.
    """
    if config is not None:
        return read_bundle(config)
    return read_preset(request.name) if request.config is None else read_bundle(json.loads(request.config))


def weights_of(request: Request, parts: Any) -> dict[str, str]:
    """Return how single parts' weights are held, by the part's name; a value without a part is the denoisers'."""
    asked = dict(request.part_weights)
    if request.weights not in ("checkpoint", "full"):
        asked[""] = request.weights
    of_denoisers = {} if "" not in asked else dict.fromkeys(denoisers_of(parts), asked.pop(""))
    found = of_denoisers | asked
    for name, how in found.items():
        if name not in parts:
            raise RequestError(
                "weights", given=f"{name}:{how}", allowed=f"parts {', '.join(parts)}", todo="name one of them"
            )
        if how == INT8 and request.offloading != NONE:
            raise RequestError(
                "offload",
                given=f"{request.offloading} with int8 weights",
                allowed="none with int8: bitsandbytes does not move these weights to the host",
                todo=f"ask for {CAST} or nf4",
            )
        if how in (NF4, NF4_TWICE) and request.offloading.startswith("group") and not request.stream:
            raise RequestError(
                "offload",
                given=f"{request.offloading} with {how} weights",
                allowed=f"{request.offloading} with stream=1: without it diffusers leaves the scales of {how} weights on the host",
                todo="add stream=1, or ask for offload=model",
            )
    return found


def call_of(pipe: Any, bundle: Bundle, request: Request, batch: int) -> dict[str, Any]:
    """Return the arguments of the call: the usual ones, and those of the request.

    Raises:
        RequestError: The pipeline has no such argument, or its VAE does not divide the size.
    """
    taken = inspect.signature(type(pipe).__call__).parameters
    call = {"prompt": "a prompt", "num_inference_steps": DENOISING_STEPS, "output_type": "pt", **bundle.call}

    def ask(key: str, given: object, **arguments: Any) -> None:
        for name, value in arguments.items():
            if name not in taken:
                allowed = "a pipeline that takes it"
                raise RequestError(
                    key, given=str(given), allowed=allowed, todo=f"remove it: {bundle.pipeline} has no {name}"
                )
            call[name] = value

    if batch > 1:
        several = next((n for n in ("num_images_per_prompt", "num_videos_per_prompt") if n in taken), None)
        if bundle.pipeline.startswith(_SEVERAL_PROMPTS):
            several = None
        call |= {"prompt": ["a prompt"] * batch} if several is None else {several: batch}
    if request.image_size is not None:
        sizes = dict(zip(_SIZES, request.image_size, strict=True))
        if reads_images(bundle) and not set(_SIZES) & taken.keys():
            call |= sizes  # the image sets them
        else:
            ask("image", "x".join(map(str, request.image_size)), **sizes)
        _check_size(pipe, request.image_size)
    if request.frames is not None:
        name = next((name for name in FRAMES if name in taken), FRAMES[-1])
        ask("frames", request.frames, **{name: request.frames})
        _check_frames(pipe, bundle, request.frames)
    if request.sequence_length is not None:
        _check_length(pipe, taken, request.sequence_length)
        if "max_sequence_length" in taken:
            call["max_sequence_length"] = request.sequence_length
    _check_parts(bundle, request)
    if request.guidance is not None:
        call |= _guidance(taken, request.guidance, call)
    if request.output is not None:
        if request.output == "video" and not taken.keys() & set(FRAMES):
            todo = f"ask for output=image: {bundle.pipeline} makes images"
            raise RequestError("output", given="'video'", allowed="image or latent of this pipeline", todo=todo)
        call["output_type"] = "latent" if request.output == "latent" else "pt"
    if reads_images(bundle):
        call |= _images(pipe, taken, call)
    return {name: value for name, value in call.items() if name in taken}


def _images(pipe: Any, taken: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Return images of the call's size for each argument that takes them, and enough steps that two are denoised.

    With `strength`, an image call only runs that share of the steps, the last ones.
    """
    from PIL import Image  # diffusers needs it

    size = sizes_of(pipe, call)["image_size"]
    height, width = size if isinstance(size, tuple) else _USUAL_SIZE
    image = Image.new("RGB", (width, height))
    strength = call.get("strength") or (taken["strength"].default if "strength" in taken else 1.0)
    steps = next(n for n in itertools.count(DENOISING_STEPS) if int(n * strength) >= DENOISING_STEPS)
    prompts = call.get("prompt")
    images: Any = image
    if isinstance(prompts, list) and type(pipe).__name__.startswith("CogVideoX"):
        images = [image] * len(prompts)  # it reads an image for each prompt
    given: dict[str, Any] = dict.fromkeys((name for name in IMAGES if name in taken), images)
    # for SCM, which only supports two steps (pipelines/sana, 0.42)
    if steps != DENOISING_STEPS and "intermediate_timesteps" in taken:
        given["intermediate_timesteps"] = None
    return given | {"num_inference_steps": steps}


def _guidance(taken: Any, guided: bool, call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that switch guidance by a second, negative prompt on or off."""
    if "true_cfg_scale" in taken:  # in these pipelines, guidance_scale is an input of the model
        return {"true_cfg_scale": 4.0 if guided else 1.0, "negative_prompt": " " if guided else None}
    usual = call.get("guidance_scale", 0)
    return {"guidance_scale": max(usual, 5.0) if guided else min(usual, 1.0)}


def sizes_of(pipe: Any, call: dict[str, Any]) -> dict[str, int | tuple[int, int] | None]:
    """Return the image size and the frames of a call; None if its pipeline does not tell its usual size."""
    taken = inspect.signature(type(pipe).__call__).parameters
    usual = getattr(pipe, "default_sample_size", None) or getattr(getattr(pipe, "unet", None), "config", {}).get("sample_size")

    def value(name: str) -> int | None:
        found = call.get(name) or (taken[name].default if name in taken else None)
        if name in _SIZES and name not in taken and (image := call.get("image")) is not None:
            found = getattr(image, name)
        return found if type(found) is int else None

    height, width = (value(name) or (usual * _factor(pipe) if type(usual) is int else None) for name in _SIZES)
    frames = next((value(name) for name in FRAMES if name in taken), None)
    return {"image_size": None if height is None or width is None else (height, width), "frames": frames}


def sizes_taken(pipe: Any, bundle: Bundle, request: Request, call: dict[str, Any]) -> dict[str, int | tuple[int, int] | None]:
    """Return `sizes_of` a call as the pipeline's own code rounds them.

    Raises:
        RequestError: The pipeline's own checks refuse an argument.
    """
    sizes, checked = sizes_of(pipe, call), _check_call(pipe, bundle, request, call)
    height, width = (checked.get(name) for name in _SIZES)
    if sizes["image_size"] is not None and height is not None and width is not None:
        sizes["image_size"] = (height, width)
    if isinstance(frames := sizes["frames"], int):
        sizes["frames"] = _frames_taken(pipe, frames)
    return sizes


def rounding_notes(pipe: Any, call: dict[str, Any], taken: dict[str, int | tuple[int, int] | None]) -> list[str]:
    """Return a note on each size of a call that its pipeline rounds, with the requested and the used size."""
    asked, kind = sizes_of(pipe, call), type(pipe).__name__
    notes = []
    if asked["image_size"] != taken["image_size"]:
        given, found = (_text_of(sizes["image_size"]) for sizes in (asked, taken))
        notes.append(f"image={given} is traced as image={found}: the call of {kind} rounds other sizes.")
    if asked["frames"] != taken["frames"]:
        notes.append(
            f"frames={asked['frames']} is traced as frames={taken['frames']}: the VAE of {kind} takes "
            f"{_time_factor(pipe)} × n + 1 frames, and its call rounds other numbers."
        )
    return notes


def _text_of(size: object) -> str:
    return "x".join(map(str, size)) if isinstance(size, tuple) else "no size"


# Pipelines that round the number of frames before they divide it: `num_frames // factor * factor + 1`; and pipelines with a VAE
# that does not take factor × n + 1 frames (pipelines/allegro, diffusers 0.42).
_ROUNDS_FRAMES = ("Wan", "SkyReels", "AnyFlow", "ChronoEdit", "Kandinsky5", "LucyEdit")
_OTHER_FRAMES = ("Allegro",)
_TIME_FACTORS = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")


def _time_factor(pipe: Any) -> int:
    """Return how many frames a pipeline's VAE makes of a frame of latents after the first; 1 if it does not compress time."""
    if type(pipe).__name__.startswith(_OTHER_FRAMES):
        return 1
    return next((factor for name in _TIME_FACTORS if isinstance(factor := getattr(pipe, name, None), int) and factor), 1)


def _frames_taken(pipe: Any, frames: int) -> int:
    """Return the smallest number of frames with the same number of latents as the requested number in a pipeline's call."""
    factor = _time_factor(pipe)
    if type(pipe).__name__.startswith(_ROUNDS_FRAMES) and frames % factor != 1 % factor:
        frames = frames // factor * factor + 1
    return (frames - 1) // factor * factor + 1


_FACTORS = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_scale_factor", "vae_spatial_compression_ratio")


def _factor(pipe: Any) -> int:
    """Return by how much a pipeline's VAE makes an image smaller."""
    return next((factor for name in _FACTORS if isinstance(factor := getattr(pipe, name, None), int) and factor), 1)


def _patched_factor(pipe: Any, bundle: Bundle) -> int:
    """Return how many pixels a side of a patch of the denoiser has."""
    config = getattr(getattr(pipe, bundle.denoiser or "unet", None), "config", {})
    patch = config.get("patch_size") or config.get("all_patch_size") or 1
    side = patch[-1] if isinstance(patch, list | tuple) else patch
    return _factor(pipe) * (side if isinstance(side, int) else 1)


def _fitting(size: tuple[int, int], factor: int) -> str:
    """Return the next smaller size that divides by `factor` on each side, in a query's format."""
    return "x".join(str(max(side // factor, 1) * factor) for side in size)


def _check_size(pipe: Any, size: tuple[int, int]) -> None:
    factor = _factor(pipe)
    if any(side % factor for side in size):
        raise RequestError(
            "image",
            given="x".join(map(str, size)),
            allowed=f"multiples of {factor}, the factor of its VAE",
            todo=f"ask for image={_fitting(size, factor)}",
        )


def _check_frames(pipe: Any, bundle: Bundle, frames: int) -> None:
    """Refuse other numbers of frames if the denoiser has a table of positions for one number (LatteTransformer3DModel)."""
    fixed = getattr(getattr(pipe, bundle.denoiser or "unet", None), "config", {}).get("video_length")
    if isinstance(fixed, int) and frames != fixed:
        raise RequestError("frames", given=str(frames), allowed=f"{fixed}, its number of positions", todo="remove it")


def _check_length(pipe: Any, taken: Any, tokens: int) -> None:
    """Refuse prompts that are longer than a pipeline's tokenizers cut them to, or that its denoiser has no positions for."""
    limits = [one.model_max_length for one in pipe.components.values() if isinstance(one, UnknownWords)]
    if "max_sequence_length" not in taken and limits and tokens > max(limits) and max(limits) < LONGEST:
        allowed = f"at most {max(limits)} tokens: its tokenizers truncate a prompt to them"
        raise RequestError("seq", given=str(tokens), allowed=allowed, todo=f"ask for seq={max(limits)}")
    config = getattr(getattr(pipe, "transformer", None), "config", {})
    rotary = config.get("use_rotary_positional_embeddings", True) and not config.get("use_learned_positional_embeddings")
    fixed = None if rotary else config.get("max_text_seq_length")
    if isinstance(fixed, int) and tokens != fixed:  # CogVideoX-2B, CogVideoX-5B-I2V
        raise RequestError("seq", given=str(tokens), allowed=f"{fixed}, its number of positions", todo="remove it")


def _check_parts(bundle: Bundle, request: Request) -> None:
    """Refuse to leave out a part that a pipeline does not have."""
    for name in request.without or ():
        if name not in bundle.with_weights:
            allowed = f"parts of {bundle.pipeline}: {', '.join(bundle.with_weights)}"
            raise RequestError("without", given=name, allowed=allowed, todo=f"remove {name}")


class _CheckedError(Exception):
    """The call has checked its arguments, and refuses them for this reason, or for none."""


class _Warnings(logging.Handler):
    """Texts of diffusers' warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store the text of a warning."""
        self.texts.append(record.getMessage())


@contextmanager
def _warnings_of_diffusers() -> Iterator[list[str]]:
    """Return a context that yields the texts of diffusers' warnings within it."""
    logger, handler = logging.getLogger("diffusers"), _Warnings()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield handler.texts
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


_DIVIDED = re.compile(r"have to be divisible by (\d+) but are .* resized accordingly")


def _check_call(pipe: Any, bundle: Bundle, request: Request, call: dict[str, Any]) -> dict[str, int]:
    """Run a pipeline's own `check_inputs` on the arguments of a call, and end the call there.

    Return the height and the width that it checked, rounded down to the multiple in its warning. Empty if it checks neither.

    Raises:
        RequestError: It refuses an argument.
    """
    own = getattr(pipe, "check_inputs", None)
    if own is None:
        return {}
    checked: dict[str, int] = {}

    def check(*args: Any, **kwargs: Any) -> None:
        found = inspect.signature(own).bind(*args, **kwargs).arguments
        checked.update({name: found[name] for name in _SIZES if type(found.get(name)) is int})
        try:
            own(*args, **kwargs)
        except ValueError as error:
            raise _CheckedError(" ".join(str(error).split())) from error
        raise _CheckedError

    pipe.check_inputs = check
    reason = ""
    try:
        with _warnings_of_diffusers() as warnings:
            pipe(**call)
    except _CheckedError as error:
        reason = str(error)
    except (TypeError, ValueError, AttributeError, RuntimeError, LookupError, AssertionError):
        reason = ""  # it fails before it checks them: its trace has the reason
    finally:
        del pipe.check_inputs
    if not reason:
        factors = [int(match[1]) for text in warnings if (match := _DIVIDED.search(text))]
        return {name: max(side // factor, 1) * factor for name, side in checked.items() for factor in factors[-1:] or [1]}
    asked = {"seq": request.sequence_length, "image": request.image_size, "frames": request.frames}
    key = next((key for word, key in _KEY_OF.items() if word in reason and asked[key] is not None), "arch")
    given, todo = str(asked.get(key) or bundle.pipeline), "ask for another value"
    if key == "image" and request.image_size is not None:
        given = "x".join(map(str, request.image_size))
        if (fitting := _fitting(request.image_size, _patched_factor(pipe, bundle))) != given:
            todo = f"ask for image={fitting}"
    raise RequestError(key, given=given, allowed=f"valid values of {bundle.pipeline}'s call: {reason.rstrip('.')}", todo=todo)


@contextmanager
def _phases_marked(pipe: Any, recorder: Recorder) -> Iterator[None]:
    """Mark a phase for each part from its first use on, and classify the weights that a part has on the device."""
    begun: list[str] = []

    def begin(name: str) -> None:
        if name in begun or name not in PIPELINE_PHASES:
            return
        if begun:
            end()
        begun.append(name)

    def end() -> None:
        recorder.log.mark(begun[-1])
        _note_end(recorder, begun[-1])

    with ExitStack() as stack:
        for name, part in pipe.components.items():
            if isinstance(part, nn.Module):
                _watch(stack, part, partial(begin, name), partial(begin, f"{name}_encode"), recorder)
        yield
    if begun:
        end()


@contextmanager
def _copies_counted(pipe: Any, host: HostMemory) -> Iterator[list[int]]:
    """Yield the number of denoising steps so far, and the bytes that parts which work at each step have copied to the device."""
    found, before = [0, 0], 0

    def begin(*args: Any) -> None:
        nonlocal before
        before = host.copied_bytes

    def end(*args: Any) -> None:
        found[1] += host.copied_bytes - before

    kind = type(getattr(pipe, "scheduler", None))
    own: Any = getattr(kind, "step", None)

    @functools.wraps(own or begin)  # pipelines read its signature
    def step(*args: Any, **kwargs: Any) -> Any:
        found[0] += 1
        return own(*args, **kwargs)

    with ExitStack() as stack:
        if own is not None:
            stack.enter_context(mock.patch.object(kind, "step", step))
        for name in (*DENOISERS, SECOND_DENOISER, "controlnet"):
            if isinstance(part := pipe.components.get(name), nn.Module):
                stack.callback(part.register_forward_pre_hook(begin, prepend=True).remove)
                stack.callback(part.register_forward_hook(end).remove)
        yield found


_BLENDED_ROWS = 2


@contextmanager
def _blending_twice(pipe: Any) -> Iterator[None]:
    """Have a VAE blend two rows of overlapping tiles, which takes the memory of all rows.

    Each iteration of these loops allocates tensors of the same sizes, and frees them before the next one begins: the second finds
    the memory of the first, and so does each further one. Loops of another form stay (diffusers 0.42, models/autoencoders).
    """
    vae = getattr(pipe, "vae", None)
    with ExitStack() as stack:
        for name in ("blend_v", "blend_h", "blend_t"):
            own = getattr(vae, name, None)
            if own is None or "in range(blend_extent):" not in inspect.getsource(own):
                continue

            def blend(a: Any, b: Any, blend_extent: int, own: Any = own) -> Any:
                return own(a, b, min(blend_extent, _BLENDED_ROWS))

            setattr(vae, name, blend)
            stack.callback(delattr, vae, name)
        yield


@contextmanager
def _remedied(bundle: Bundle, request: Request, pipe: Any, call: dict[str, Any], recorder: Recorder) -> Iterator[None]:
    """Explain the failure of a call by the inputs to request instead: tiling of the VAE, or inputs that are not made here.

    Raises:
        RequestError: A text encoder that the call needs was left out or cast to 8 bits, or patches do not divide the size.
        ConfigError: A part that the call needs is null.
    """
    try:
        with explain_errors(recorder):
            yield
    except TraceError as error:
        _refuse_left_out(bundle, request, error)
        _refuse_absent(bundle, pipe, error)
        _refuse_cast_encoder(request, error)
        _refuse_patches(bundle, request, pipe, error)
        _refuse_resolution(bundle, request, error)
        others = [name for name in inspect.signature(type(pipe).__call__).parameters if _is_input(name) and name not in call]
        named = [name for name in others if re.search(rf"\b{name}\b", str(error))]
        todo = f"this call of {bundle.pipeline} has no {', no '.join(named)}" if named else error.todo
        if "without tiling" in str(error):
            todo = "ask for vae=tiling"
        raise TraceError(error.what, given=error.given, allowed=error.allowed, todo=todo) from error


def _refuse_left_out(bundle: Bundle, request: Request, error: TraceError) -> None:
    if left_out := [name for name in request.without or () if name.startswith(_TEXT)]:
        raise RequestError(
            "without",
            given=", ".join(left_out),
            allowed=f"parts that the call of {bundle.pipeline} does without",
            todo=f"remove it: a prompt is encoded by {', '.join(name for name in bundle.with_weights if name.startswith(_TEXT))}",
        ) from error


def _refuse_absent(bundle: Bundle, pipe: Any, error: TraceError) -> None:
    """Raise ConfigError if the call needs a part that is null or missing in the files, and was read as None."""
    none = [name for name, part in pipe.components.items() if part is None and name not in bundle.left_out]
    encoders = [name for name in none if name.startswith(_TEXT) and name in bundle.absent]
    named = encoders or (none if "NoneType" in str(error) else [])
    if named:
        raise ConfigError(
            f"the call of {bundle.pipeline} fails without a part",
            given=f"{INDEX} in which {', '.join(named)} {'is' if len(named) == 1 else 'are'} null or missing",
            allowed="a library, diffusers or transformers, and a class of it",
            todo=f"copy {INDEX} again from the repository of a pipeline with it",
        ) from error


def _refuse_cast_encoder(request: Request, error: TraceError) -> None:
    """Raise RequestError for 8-bit floats of a text encoder if the call casts the denoiser's inputs to its dtype."""
    cast = [name for name, how in request.part_weights if how == CAST and name.startswith(_TEXT)]
    if cast and "float8" in str(error):
        raise RequestError(
            "weights",
            given=f"{cast[0]}:{CAST}",
            allowed=f"{CAST} of the denoiser: this call casts prompts to the dtype of {cast[0]}, which has no arithmetic",
            todo=f"ask for {cast[0]}:{NF4}, or remove it",
        ) from error


def _refuse_patches(bundle: Bundle, request: Request, pipe: Any, error: TraceError) -> None:
    factor = _patched_factor(pipe, bundle)
    if request.image_size is not None and any(side % factor for side in request.image_size):
        raise RequestError(
            "image",
            given="x".join(map(str, request.image_size)),
            allowed=f"sides that {factor} divides, the VAE's factor times the patches of {bundle.denoiser or 'unet'}",
            todo=f"ask for image={_fitting(request.image_size, factor)}",
        ) from error


def _refuse_resolution(bundle: Bundle, request: Request, error: TraceError) -> None:
    """Raise RequestError for a size that a denoiser refuses, such as one with learned positions of a single size (CogVideoX)."""
    if request.image_size is not None and "ValueError" in str(error) and "resolution" in str(error):
        raise RequestError(
            "image",
            given="x".join(map(str, request.image_size)),
            allowed=f"the size that {bundle.denoiser or 'unet'} has positions for",
            todo="remove it",
        ) from error


def _is_input(name: str) -> bool:
    """Return True if the name of a call's argument says that it is an image, a video, a mask or sound."""
    return name.split("_")[-1] in ("image", "images", "video", "videos", "mask", "frames", "controls", "hint", "audio") and (
        "attention_mask" not in name and "prompt" not in name and not name.startswith("num_")
    )


def _note_end(recorder: Recorder, phase: str) -> None:
    if recorder.block_notes is not None:
        recorder.block_notes.ends.append((len(recorder.log.order), PhaseOfStep(step=0, phase=phase)))


def _watch(
    stack: ExitStack, part: nn.Module, begin: Callable[[], None], begin_encoding: Callable[[], None], recorder: Recorder
) -> None:
    starts = _Starts(stack, part, recorder.host)

    def classify(*args: Any) -> None:
        recorder.classify(part.parameters(), "parameter")
        recorder.classify(part.buffers(), "buffer")

    stack.callback(part.register_forward_pre_hook(lambda *args: starts.call(begin), prepend=True).remove)
    stack.callback(part.register_forward_hook(classify).remove)
    for name in _CALLED:
        if (own := getattr(part, name, None)) is not None:

            def called(*args: Any, own: Any = own, encodes: bool = name == "encode", **kwargs: Any) -> Any:
                starts.call(begin_encoding if encodes else begin)
                try:
                    return own(*args, **kwargs)
                finally:
                    classify()

            setattr(part, name, called)
            stack.callback(delattr, part, name)


class _Starts:
    """Start of a part's phase: at its call, or with model offload as soon as the previous part has left the device.

    A hook of accelerate moves the previous part away, and then this part to the device, in one call (accelerate/hooks.py,
    CpuOffload).
    """

    def __init__(self, stack: ExitStack, part: nn.Module, host: HostMemory) -> None:
        self._begin: Callable[[], None] | None = None
        self._host = host
        self._before = getattr(getattr(part, "_hf_hook", None), "prev_module_hook", None)
        if self._before is not None:
            own = self._before.offload

            def offload() -> None:
                own()
                if self._begin is not None:
                    self._begin()

            self._before.offload = offload
            stack.callback(delattr, self._before, "offload")

    def call(self, begin: Callable[[], None]) -> None:
        """Have the part's phase begin."""
        self._begin = begin
        if self._before is None or next(self._before.model.parameters()) in self._host:
            begin()


def accelerator(gpu: Gpu) -> Any:
    """Return a context in which torch.cuda answers for this GPU."""
    return devices_answer(accelerator_of(gpu), count=1)


@contextmanager
def detected_anew() -> Iterator[None]:
    """Have diffusers ask again which device there is: it keeps the first answer."""
    from diffusers.utils import torch_utils

    detect = getattr(getattr(torch_utils, "TorchDeviceBackend", None), "_detect_device_type", None)
    forget = getattr(detect, "cache_clear", lambda: None)
    forget()
    try:
        yield
    finally:
        forget()

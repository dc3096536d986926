"""Frozen encoders of a pipeline whose denoiser trains: the inputs that diffusers' example scripts encode in each step.

Prompts are encoded by the pipeline's own call, which ends when it reaches the denoiser. Images are encoded by the VAE, as in
the scripts, by pipeline: `_ROWS`. Both run outside of autocast: accelerate applies it only to the denoiser.
Sources: examples/dreambooth/train_dreambooth_lora{,_sdxl,_sd3,_flux,_qwen_image,_z_image}.py and
examples/text_to_image/train_text_to_image_lora{,_sdxl}.py (diffusers 0.42).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sizer.architecture.blueprint import Example
from sizer.architecture.frozen_parts import WithFrozenParts
from sizer.base.errors import RequestError
from sizer.catalogue.pipelines import ALL_CACHED, CACHED, LATENTS_CACHED, NOTHING_CACHED, PROMPTS_CACHED
from sizer.diffusion.building import build_pipeline
from sizer.diffusion.bundle import Bundle

if TYPE_CHECKING:
    from sizer.query.request import Request

_VAE, _TEXT = "vae", "text_encoder"
_PIXELS = "pixel_values"


class _ReachedError(Exception):
    """The call has reached the denoiser, with these arguments."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__("the call has reached the denoiser")
        self.arguments = arguments


def arguments_before(denoiser: nn.Module, call: Callable[[], object]) -> dict[str, Any] | None:
    """Return the arguments with which a call reaches a denoiser, and end the call there; None if it does not reach it."""

    def stop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        raise _ReachedError(dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments))

    handle = denoiser.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        call()
    except _ReachedError as reached:
        return reached.arguments
    finally:
        handle.remove()
    return None


def _by_factor(vae: Any, encoded: Tensor) -> Tensor:
    """Return latents moved and scaled by the VAE's own factors."""
    shift = getattr(vae.config, "shift_factor", None)
    return (encoded if shift is None else encoded - shift) * vae.config.scaling_factor


def _by_channel(vae: Any, encoded: Tensor) -> Tensor:
    """Return latents of a VAE of videos, moved and scaled by channel."""
    mean, deviation = (
        torch.tensor(values).view(1, vae.config.z_dim, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (encoded - mean.to(encoded.device)) * (1.0 / deviation).to(encoded.device)


def _flux_packed(latents: Tensor) -> Tensor:
    from diffusers import FluxPipeline

    return FluxPipeline._pack_latents(latents, *latents.shape)


def _qwen_packed(latents: Tensor) -> Tensor:
    from diffusers import QwenImagePipeline

    samples, channels, _, height, width = latents.shape
    return QwenImagePipeline._pack_latents(latents.permute(0, 2, 1, 3, 4), samples, channels, height, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Encoding of a script's images: whether its VAE stays in float32, reads a frame of a video, and is sampled from.

    `scale` converts the VAE's output to latents, `pack` converts latents to the denoiser's input format.
    """

    in_float32: bool = False
    of_video: bool = False
    samples: bool = True
    scale: Callable[[Any, Tensor], Tensor] = _by_factor
    pack: Callable[[Tensor], Tensor] = lambda latents: latents


_ROWS = {
    "StableDiffusionPipeline": _Row(),
    "StableDiffusionXLPipeline": _Row(in_float32=True),
    "StableDiffusion3Pipeline": _Row(in_float32=True),
    "FluxPipeline": _Row(pack=_flux_packed),
    "QwenImagePipeline": _Row(of_video=True, scale=_by_channel, pack=_qwen_packed),
    "ZImagePipeline": _Row(samples=False, pack=lambda latents: latents.unsqueeze(2)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Encoding of a training step's inputs within the step, and the frozen parts that encode (`names`).

    `call` are the arguments of a usual call, `latents` the name of the denoiser's argument that takes noisy latents.
    """

    bundle: Bundle
    names: tuple[str, ...]
    row: _Row
    call: Mapping[str, Any]
    latents: str
    takes_list: bool
    image_size: tuple[int, int]
    tokens: int | None
    encodes_prompts: bool
    encodes_images: bool

    def build(self) -> WithFrozenParts:
        """Return the denoiser in float32 with the frozen parts, on the default device."""
        bundle = self.bundle
        pipe = build_pipeline(bundle, torch.float32, tokens=self.tokens)
        pipe.set_progress_bar_config(disable=True)
        parts = {name: pipe.components[name] for name in (*self.names, bundle.denoiser)}
        for name in bundle.with_weights:
            if name not in parts:
                setattr(pipe, name, None)
        # in the order of the scripts
        ordered = {name: parts[name] for name in (_VAE, bundle.denoiser, *self.names) if name in parts}
        module = WithFrozenParts(bundle.denoiser, ordered, in_float32=(_VAE,) if self.row.in_float32 else ())
        module.trained.requires_grad_(False)
        object.__setattr__(module, "pipe", pipe)  # not a module, but it references the same modules
        return module

    def example(self, arguments: dict[str, Any], batch: int) -> Example:
        """Return a batch: the denoiser's arguments known before the step, and images [batch, 3, H, W] in float32."""
        if self.encodes_prompts:
            arguments = {self.latents: arguments[self.latents]}
        if not self.encodes_images:
            return Example(kwargs=arguments)
        kept = {name: value for name, value in arguments.items() if name != self.latents}
        pixels = torch.zeros((), device="cpu").expand(batch, 3, *self.image_size)
        return Example(kwargs=kept, targets={_PIXELS: pixels})

    def encoded(self, module: WithFrozenParts, example: Example) -> tuple[dict[str, Any], Any]:
        """Return the denoiser's arguments and clean latents, unpacked if this step encodes them."""
        arguments = dict(example.kwargs)
        clean = arguments.pop(self.latents, None)
        given = example.targets[_PIXELS] if self.encodes_images else clean
        device = (given if isinstance(given, Tensor) else given[0]).device
        with torch.autocast(device.type, enabled=False):
            if self.encodes_prompts:
                arguments = self._arguments(module, len(given))
                arguments.pop(self.latents)
            if self.encodes_images:
                clean = self._encode(module, example.targets[_PIXELS])
                if self.row.in_float32:
                    clean = clean.to(arguments["encoder_hidden_states"].dtype)
        return arguments, clean

    def packed(self, latents: Tensor) -> Tensor | list[Tensor]:
        """Return noisy latents in the form that the denoiser takes."""
        packed = self.row.pack(latents)
        return list(packed.unbind(0)) if self.takes_list else packed

    def _arguments(self, module: WithFrozenParts, batch: int) -> dict[str, Any]:
        call = {**self.call, "prompt": ["a prompt"] * batch}
        call.pop("num_images_per_prompt", None)
        pipe: Any = vars(module)["pipe"]
        found = arguments_before(module.trained, lambda: pipe(**call))
        assert found is not None, "the call was there before"
        return found

    def _encode(self, module: WithFrozenParts, pixels: Tensor) -> Tensor:
        vae: Any = module.frozen()[_VAE]
        given = pixels.unsqueeze(2) if self.row.of_video else pixels
        spread = vae.encode(given.to(dtype=vae.dtype)).latent_dist
        dtype = vae.dtype
        return self.row.scale(vae, spread.sample() if self.row.samples else spread.mode()).to(dtype)


def encoding_of(bundle: Bundle, request: Request, called: Mapping[str, Any], latents: str) -> Encoding | None:
    """Return the encoding of a step; None if everything is encoded before the training.

    Raises:
        RequestError: No script of diffusers trains this pipeline like that.
    """
    if request.cached == ALL_CACHED:
        return None
    row = _ROWS.get(bundle.pipeline)
    if row is None or called["image_size"] is None:
        raise RequestError(
            "cached",
            given=f"{request.cached!r} with {bundle.pipeline}",
            allowed=f"{', '.join(CACHED)} of {', '.join(_ROWS)}; {ALL_CACHED} of other pipelines",
            todo="remove it",
        )
    prompts = request.cached in (LATENTS_CACHED, NOTHING_CACHED)
    images = request.cached in (PROMPTS_CACHED, NOTHING_CACHED)
    names = [_VAE] if images else []
    if prompts:
        names += [name for name in bundle.with_weights if name.startswith(_TEXT)]
    return Encoding(
        bundle=bundle,
        names=tuple(names),
        row=row,
        call=called["call"],
        latents=latents,
        takes_list=bundle.pipeline == "ZImagePipeline",
        image_size=called["image_size"],
        tokens=request.sequence_length,
        encodes_prompts=prompts,
        encodes_images=images,
    )

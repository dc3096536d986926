"""Training of a pipeline's denoiser, as in diffusers' example scripts: noise is added to latents, and the model predicts it.

The denoiser's inputs are those that the pipeline's own call passes to it, without guidance. With cached=all, latents and
prompts are encoded in advance, and neither VAE nor text encoders are on the device. `encoding` covers the other modes of the
scripts.
Sources: examples/dreambooth/train_dreambooth_lora_flux.py, examples/text_to_image/train_text_to_image_lora_sdxl.py,
examples/cogvideo/train_cogvideox_lora.py (diffusers 0.39 to 0.42).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sizer.architecture.blueprint import Blueprint, Example
from sizer.architecture.frozen_parts import WithFrozenParts, trained_part
from sizer.architecture.peft_adapters import cast
from sizer.architecture.quantizers import import_bitsandbytes
from sizer.base.errors import RequestError, TraceError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.weights import WEIGHTS
from sizer.diffusion.building import build_part, build_pipeline, diffusers_installed, reads_images
from sizer.diffusion.bundle import SCHEDULER, Bundle, Part
from sizer.diffusion.encoding import Encoding, arguments_before, encoding_of
from sizer.diffusion.placing import denoiser_of, load_replaced, place, replace_layers
from sizer.diffusion.work import accelerator, bundle_of, call_of, detected_anew, rounding_notes, sizes_taken
from sizer.tracing.device import Device
from sizer.tracing.meta.accelerators import OnMeta, devices_told, modes_in_callbacks
from sizer.tracing.recorder import Recorder
from sizer.tracing.trace import explain_errors, recording, repeatable

if TYPE_CHECKING:
    from sizer.query.request import Request

_TIMES = ("timestep", "timesteps", "t")  # names of the argument for the amount of noise
_CALLED_ON = "h100-80gb"  # the shapes of a denoiser's arguments are the same on each device


def training_blueprint(request: Request, config: dict | None) -> Blueprint:
    """Return the blueprint of a pipeline's denoiser with the training step of diffusers' example scripts.

    Raises:
        RequestError: The question is about a call of the pipeline, or the pipeline does not support the request.
        ConfigError, BuildError: The pipeline cannot be built; diffusers is not installed.
        TraceError: Its call does not reach the denoiser.
    """
    if request.is_pipeline:
        allowed = "estimate, limits, gpus; other answers are of one module"
        raise RequestError("arch", given=f"diffusers:{request.name}", allowed=allowed, todo="ask for one of these")
    diffusers_installed()
    bundle = bundle_of(request, config)
    if reads_images(bundle):
        raise RequestError(
            "mode",
            given=f"'training' with {bundle.pipeline}",
            allowed="inference, or the training of a pipeline that starts from text",
            todo="ask for mode=inference",
        )
    part = {one.name: one for one in bundle.parts}[denoiser_of(bundle.with_weights)]
    one, two, called = _arguments_of_call(bundle, request)
    latents = next(name for name in inspect.signature(type(called["denoiser"]).forward).parameters if name != "self")

    def example(batch: int, training: bool) -> Example:
        arguments = _scaled(one, two, batch)
        return Example(kwargs=arguments) if encoding is None else encoding.example(arguments, batch)

    def predict(module: nn.Module, example: Example) -> Any:
        return module(**example.kwargs)

    encoding = encoding_of(bundle, request, called, latents)

    def build() -> nn.Module:
        trains = request.train == "all"
        if encoding is None:
            return _with_tables_on_host(build_part(part, torch.float32)).requires_grad_(trains)
        return _with_tables_on_host(encoding.build())

    return Blueprint(
        name=bundle.title,
        class_name=part.kind,
        build=build,
        example=example,
        loss=_loss_of(next((one for one in bundle.parts if one.name == SCHEDULER), None), latents, encoding),
        predict=predict,
        checkpoint=lambda module: trained_part(module).enable_gradient_checkpointing(),
        image_size=called["image_size"],
        notes=_notes(bundle, called, encoding),
        **_quantized(request),
    )


def _notes(bundle: Bundle, called: dict[str, Any], encoding: Encoding | None) -> tuple[str, ...]:
    frames = "" if called["frames"] is None else f", {called['frames']} frames"
    size = "x".join(map(str, called["image_size"] or ())) or "the usual size"
    trains = f"{bundle.pipeline}'s {bundle.denoiser} trains on latents of {size}{frames}, as in diffusers' example scripts."
    if encoding is not None:
        return trains, *called["rounding"], f"Frozen on the device, each step encodes by them: {', '.join(encoding.names)}."
    others = ", ".join(name for name in bundle.with_weights if name != bundle.denoiser)
    return (
        trains,
        *called["rounding"],
        f"Latents and prompts are encoded before the training: {others or 'no other part'} is not on the device.",
    )


def _with_tables_on_host(module: nn.Module) -> nn.Module:
    """Return a module on meta with its unregistered tensors on the host, where `module.to(device)` leaves them."""
    for child in module.modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and value.is_meta:
                setattr(child, name, torch.zeros(value.shape, dtype=value.dtype, device="cpu"))
    return module


def _quantized(request: Request) -> dict[str, Any]:
    """Return the functions of a Blueprint that put quantized layers into a denoiser and load them, if weights are quantized."""
    row = WEIGHTS[request.weights]
    if not row.quantizes:
        return {}
    options = {key: value for key, value in row.config.items() if key != "quant_method"}

    def replaced(module: nn.Module, dtype: str) -> nn.Module:
        import_bitsandbytes(f"weights={request.weights}")
        half = getattr(torch, dtype.removeprefix("amp-"))
        compute = half if request.compute is None else getattr(torch, request.compute)
        replace_layers(trained_part(cast(module, half)), options, half, compute=compute)
        return module

    return {"replace_layers": replaced, "load_quantized": load_replaced}


def _arguments_of_call(bundle: Bundle, request: Request) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the denoiser's arguments (tensors on the host) in a call of one sample and of two, and facts on the call.

    Raises:
        TraceError: The call does not reach the denoiser.
    """
    asked = replace(request, guidance=False, output="latent")
    gpu = find_gpu(_CALLED_ON)
    recorder = Recorder(Device(gpu.backend, gpu.capability))
    host, deferred = recorder.host, recorder.deferred
    found: list[dict[str, Any]] = []

    with ExitStack() as stack:
        for context in (accelerator(gpu), repeatable(), recording(recorder), detected_anew()):
            stack.enter_context(context)
        mode = OnMeta(host, deferred)
        modes = modes_in_callbacks(mode), devices_told(host, deferred)
        with torch.device("meta"), mode, modes[0], modes[1], deferred.setting_up():
            pipe = build_pipeline(bundle, torch.bfloat16, tokens=request.sequence_length)
            place(pipe, dtype=torch.bfloat16, weights={})
        denoiser = pipe.components[bundle.denoiser]
        calls = [call_of(pipe, bundle, asked, batch) for batch in (1, 2)]
        taken = sizes_taken(pipe, bundle, asked, calls[0])
        for call in calls:
            mode = OnMeta(host, deferred)
            with explain_errors(recorder), mode, modes_in_callbacks(mode), devices_told(host, deferred), torch.no_grad():
                if (arguments := arguments_before(denoiser, partial(pipe, **call))) is not None:
                    found.append(arguments)
    if len(found) < len(calls):
        raise TraceError(f"{bundle.pipeline}'s call does not reach its {bundle.denoiser}")
    facts = {"denoiser": denoiser, "call": calls[0], "rounding": rounding_notes(pipe, calls[0], taken), **taken}
    return _on_host(found[0]), _on_host(found[1]), facts


def _on_host(value: Any) -> Any:
    """Return an argument with each tensor replaced by one number on the host, expanded to its shape: 1, or 0.0 in float32."""
    if isinstance(value, Tensor):
        dtype = torch.float32 if value.dtype.is_floating_point else value.dtype
        return torch.tensor(0 if dtype.is_floating_point else 1, dtype=dtype, device="cpu").expand(value.shape)
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item) for item in value)
    return value


def _scaled(one: Any, two: Any, batch: int) -> Any:
    """Return an argument for a batch size, interpolated linearly from the arguments of one sample and of two."""
    if isinstance(one, Tensor):
        sizes = (first + (second - first) * (batch - 1) for first, second in zip(one.shape, two.shape, strict=True))
        return one[(0,) * one.dim()].expand(tuple(sizes))
    if isinstance(one, dict):
        return {key: _scaled(value, two[key], batch) for key, value in one.items()}
    if isinstance(one, (list, tuple)):
        if len(one) != len(two):  # an entry for each sample
            return type(one)(one) * batch
        return type(one)(_scaled(first, second, batch) for first, second in zip(one, two, strict=True))
    return one


def _loss_of(part: Part | None, latents: str, encoding: Encoding | None) -> Callable[[nn.Module, Example], Tensor]:
    """Return the loss of a denoiser whose argument `latents` are noisy latents (a tensor, or a list with one for each sample).

    Flow matching interpolates linearly between latents and noise, and predicts noise minus latents. For another scheduler
    `part`, DDPMScheduler adds noise by its table, and the denoiser predicts the noise or the velocity. accelerate returns the
    prediction in float32.
    """
    kind = diffusers_installed().DDPMScheduler
    matches_flow = part is None or part.kind.startswith("FlowMatch") or bool(part.config.get("use_flow_sigmas"))
    with torch.device("cpu"):
        scheduler = kind() if part is None or matches_flow else kind.from_config(dict(part.config))

    def flow(clean: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randn_like(clean)
        sigmas = (times.to(clean.dtype) / 1000).view(-1, *[1] * (clean.dim() - 1))
        return (1.0 - sigmas) * clean + sigmas * noise, noise - clean

    def diffusion(clean: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        noise, own = torch.randn_like(clean), copy.copy(scheduler)  # the scheduler keeps its table where it was last used
        noisy = own.add_noise(clean, noise, times)
        if scheduler.config.prediction_type == "v_prediction":
            return noisy, own.get_velocity(clean, noise, times)
        return noisy, noise

    def loss(module: nn.Module, example: Example) -> Tensor:
        arguments = dict(example.kwargs)
        if encoding is not None:
            assert isinstance(module, WithFrozenParts), "encoders are beside the denoiser"
            arguments, clean = encoding.encoded(module, example)
        else:
            clean = arguments[latents]
        samples = len(clean)
        device = (clean if isinstance(clean, Tensor) else clean[0]).device
        times = torch.randint(0, 1000, (samples,), device=device)
        add = flow if matches_flow else diffusion
        if isinstance(clean, Tensor):
            noisy, target = add(clean, times)
        else:
            noisy, target = zip(*(add(one, time) for one, time in zip(clean, times, strict=True)), strict=True)
            noisy, target = list(noisy), torch.stack(target)
        if encoding is not None and encoding.encodes_images:
            noisy, target = encoding.packed(noisy), encoding.row.pack(target)
        for name in _TIMES:
            if isinstance(given := arguments.get(name), Tensor) and given.dim() < 2:
                arguments[name] = times.to(given.dtype)
        predicted = module(**{**arguments, latents: noisy})[0]
        predicted = torch.stack([one.float() for one in predicted]) if isinstance(predicted, list) else predicted.float()
        if predicted.shape[1] == 2 * target.shape[1]:  # the second half is a learned variance
            predicted, _ = predicted.chunk(2, dim=1)
        return ((predicted - target.float()) ** 2).reshape(samples, -1).mean(1).mean()

    return loss

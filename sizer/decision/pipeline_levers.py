"""The levers of diffusion pipelines: a row for each thing that can be changed in a call, with the lines of diffusers that do it."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec

from sizer.base.units import format_bytes
from sizer.catalogue.optimizers import BITSANDBYTES
from sizer.catalogue.pipelines import CAST, DENOISERS, SECOND_DENOISER
from sizer.decision.lever_table import Change, Lever, row_of
from sizer.query.request import Request
from sizer.report.census import ArchitectureCounts
from sizer.report.peak import PeakReport
from sizer.tape.tape import FROZEN

# Every VAE divides the sides of a smaller image, and the frames of a shorter video after the first, by these.
SIDE, FRAMES = 32, 8
_GROUPS = """from diffusers.hooks import apply_group_offloading
host, device = torch.device("cpu"), torch.device("cuda")
for name, part in pipe.components.items():
    if isinstance(part, torch.nn.Module) and not name.startswith("vae"):
        apply_group_offloading(part, onload_device=device, offload_device=host, offload_type="leaf_level")
pipe.vae.to(device)"""
_QUANTIZED = """from diffusers import DiffusionPipeline
from diffusers.quantizers import PipelineQuantizationConfig
settings = {{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.{dtype}}}
config = PipelineQuantizationConfig("bitsandbytes_4bit", settings, components_to_quantize={parts})
pipe = DiffusionPipeline.from_pretrained(name, quantization_config=config, torch_dtype=torch.{dtype})"""


def _of_pipelines(change: Change) -> Change:
    return lambda request, known: change(request, known) if request.is_pipeline else None


def _quantized(request: Request) -> dict[str, str]:
    """Return how parts are held that are not in the pipeline's dtype."""
    named = {} if request.weights in ("checkpoint", "full") else {"": request.weights}
    return named | dict(request.part_weights)


def _offloaded(offload: str) -> Change:
    order = ("none", "model", "group-leaf", "sequential")

    def change(request: Request, known: ArchitectureCounts) -> Request | None:
        now = request.offloading.partition(":")[0]
        if "int8" in _quantized(request).values() or now not in order or order.index(offload) <= order.index(now):
            return None
        return replace(request, offloading=offload)

    return change


def _decoded(how: str) -> Change:
    def change(request: Request, known: ArchitectureCounts) -> Request | None:
        kept = request.vae or ()
        if how in kept or (how == "slicing" and request.batches == (1,)):
            return None
        return replace(request, vae=(*kept, how))

    return change


def _held(how: str) -> Change:
    def change(request: Request, known: ArchitectureCounts) -> Request | None:
        roots = {row.path.partition(".")[0] for row in known.census.modules}
        parts = [name for name in (*DENOISERS, SECOND_DENOISER) if name in roots]
        if not parts or {"", *parts} & _quantized(request).keys() or (how != CAST and not find_spec(BITSANDBYTES)):
            return None
        return replace(request, part_weights=(*request.part_weights, *((part, how) for part in parts)))

    return change


def _smaller(request: Request, known: ArchitectureCounts) -> Request | None:
    if known.image_size is None:
        return None
    height, width = (side // 2 // SIDE * SIDE for side in known.image_size)
    return replace(request, image_size=(height, width)) if height and width else None


def _shorter(request: Request, known: ArchitectureCounts) -> Request | None:
    if known.frames is None or known.frames <= FRAMES + 1:
        return None
    return replace(request, frames=(known.frames - 1) // 2 // FRAMES * FRAMES + 1)


def _denoisers(request: Request) -> list[str]:
    """Return the denoisers with weights changed by a lever."""
    return [part for part, _ in request.part_weights if part in (*DENOISERS, SECOND_DENOISER)]


def _cast_code(request: Request) -> str:
    line = "pipe.{}.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.{})"
    return "\n".join(line.format(part, request.dtypes[0]) for part in _denoisers(request))


def _quantized_code(request: Request) -> str:
    return _QUANTIZED.format(parts=json.dumps(_denoisers(request)), dtype=request.dtypes[0])


PIPELINE_LEVERS: tuple[Lever, ...] = (
    row_of(
        "vae-slicing", "slicing", 1, "VAE slicing", "time: images are decoded one at a time",
        "pipe.vae.enable_slicing()", _of_pipelines(_decoded("slicing")),
    ),
    row_of(
        "vae-tiling", "tiling", 2, "VAE tiling", "time; seams between tiles are blended",
        "pipe.vae.enable_tiling()", _of_pipelines(_decoded("tiling")),
    ),
    row_of(
        "offload-model", "offload", 2, "Model offload", "time: the device waits for each part",
        "pipe.enable_model_cpu_offload()  # instead of pipe.to('cuda')", _of_pipelines(_offloaded("model")),
    ),
    row_of(
        "offload-group", "offload", 2, "Group offload, layer by layer", "time: the device waits for each layer",
        _GROUPS, _of_pipelines(_offloaded("group-leaf")),
    ),
    row_of(
        "offload-sequential", "offload", 3, "Sequential offload", "much time: the device waits for each layer",
        "pipe.enable_sequential_cpu_offload()  # instead of pipe.to('cuda')", _of_pipelines(_offloaded("sequential")),
    ),
    row_of(
        CAST, "held", 3, "The denoiser's weights in float8", "precision of weights; time to cast each layer",
        _cast_code, _of_pipelines(_held(CAST)),
    ),
    row_of(
        "nf4", "held", 4, "The denoiser's weights in 4 bits (NF4)", "more precision of weights; needs bitsandbytes",
        _quantized_code, _of_pipelines(_held("nf4")),
    ),
    row_of(
        "smaller", "size", 5, lambda request: "Images of {} × {}".format(*(request.image_size or (0, 0))), "half the resolution",
        lambda request: "pipe(prompt, height={}, width={})".format(*(request.image_size or (0, 0))), _of_pipelines(_smaller),
    ),
    row_of(
        "shorter", "frames", 5, lambda request: f"Videos of {request.frames} frames", "half the length",
        lambda request: f"pipe(prompt, num_frames={request.frames})", _of_pipelines(_shorter),
    ),
)  # fmt: skip
"""In the order in which they are shown."""


def describe_slicing(request: Request) -> str:
    """Return why VAE slicing changes nothing; empty if it may change something."""
    if not request.is_pipeline or request.batches != (1,) or "slicing" in (request.vae or ()):
        return ""
    return "VAE slicing changes nothing at batch 1: it decodes the images of a batch one at a time."


def describe_part(found: PeakReport) -> str:
    """Return a sentence on the part that works at the peak, with its weights and other tensors."""
    weights = sum(found.at_peak.get(name, 0) for name in ("parameter", FROZEN, "buffer"))
    others = found.allocated_bytes - weights
    return f"{found.phase} has the peak: {format_bytes(weights)} of weights and {format_bytes(others)} of other tensors."


def remedies(part: str) -> tuple[Lever, ...]:
    """Return the levers that may lower a peak while a part works."""
    if part.startswith("vae"):
        keys: tuple[str, ...] = ("vae-tiling", "offload-model", "offload-sequential")
    elif part in (*DENOISERS, SECOND_DENOISER):
        keys = (CAST, "nf4", "offload-model", "offload-sequential")
    else:  # text encoders, and the load
        keys = ("offload-model", "offload-sequential")
    return tuple(lever for lever in PIPELINE_LEVERS if lever.key in keys)

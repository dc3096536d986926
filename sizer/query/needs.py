"""Conditions of keys on the rest of the question. A condition returns an empty text if the key applies, else the missing part.

Each function is the `needs` of rows in sizer.query.keys: a function of a request, or a factory of such functions.
"""

from __future__ import annotations

from collections.abc import Callable

from sizer.catalogue.adapters import ADAPTERS, SCRIPT
from sizer.catalogue.modes import MODES
from sizer.catalogue.optimizers import BITSANDBYTES
from sizer.catalogue.parallel import PARALLELS
from sizer.catalogue.recipes import GRPO, WITH_REFERENCE
from sizer.catalogue.serving import ENGINES
from sizer.catalogue.sources import SOURCES
from sizer.catalogue.weights import WEIGHTS
from sizer.query.request import Request


def training(request: Request) -> str:
    return "" if MODES[request.mode].trains else "mode=training"


def generation(request: Request) -> str:
    return "" if MODES[request.mode].generates else "mode=generate"


def completions(request: Request) -> str:
    """Require a mode or an objective that generates tokens."""
    return "" if MODES[request.mode].generates or request.objective == GRPO else "mode=generate or objective=grpo"


def serving(request: Request) -> str:
    return "" if MODES[request.mode].serves else "mode=serve"


def of_engines(key: str) -> Callable[[Request], str]:
    """Require a server that takes the key."""
    taking = [row.key for row in ENGINES.values() if key in row.takes]

    def needs(request: Request) -> str:
        return serving(request) or ("" if request.engine in taking else f"engine={' or '.join(taking)}")

    return needs


def unserved(needs: Callable[[Request], str]) -> Callable[[Request], str]:
    """Require another mode than serve, and the condition of that mode. Servers have their own scheduler."""
    others = " or ".join(f"mode={mode.key}" for mode in MODES.values() if not mode.serves)
    return lambda request: others if MODES[request.mode].serves else needs(request)


def served_or(key: str, needs: Callable[[Request], str]) -> Callable[[Request], str]:
    """Require a server that takes the key, or another mode with its condition."""
    of_server = of_engines(key)
    return lambda request: of_server(request) if MODES[request.mode].serves else needs(request)


def of_adapters(key: str) -> Callable[[Request], str]:
    """Require an adapter that takes the key."""

    def needs(request: Request) -> str:
        if request.train != "adapter":
            return "train=adapter"
        if key == "adapter" or key in ADAPTERS[request.adapter].arguments:
            return ""
        return f"adapter={' or '.join(row.key for row in ADAPTERS.values() if key in row.arguments)}"

    return needs


def of_targets(request: Request) -> str:
    """Require an adapter that takes `targets`, and a pipeline for the layers of diffusers' script."""
    if (needs := of_adapters("targets")(request)) or SCRIPT not in request.adapter_targets or request.is_of_pipeline:
        return needs
    return "arch=diffusers:<pipeline>"


def of_saved_modules(request: Request) -> str:
    """Require a PEFT model, which trains whole modules together with the adapter."""
    needs = of_plain_module(request) or of_adapters("adapter")(request)
    if needs or not ADAPTERS[request.adapter].learns_prompt:
        return needs
    return f"adapter={' or '.join(row.key for row in ADAPTERS.values() if not row.learns_prompt)}"


def of_parallels(key: str) -> Callable[[Request], str]:
    """Require a form of parallelism that takes the key."""
    taking = [row.key for row in PARALLELS.values() if key in row.keys]

    def needs(request: Request) -> str:
        return "" if request.parallel in taking else f"parallel={' or '.join(taking)}"

    return needs


def of_split(key: str, *, trains: bool = False) -> Callable[[Request], str]:
    """Require tensor parallel, and training if `trains`, for a key that shards more tensors across its ranks."""
    parallels = of_parallels(key)

    def needs(request: Request) -> str:
        return parallels(request) or ("tp=8" if request.tp == 1 else training(request) if trains else "")

    return needs


def of_context(request: Request) -> str:
    """Require training with an attention that PyTorch's context parallel supports."""
    return (
        of_parallels("cp")(request)
        or training(request)
        or ("" if request.attention == "sdpa" else "attention=sdpa")
        or ("" if request.train != "adapter" else "train=all or train=head")
        or ("sp=0" if request.sp else "")  # transformers' mask would not match the tokens of the ranks
    )


def of_pipelines(request: Request) -> str:
    """Require pipeline parallel."""
    return "" if request.pp > 1 else "pp=2 or more"


def of_diffusion(request: Request) -> str:
    """Require a diffusion pipeline."""
    source = SOURCES.get(request.source)
    return "" if source is not None and source.trace else "arch=diffusers:<preset>"


def of_pipeline_calls(request: Request) -> str:
    """Require the call of a diffusion pipeline. Training runs only the denoiser."""
    return of_diffusion(request) or ("mode=inference" if MODES[request.mode].trains else "")


def of_denoiser_adapters(request: Request) -> str:
    """Require the training of a diffusion pipeline's adapter."""
    return of_diffusion(request) or training(request) or ("" if request.train == "adapter" else "train=adapter")


def of_offload(request: Request) -> str:
    """Require FSDP2 for the values 0 and 1 of `offload`, and a diffusion pipeline for all further values."""
    if request.offloading != "none":
        return of_pipeline_calls(request)
    return of_parallels("offload")(request) if request.offload or of_diffusion(request) else ""


def of_group_offload(request: Request) -> str:
    """Require group offloading."""
    needs = of_pipeline_calls(request)
    return needs or ("" if request.offloading.startswith("group") else "offload=group-leaf or offload=group-block:1")


def once_passed(request: Request) -> str:
    """Require a mode with compiled steps that were compared with the null driver."""
    mode = MODES[request.mode]
    return "mode=training or mode=inference" if mode.generates or mode.serves else ""


def of_compiled(request: Request) -> str:
    """Require torch.compile."""
    return "compile=default or compile=reduce-overhead" if request.compile is None else ""


def of_compiled_training(request: Request) -> str:
    """Require a compiled backward pass."""
    return training(request) or of_compiled(request)


def four_bits(request: Request) -> str:
    """Require 4-bit weights."""
    row = WEIGHTS[request.weights]
    return "" if row.has_4_bits else f"weights={' or '.join(one.key for one in WEIGHTS.values() if one.has_4_bits)}"


def quantized_adapters(request: Request) -> str:
    """Require an adapter on quantized weights."""
    if request.train != "adapter":
        return "train=adapter"
    row = WEIGHTS[request.weights]
    return "" if row.package == BITSANDBYTES or row.key == "checkpoint" else "weights quantized by bitsandbytes"


def of_one_device(request: Request) -> str:
    """Require one device. The recipe was not compared with PyTorch on several ranks."""
    return training(request) or of_plain_module(request) or ("" if request.parallel == "none" else "parallel=none")


def of_replicas(request: Request) -> str:
    """Require whole samples on each rank. Such steps of the recipe were compared with PyTorch."""
    taking = [row.key for row in PARALLELS.values() if row.takes_recipes]
    if needs := training(request) or of_plain_module(request):
        return needs
    if request.parallel not in taking:
        return f"parallel={' or '.join(taking)}"
    return next((f"{key}=1" for key in ("tp", "cp", "pp") if getattr(request, key) > 1), "")


def of_autocast(request: Request) -> str:
    """Require weights that Accelerate does not cast to float32, as it does with trainable weights under FSDP2."""
    trains = PARALLELS[request.parallel].shards and request.train != "adapter"
    return of_replicas(request) or ("parallel=none or ddp, or train=adapter, or dtype=amp-bfloat16 without it" if trains else "")


def of_language_models(request: Request) -> str:
    """Require a language model of transformers."""
    return of_replicas(request) or ("a language model of transformers" if of_transformers(request) else "")


def of_transformers(request: Request) -> str:
    """Require a model of transformers."""
    source = SOURCES.get(request.source)
    return "" if source is None or source.package == "transformers" else "a model of transformers"


def of_preferences(request: Request) -> str:
    """Require an objective with a reference model."""
    taking = " or ".join(f"objective={objective}" for objective in WITH_REFERENCE)
    return of_language_models(request) or ("" if request.objective in WITH_REFERENCE else taking)


def of_groups(request: Request) -> str:
    """Require objective=grpo."""
    return of_language_models(request) or ("" if request.objective == GRPO else "objective=grpo")


def of_plain_module(request: Request) -> str:
    """Require an architecture of one module."""
    return "an architecture of one module" if request.source and not of_diffusion(request) else ""


def one_stage(request: Request) -> str:
    """Require a training loop without a pipeline schedule."""
    return training(request) or ("" if request.pp == 1 else "pp=1")


def of_ranks(request: Request) -> str:
    """Require training, or a mode that the form of parallelism supports."""
    mode, row = MODES[request.mode], PARALLELS[request.parallel]
    if mode.trains or (row.generates if mode.generates else row.infers):
        return ""
    return "mode=training or mode=inference" if row.infers else "mode=training"


def of_weights(request: Request) -> str:
    """Require that quantized weights are not trained."""
    if request.part_weights:
        return of_diffusion(request)
    if request.server_weights is not None:
        return of_engines("weights")(request)
    if MODES[request.mode].serves:
        return of_engines("weights")(request)
    trained = MODES[request.mode].trains and request.train != "adapter"
    return "train=adapter or mode=inference" if WEIGHTS[request.weights].quantizes and trained else ""

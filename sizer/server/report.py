"""From a request with mode=serve to its report: the architecture is counted on meta, the profile run traced. Imports torch.

The plan itself is arithmetic (`sizer.serving`). What was counted and traced is kept, so that other flags need no torch but the
import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from sizer.architecture.census import take_census
from sizer.architecture.loaded import as_loaded
from sizer.catalogue.gpus import Gpu, read_rows
from sizer.catalogue.presets import find_preset
from sizer.catalogue.serving import AUTO
from sizer.cautions import versions
from sizer.config_json import read_config
from sizer.kept import Kept, NothingKept, ScopedResults, keep, read_kept
from sizer.memory.census import Census
from sizer.memory.report import Report, build_report
from sizer.memory.served import Served
from sizer.model import COUNTED_IN, Model, Progress
from sizer.request import Request, format_query
from sizer.scopes import module_scope_of, served_module
from sizer.server.model import read_architecture
from sizer.server.profile import trace_profile
from sizer.serving.answer import answer_vllm, longest_flags
from sizer.serving.architecture import Architecture
from sizer.serving.flags import Flags, resolve_flags
from sizer.serving.llama_cpp import answer_llama, resolve_llama
from sizer.serving.plan import Profile, Profiler
from sizer.serving.sglang import answer_sglang, resolve_sglang
from sizer.serving.words import headline
from sizer.tracing.device import Device

USUAL_PROCESSORS = 108  # of a device whose number is not known


def serve(
    request: Request,
    gpu: Gpu,
    *,
    config: Mapping[str, Any] | None = None,
    kept: Kept | None = None,
    progress: Progress | None = None,
    echo: Mapping[str, object] | None = None,
) -> Report:
    """Return the report of a request with mode=serve: its `serve` has the figures, in bytes.

    Args:
        request: What is asked for.
        gpu: The device.
        config: The parsed config.json for the sources "hub" and "config".
        kept: What was counted and traced before.
        progress: Called with each line of progress.
        echo: The request's values as understood.

    Raises:
        RequestError: The model has no KV cache, or a flag does not fit it.
        ConfigError: The config cannot be read.
        BuildError: The architecture cannot be built.
        TraceError: The profile run cannot be traced.
    """
    show = progress or (lambda text: None)
    store = ScopedResults(NothingKept() if kept is None else kept, module_scope_of(request))
    architecture, census = _count(request, gpu, config, store, show)
    show("planning the server")
    served = _answer(request, architecture, gpu, store)
    return build_report(
        query=format_query(replace(request, focus=None), complete=True),
        versions=versions(),
        census=census,
        columns={},
        gpu=gpu,
        mode=request.mode,
        request=echo,
        notes=(headline(served),),
        cautions=gpu.cautions,
        uncounted=(*architecture.uncounted, *UNCOUNTED),
        serve=served,
    )


UNCOUNTED = ("speculative decoding, LoRA adapters, and CPU offload of a server",)


def _answer(request: Request, architecture: Architecture, gpu: Gpu, store: Kept) -> Served:
    model, auto = _model_name(request), request.max_model_len == AUTO
    if request.engine == "sglang":
        flags = resolve_sglang(request, architecture, gpu)
        return answer_sglang(architecture, flags, gpu, model=model, want=request.want, auto=auto)
    if request.engine == "llama.cpp":
        flags = resolve_llama(request, architecture)
        return answer_llama(architecture, flags, gpu, model=model, want=request.want, auto=auto)
    flags = resolve_flags(request, architecture, gpu, processors_of(gpu))
    profiler = _profiler(architecture, gpu, store)
    if auto:
        flags = longest_flags(architecture, flags, profiler, gpu)
    return answer_vllm(architecture, flags, profiler, gpu, model=model, want=request.want)


def _count(
    request: Request, gpu: Gpu, config: Mapping[str, Any] | None, store: Kept, show: Progress
) -> tuple[Architecture, Census]:
    """Return the architecture and its counts, as kept or from the module on meta."""
    architecture = read_kept(store, "served architecture", Architecture, "architecture")
    census = read_kept(store, "served census", Census, "census")
    if architecture is None or census is None:
        module_request = served_module(request)
        loaded = as_loaded(module_request, gpu, config)
        device = Device(gpu.backend, gpu.capability)
        model = Model(module_request, loaded, device, config=config, kept=NothingKept(), progress=show)
        module = model.module(COUNTED_IN)
        census = take_census(module, name=model.blueprint.name)
        architecture = read_architecture(module, model.blueprint.name, _checkpoint(request, config))
        keep(store, "served architecture", architecture)
        keep(store, "served census", census)
    return architecture, census


def _checkpoint(request: Request, config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the checkpoint's config.json."""
    if request.source == "hf":
        return find_preset(request.name).config
    if config is None and request.config is not None:
        return read_config(request.config.encode())
    return config or {}


def _profiler(architecture: Architecture, gpu: Gpu, store: Kept) -> Profiler:
    """Return a function that traces the profile run, or finds it kept."""

    @cache
    def traced(flags: Flags) -> Profile:
        name = f"served profile {gpu.backend} {gpu.capability} {flags}"
        found = read_kept(store, name, Profile, "profile")
        if found is None:
            found = trace_profile(architecture, flags, gpu)
            keep(store, name, found)
        return found

    return lambda flags: traced(_profiled(flags))


def _profiled(flags: Flags) -> Flags:
    """Return the flags with those at one value that the profile run does not depend on."""
    return replace(
        flags, util=1.0, max_model_len=1, layout=None, kv="auto", pp=1, kv_bytes=None, used_bytes=0, total_bytes=0, marlin=False
    )


def processors_of(gpu: Gpu) -> int:
    """Return the multiprocessors of a device, of which the Triton sampler keeps a row each."""
    found = next((row["multiprocessors"] for row in read_rows() if row["key"] == gpu.key), "")
    return int(found) if found else USUAL_PROCESSORS


def _model_name(request: Request) -> str:
    """Return what a server's command calls the model."""
    if request.source == "hf":
        return find_preset(request.name).hub_id
    return request.name or "MODEL"

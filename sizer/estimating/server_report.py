"""From a request with mode=serve to its report: the architecture is counted on meta, the profile run traced. Imports torch.

The plan itself is arithmetic (`sizer.serving`). Counts and traces are cached, so that other flags need only the import of
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from sizer.architecture.loading import resolve_weights
from sizer.architecture.module_census import take_census
from sizer.base.config_json import read_config
from sizer.catalogue.gpus import Gpu, read_rows
from sizer.catalogue.heads import PACKED, draft_config, draft_method_of
from sizer.catalogue.modes import TEXT
from sizer.catalogue.presets import find_preset
from sizer.catalogue.serving import AUTO, DRAFT_MODEL
from sizer.estimating.cautions import versions
from sizer.estimating.model import COUNTED_IN, Model, Progress
from sizer.estimating.scopes import module_scope_of, served_module
from sizer.estimating.server_model import read_architecture
from sizer.estimating.server_profile import trace_profile
from sizer.estimating.store import EmptyStore, ResultStore, ScopedResults, keep, read_value
from sizer.query.request import Request
from sizer.query.text import format_query
from sizer.report.census import Census
from sizer.report.report import Report, build_report
from sizer.report.served import Served
from sizer.serving.answer import answer_vllm, longest_flags
from sizer.serving.architecture import Architecture
from sizer.serving.drafts import with_draft
from sizer.serving.flags import LARGEST_GRAPH, Flags, resolve_flags
from sizer.serving.llama_cpp import Layout, answer_llama, resolve_llama
from sizer.serving.plan import Profile
from sizer.serving.sglang import answer_sglang, resolve_sglang, with_drafter
from sizer.serving.words import headline
from sizer.tracing.device import Device

USUAL_PROCESSORS = 108  # of a device with an unknown number


def serve(
    request: Request,
    gpu: Gpu,
    *,
    config: dict[str, Any] | None = None,
    store: ResultStore | None = None,
    progress: Progress | None = None,
    echo: Mapping[str, object] | None = None,
) -> Report:
    """Return the report of a request with mode=serve: its `serve` has the figures, in bytes.

    Args:
        request: The request.
        gpu: The device.
        config: The parsed config.json for the sources "hub" and "config".
        store: Earlier counts and traces.
        progress: Called with each line of progress.
        echo: The request's values as understood.

    Raises:
        RequestError: The model has no KV cache, or a flag does not fit it.
        ConfigError: The config cannot be read.
        BuildError: The architecture cannot be built.
        TraceError: The profile run cannot be traced.
    """
    planner = Planner(request, gpu, config=config, store=store, progress=progress)
    if progress is not None:
        progress("planning the server")
    served = planner.plan(request, gpu)
    return build_report(
        query=format_query(replace(request, focus=None), complete=True),
        versions=versions(),
        census=planner.census,
        columns={},
        gpu=gpu,
        mode=request.mode,
        request=echo,
        notes=(headline(served),),
        cautions=gpu.cautions,
        uncounted=planner.architecture.uncounted,
        serve=served,
    )


class Planner:
    """Plans of servers of one architecture, which is counted once, on any device and with any flags.

    Args:
        request: A request for the architecture; its flags do not matter.
        gpu: A device of the backend on which the architecture is built.
        config: The parsed config.json for the sources "hub" and "config".
        store: Earlier counts and traces.
        progress: Called with each line of progress.

    Raises:
        RequestError: The model has no KV cache.
        ConfigError: The config cannot be read.
        BuildError: The architecture cannot be built.
    """

    def __init__(
        self,
        request: Request,
        gpu: Gpu,
        *,
        config: dict[str, Any] | None = None,
        store: ResultStore | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._store = ScopedResults(EmptyStore() if store is None else store, module_scope_of(request))
        self._profiles: dict[str, Profile] = {}
        self._drafts: dict[str, Architecture] = {}
        self._show = progress or (lambda text: None)
        self.architecture, self.census = _count(request, gpu, config, self._store, self._show)

    def plan(self, request: Request, gpu: Gpu, *, with_levers: bool = True) -> Served:
        """Return the memory of a server on a device, in bytes; without levers fewer plans are made.

        Raises:
            RequestError: A flag does not fit the model.
            TraceError: The profile run cannot be traced.
        """
        architecture, model = self.architecture, _model_name(request)
        asked: dict[str, Any] = {"model": model, "want": request.want, "with_levers": with_levers}
        auto = request.max_model_len == AUTO
        if request.engine == "sglang":
            resolved = resolve_sglang(request, architecture, gpu)
            architecture = with_drafter(architecture, resolved, gpu, self._draft_model(request, gpu))
            return answer_sglang(architecture, resolved, gpu, auto=auto, **asked)
        if request.engine == "llama.cpp":
            layout = Layout(architecture, shares_memory=gpu.backend != "cuda", copies_cache=gpu.backend == "cuda")
            return answer_llama(layout, resolve_llama(request, layout), gpu, auto=auto, **asked)
        if request.inputs == TEXT:
            architecture = architecture.reading_text()
        flags = resolve_flags(request, architecture, gpu, processors_of(gpu))
        architecture = with_draft(architecture, flags, self._draft_model(request, gpu))
        profiler = partial(self._profile, architecture, gpu)
        if auto:
            flags = longest_flags(architecture, flags, profiler, gpu)
        return answer_vllm(architecture, flags, profiler, gpu, **asked)

    def _draft_model(self, request: Request, gpu: Gpu) -> Architecture | None:
        """Return the draft model of a request's speculative decoding, None for other methods."""
        name = request.speculative[0] if request.speculative else ""
        if draft_method_of(name) != DRAFT_MODEL:
            return None
        if name not in self._drafts:
            asked = replace(request, source="hf", name=name, revision=None, config=None, head=None)
            if name.startswith(PACKED):
                asked = replace(asked, source="config", name="", config=json.dumps(draft_config(name)))
            self._drafts[name], _ = _count(asked, gpu, None, self._store, self._show, scope=f" of the draft {name}")
        return self._drafts[name]

    def _profile(self, architecture: Architecture, gpu: Gpu, flags: Flags) -> Profile:
        """Return the bytes of the profile run, traced once for all devices and flags for which they are equal."""
        profiled = profiled_flags(flags, architecture)
        name = f"served profile {gpu.backend} {gpu.capability} {profiled}"
        if name not in self._profiles:
            found = read_value(self._store, name, Profile, "profile")
            if found is None:
                found = trace_profile(architecture, profiled, gpu)
                keep(self._store, name, found)
            self._profiles[name] = found
        return self._profiles[name]


def _count(
    request: Request, gpu: Gpu, config: dict[str, Any] | None, store: ResultStore, show: Progress, scope: str = ""
) -> tuple[Architecture, Census]:
    """Return the architecture and its counts, as kept or from the module on meta. `scope` is part of the names of kept results."""
    architecture = read_value(store, f"served architecture{scope}", Architecture, "architecture")
    census = read_value(store, f"served census{scope}", Census, "census")
    if architecture is None or census is None:
        module_request = served_module(request)
        loaded = resolve_weights(module_request, gpu, config)
        device = Device(gpu.backend, gpu.capability)
        model = Model(module_request, loaded, device, config=config, store=EmptyStore(), progress=show)
        module = model.module(COUNTED_IN)
        census = take_census(module, name=model.blueprint.name)
        architecture = read_architecture(module, model.blueprint.name, _checkpoint(request, config))
        keep(store, f"served architecture{scope}", architecture)
        keep(store, f"served census{scope}", census)
    return architecture, census


def _checkpoint(request: Request, config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the checkpoint's config.json."""
    if request.source == "hf":
        return find_preset(request.name).config
    if config is None and request.config is not None:
        return read_config(request.config.encode())
    return config or {}


def profiled_flags(flags: Flags, architecture: Architecture) -> Flags:
    """Return the flags with those at one value that the profile run does not depend on.

    The longest request bounds how many images are encoded at once.
    """
    length = 1 if architecture.tower is None else flags.max_model_len
    marlin = architecture.experts > 0 and flags.experts_on_marlin
    plain = replace(flags, layout=None, experts=None, kv="auto", marlin=marlin, prefix_caching=True, kv_bytes=None, used_bytes=0)
    rank = flags.lora_rank if flags.loras else 1
    plain = replace(plain, loras=min(1, flags.loras), lora_rank=rank, lora_sharded=False, offload_bytes=0)
    plain = replace(plain, draft_tokens=min(1, flags.draft_tokens), largest_graph=LARGEST_GRAPH)
    return replace(plain, util=1.0, max_model_len=length, pp=1, total_bytes=0)


def processors_of(gpu: Gpu) -> int:
    """Return the number of multiprocessors of a device; the Triton sampler keeps a row for each."""
    found = next((row["multiprocessors"] for row in read_rows() if row["key"] == gpu.key), "")
    return int(found) if found else USUAL_PROCESSORS


def _model_name(request: Request) -> str:
    """Return the model's name in a server's command."""
    if request.source == "hf":
        return find_preset(request.name).hub_id
    return request.name or "MODEL"

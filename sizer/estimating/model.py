"""The model of a request on meta: built once, counted, and lent to every request that is about the same module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

from torch import nn

from sizer.architecture.blueprint import Blueprint
from sizer.architecture.frozen_parts import policy_of
from sizer.architecture.loading import ResolvedWeights
from sizer.architecture.module_census import take_census
from sizer.base.errors import RequestError, TraceError
from sizer.catalogue.linear_attention import is_installed
from sizer.catalogue.modes import MODES
from sizer.catalogue.parallel import PARALLELS
from sizer.catalogue.recipes import LM
from sizer.catalogue.sources import SOURCES
from sizer.distributed.parallel_plan import Plan
from sizer.distributed.sharding import check_plan
from sizer.estimating.scopes import module_choices_of
from sizer.estimating.store import ResultStore, keep_depths, read_depths
from sizer.estimating.work import blueprint_of, plan_of
from sizer.query.request import Request
from sizer.recipes.evaluation import check_evaluation
from sizer.recipes.liger import check_liger, has_layers
from sizer.recipes.linear_attention import check_linear_attention, has_linear_attention, notes_on
from sizer.recipes.losses import change_of, check_loss, losses_beside, vocabulary_of
from sizer.recipes.offloading import check_offloading
from sizer.recipes.preferences import check_objective
from sizer.report.census import ArchitectureCounts
from sizer.tracing.batch_lines import FITTED_AT
from sizer.tracing.depth import DeepTraces, Repeated, find_repeated
from sizer.tracing.device import Device
from sizer.tracing.modules import Loading
from sizer.tracing.trace import build, build_loaded

COUNTED_IN = "bfloat16"  # dtype to count quantized modules in; their other weights have the requested dtype

Progress = Callable[[str], None]


class Model:
    """A blueprint and its modules, each made when first needed: one module for all dtypes, unless it is quantized.

    Requests that agree on `module_choices_of` (sizer.estimating.scopes) share one Model.
    """

    def __init__(
        self,
        request: Request,
        loaded: ResolvedWeights,
        device: Device,
        *,
        config: dict | None,
        store: ResultStore,
        progress: Progress,
    ) -> None:
        self._request, self._loaded, self._device, self._config = request, loaded, device, config
        self._store, self._progress = store, progress
        self._modules: dict[str, tuple[nn.Module, Loading | None]] = {}
        self._deep_traces: dict[tuple, DeepTraces] = {}  # by how the module is spread over ranks

    @cached_property
    def blueprint(self) -> Blueprint:
        """Return the blueprint, which says how the module is built and called.

        Raises RequestError, ConfigError and BuildError.
        """
        self._progress("building the model on meta")
        return blueprint_of(self._request, self._config, self._loaded)

    def module(self, dtype: str) -> nn.Module:
        """Return the module for the traces of a dtype."""
        return self.built(dtype)[0]

    def built(self, dtype: str) -> tuple[nn.Module, Loading | None]:
        """Return the module for the traces of a dtype; for a quantized one, also how it was loaded."""
        blueprint, checkpointing = self.blueprint, self._request.checkpointing
        key = "" if blueprint.replace_layers is None else dtype
        if key not in self._modules:
            if blueprint.replace_layers is None or PARALLELS[self._request.parallel].splits_fp8:
                # Tensor parallel splits weights before they are on the device: each rank's part arrives unchanged.
                self._modules[key] = build(blueprint, checkpointing=checkpointing, dtype=dtype), None
            else:
                self._modules[key] = build_loaded(
                    blueprint,
                    checkpointing=checkpointing,
                    dtype=dtype,
                    device=self._device,
                    tell_frozen=self._request.train != "all",
                )
        return self._modules[key]

    def count(self, request: Request) -> ArchitectureCounts:
        """Return the counts for a request on this model. Raises RequestError, ConfigError and BuildError."""
        blueprint, whole = self.blueprint, self.module(COUNTED_IN)
        module = policy_of(whole)
        if (plan := plan_of(request)) is not None:
            check_plan(module, plan, blueprint.sequence_length)
        check_loss(request.loss, module)
        check_objective(request.objective, module)
        check_liger(request.liger, module)
        check_linear_attention(request.fla, module)
        check_offloading(request.activations, of_optimizer=request.optimizer_offload)
        check_evaluation(request.evaluate, module)
        vocabulary = vocabulary_of(module) if _is_fine_tuning(request) and request.objective == LM else None
        counted = ArchitectureCounts(
            census=take_census(module, name=blueprint.name),
            sequence_length=blueprint.sequence_length,
            image_size=blueprint.image_size,
            notes=(
                *(*blueprint.notes, *blueprint.describe(whole)),
                *(*losses_beside(request.loss, vocabulary), *notes_on(request.fla, module)),
            ),
            uncounted=blueprint.uncounted,
            vocabulary=vocabulary,
            changes_logits=vocabulary is not None and change_of(module) is not None,
            has_liger=_is_fine_tuning(request) and has_layers(module),
            has_linear_attention=is_installed() and has_linear_attention(module),
            smallest=request.batch_step,
        )
        try:
            self.check_batch_of_one(request.mode)
        except RequestError as error:
            return replace(counted, smallest=FITTED_AT[0], refusal=str(error))
        return counted

    def check_batch_of_one(self, mode: str) -> None:
        """Raise the model's own RequestError if it refuses a batch of 1 (for example batch norm over a single value)."""
        try:
            self.blueprint.example(1, MODES[mode].trains)
        except TraceError:
            return  # there are no inputs at all: each dtype's trace says why

    def deep_traces(self, plan: Plan | None) -> DeepTraces:
        """Return the traces of fewer layers of the module, empty if that is not possible.

        A quantized module was loaded completely: each of its traces begins with all loaded weights. A stage of a pipeline has
        few layers. DDP's buckets, and the parameters that ZeRO-1 assigns to each rank, end when they are full, in the middle of
        layers. A module with few layers does not show where.
        """
        kind = () if plan is None else (plan.parallel, plan.tp > 1, plan.sp, plan.lp, plan.cp > 1)
        if kind not in self._deep_traces:
            possible = self._request.objective == LM and (plan is None or (plan.splits and plan.pp == 1))
            name = f"depths {kind} {module_choices_of(self._request)}"
            shown, show = read_depths(self._store, name), partial(keep_depths, self._store, name)
            self._deep_traces[kind] = DeepTraces(
                self.repeated if possible else (), one_by_one=self.blueprint.one_by_one, shown=shown, show=show
            )
        return self._deep_traces[kind]

    @cached_property
    def repeated(self) -> tuple[tuple[Repeated, ...], ...]:
        """The lists of the module's layers that are worth being traced with fewer."""
        return find_repeated(self.module(COUNTED_IN))


def _is_fine_tuning(request: Request) -> bool:
    """Return True if a request may choose the loss of a language model."""
    transformers = SOURCES[request.source].package == "transformers"
    whole = PARALLELS[request.parallel].takes_recipes and request.tp * request.cp * request.pp == 1
    return MODES[request.mode].trains and transformers and whole and request.compile is None

"""Turn a request into the work to trace, by dtype."""

from __future__ import annotations

from dataclasses import replace

from sizer.architecture import make_blueprint
from sizer.architecture.blueprint import Blueprint
from sizer.architecture.loading import ResolvedWeights
from sizer.catalogue.modes import DEFAULT
from sizer.catalogue.parallel import PARALLELS
from sizer.catalogue.recipes import ACCELERATED, AUTO, LM, is_contrastive, is_library, reference_of
from sizer.distributed.parallel_plan import Plan
from sizer.query.keys import KEYS
from sizer.query.request import Request, scope_of
from sizer.recipes.linear_attention import kernel_packages_hidden
from sizer.recipes.preferences import with_objective
from sizer.tracing.steps import Work


def blueprint_of(request: Request, config: dict | None, loaded: ResolvedWeights) -> Blueprint:
    """Return the architecture that a request names, with its weights as they are loaded, in a step of the request's objective.

    Raises:
        RequestError, ConfigError, BuildError: As `sizer.architecture.make_blueprint`; a package of the objective is not installed.
    """
    if is_contrastive(request.objective) and loaded.request.head is None:
        loaded = replace(loaded, request=replace(loaded.request, head=AUTO))  # as sentence-transformers loads it
    with kernel_packages_hidden():
        blueprint = make_blueprint(request, config, loaded)
    return with_objective(blueprint, request.objective, reference_of(request.objective, request.train, request.reference))


def work_of(request: Request, dtype: str) -> Work:
    """Return the work of a request in one of its dtypes."""
    return Work(
        mode=request.mode,
        dtype=dtype,
        optimizer=request.optimizer,
        optimizer_impl=request.optimizer_impl,
        accumulate=request.accumulate,
        tell_frozen=request.train != "all" or request.objective != LM,
        new=request.new,
        cache=request.cache,
        plan=plan_of(request),
        cudnn_benchmark=request.cudnn_benchmark,
        compile_scope=scope_of(request),
        compile_mode=request.compile or DEFAULT,
        budget=request.budget,
        loss=request.loss,
        objective=request.objective,
        reference=reference_of(request.objective, request.train, request.reference),
        group=request.group,
        rollout=request.rollout,
        activations=request.activations,
        optimizer_offload=request.optimizer_offload,
        step=request.step,
        evaluate=request.evaluate,
        liger=request.liger,
        fla=request.fla,
        autocasts=request.autocast or (request.is_of_pipeline and request.train == "adapter"),
    )


def plan_of(request: Request) -> Plan | None:
    """Return how a request spreads its model over ranks, or None for a single rank."""
    if request.parallel == "none":
        return None
    ranks = request.ranks if "ranks" in PARALLELS[request.parallel].keys else 1
    return Plan(
        parallel=request.parallel,
        ranks=ranks,
        replicate=request.replicate,
        reshard=request.reshard,
        offload=request.offload,
        tp=request.tp,
        sp=request.sp,
        lp=request.lp,
        cp=request.cp,
        pp=request.pp,
        schedule=request.schedule,
        microbatch=request.microbatch,
        rank=request.rank,
        by_accelerate=is_library(request.loss) or any(not KEYS[key].is_default(request) for key in ACCELERATED),
    )

"""Turn a request into the work to trace, by dtype."""

from __future__ import annotations

from sizer.catalogue.parallel import PARALLELS
from sizer.distributed.plan import Plan
from sizer.request import Request, scope_of
from sizer.tracing.steps import Work


def work_of(request: Request, dtype: str) -> Work:
    """What a request does in one of its dtypes."""
    return Work(
        mode=request.mode,
        dtype=dtype,
        optimizer=request.optimizer,
        optimizer_impl=request.optimizer_impl,
        accumulate=request.accumulate,
        tell_frozen=request.train != "all",
        new=request.new,
        cache=request.cache,
        plan=plan_of(request),
        cudnn_benchmark=request.cudnn_benchmark,
        compile_scope=scope_of(request),
        budget=request.budget,
        loss=request.loss,
        step=request.step,
        evaluate=request.evaluate,
    )


def plan_of(request: Request) -> Plan | None:
    """How a request spreads its model over ranks, None where there is one."""
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
    )

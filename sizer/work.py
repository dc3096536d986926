"""What a request asks to be traced: its work by dtype, with as few passes and ranks as have its tapes."""

from __future__ import annotations

from dataclasses import replace

from sizer.catalogue.parallel import PARALLELS
from sizer.distributed.plan import Plan
from sizer.request import Request
from sizer.tracing.steps import Work
from sizer.tracing.trace import PASSES


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
    )


def as_traced(request: Request) -> Request:
    """The request with as few passes and ranks as have its tapes: from the second pass on all are alike, and so is what a rank of
    DDP, or of any of HSDP's groups, holds, however many there are (tests/distributed/test_alike.py)."""
    fewest = {"accumulate": min(request.accumulate, PASSES), "replicate": min(request.replicate, 2)}
    if request.parallel == "ddp":
        ranks, rank = min(request.ranks, 2), None
        if request.rank is not None and request.cp > 1:
            rank = request.rank % request.cp
        elif request.rank is not None and request.pp > 1:
            rank = request.rank // request.ranks * ranks  # of the same stage
        fewest |= {"ranks": ranks, "rank": rank}
    elif request.parallel == "hsdp" and request.rank is not None:
        fewest["rank"] = request.rank % (request.world // request.replicate)
    return replace(request, **fewest)


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

"""Versions that an answer depends on, and cautions to read before it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from sizer.base import versions as pytorch
from sizer.base.units import format_bytes, format_range
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.parallel import PARALLELS, ways_to_split
from sizer.catalogue.recipes import server_share
from sizer.catalogue.sources import called_packages
from sizer.query.request import Request, nccl_of, served_bytes
from sizer.report.kv_cache import KvCache
from sizer.tracing.cuda import builds
from sizer.tracing.device import Device


def versions() -> dict[str, str]:
    """Return the versions that an answer depends on."""
    return dict(_read_versions())


@cache  # a job server reads them before it forks
def _read_versions() -> dict[str, str]:
    return {"sizer": pytorch.SIZER, **{name: pytorch.installed(name) for name in called_packages()}}


def target(device: Device) -> dict[str, str]:
    """Return the versions of the rules that an answer follows."""
    return {"torch": pytorch.format_version(device.version)}


def cautions(device: Device, gpu: Gpu, built_for: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return the cautions to read before the figures.

    They name the rules in use, their differences from the installed PyTorch, and whether PyTorch runs on this GPU at all.
    `built_for` are the flags of the installed PyTorch, if they are known.
    """
    unsupported = builds.caution(gpu, device.version, built_for)
    said = (*pytorch.cautions(device.version, pytorch.installed_version()), *gpu.cautions)
    return (*said, *([unsupported] if unsupported else []))


def of_each_rank(request: Request) -> Iterator[str]:
    """Yield notes on figures that are those of one of several ranks."""
    if request.parallel == "none":
        return
    title, data_ranks = PARALLELS[request.parallel].title, request.data_ranks
    together = ", ".join(f"{batch * data_ranks:,}" for batch in request.batches[:3])
    more = ", …" if len(request.batches) > 3 else ""
    ways = ways_to_split(sp=request.sp, lp=request.lp)
    split = f", groups of {request.tp} share a batch by {ways}" if request.tp > 1 else ""
    split += f", groups of {request.cp} share each sequence by context parallel" if request.cp > 1 else ""
    if request.pp > 1:
        split += f", groups of {request.pp} are the stages of a pipeline over microbatches of {request.microbatch}"
    low, _, high = nccl_of(request)
    nccl = f"; NCCL needs {format_range(low, high)} of each GPU, by published figures" if request.world > 1 else ""
    yield (
        f"these are the figures of each of {request.world:,} ranks of {title}{split}; the batch is that of one rank, "
        f"all ranks together have {together}{more} samples{nccl}"
    )
    if request.rank is not None:
        yield f"these are the figures of rank {request.rank}; another may need more"
    elif request.parallel == "zero1":
        yield "the optimizer's state is sharded over the ranks by whole parameters: the figures are those of the rank with most"


def of_server(request: Request, gpu: Gpu) -> Iterator[str]:
    """Yield a caution on a server that makes completions on the training device."""
    if share := server_share(request.rollout):
        held = format_bytes(served_bytes(request, gpu))
        yield (
            f"a server has {share:g} of the device's memory ({held}), which count for the process but not for the peaks. "
            "Its weights and cache are included (`sizer estimate` with mode=serve). The transfer of trained weights is not counted"
        )


def on_the_host(request: Request, kv_caches: tuple[KvCache, ...]) -> Iterator[str]:
    """Yield a note on caches with a part on the host."""
    held = max((cache.host_bytes for cache in kv_caches), default=0)
    if held:
        batch = request.batches[0]
        yield f"the host holds {format_bytes(held * batch)} of the cache at batch {batch}, in pinned memory"

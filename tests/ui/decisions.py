"""Answers beside a report, made by hand."""

from __future__ import annotations

from dataclasses import replace

from sizer.catalogue.gpus import GPUS
from sizer.query.text import format_query, parse_query
from sizer.report.decision import (
    BudgetPoint,
    BudgetReport,
    Cell,
    DeviceReport,
    DeviceRow,
    LeverReport,
    LeverRow,
    LeverSet,
    Limit,
    LimitReport,
    RankReport,
    RankRow,
)
from sizer.report.served import ServedFigures, Want

GIB = 2**30


def cell(query: str, gibibytes: int, fits: object = True) -> Cell:
    request = parse_query(query)
    size = gibibytes * GIB
    return Cell(
        dtype=request.dtypes[0],
        batch=request.batches[0],
        peak_allocated_bytes=size,
        peak_reserved_bytes=size,
        process_bytes=size,
        process_low_bytes=size,
        process_high_bytes=size,
        fits=fits,
    )


def levers_for(query: str) -> LeverReport:
    """10 GiB that do not fit: checkpointing saves 6 of them, SGD 1, fused none, images cannot be made smaller."""
    checkpointed = format_query(replace(parse_query(query), checkpointing=True))
    saved = (("checkpointing", 4, True), ("sgd", 9, False), ("fused", 10, False))
    rows = tuple(
        LeverRow(
            key=key,
            title=key.title(),
            cost="time",
            code=f"{key}()",
            query=checkpointed,
            cell=cell(query, size, fits),
            effect="The peak stays." if size == 10 else "",
        )
        for key, size, fits in saved
    )
    refused = LeverRow(key="image", title="Image", cost="", code="", query=query, reason="image must be 224")
    return LeverReport(
        query=query,
        base=cell(query, 10, False),
        rows=(*rows, refused),
        smallest=LeverSet(keys=("checkpointing",), query=checkpointed, cell=cell(query, 4)),
        search="The first of 2 sets tried that fits.",
        useless=("empty_cache() does not help.",),
    )


def limits_for(query: str) -> LimitReport:
    """Batches of 74 for sure, perhaps of 96; images of 336, and no larger ones."""
    largest = format_query(replace(parse_query(query), batches=(74,)))
    return LimitReport(
        query=query,
        limits=(
            Limit(
                key="batch", title="Largest batch", value=74, possible_value=96, most_value=96, query=largest, cell=cell(largest, 7)
            ),
            Limit(key="image", title="Largest image", value=None, possible_value=None, most_value=0, reason="not even 16 fits"),
        ),
    )


def devices_for(query: str) -> DeviceReport:
    """10 GiB on four devices; the largest batch grows with their memory. One of them cannot do it at all."""
    keys = ("rtx-4060-8gb", "rtx-4090", "a100-80gb")
    rows = tuple(
        DeviceRow(
            gpu=key,
            name=GPUS[key].name,
            total_bytes=GPUS[key].total_bytes,
            query=query,
            cell=cell(query, 10, GPUS[key].total_bytes > 10 * GIB),
            batch=GPUS[key].total_bytes // GIB if GPUS[key].total_bytes > 10 * GIB else None,
            possible_batch=None,
            most_batch=GPUS[key].total_bytes // GIB if GPUS[key].total_bytes > 10 * GIB else 0,
            searched=True,
        )
        for key in keys
    )
    none = DeviceRow(gpu="cpu", name="CPU", total_bytes=64 * GIB, query=query, reason="no kernel", searched=True)
    return DeviceReport(query=query, rows=(*rows, none))


def ranks_for(query: str) -> RankReport:
    """96 GiB on one GPU, 60 on each of 2 by FSDP2, where 33 samples fit, and as much by DDP as on one; HSDP cannot be traced."""
    asked = replace(parse_query(query), ranks=2)
    ways = {name: format_query(replace(asked, parallel=name)) for name in ("ddp", "fsdp", "hsdp")}
    rows = (
        RankRow(parallel="none", title="One GPU", gpus=1, query=query, cell=cell(query, 96, False)),
        RankRow(parallel="ddp", title="DDP", gpus=2, query=ways["ddp"], cell=cell(query, 98, False)),
        RankRow(
            parallel="fsdp",
            title="FSDP2",
            gpus=2,
            query=ways["fsdp"],
            cell=cell(query, 60),
            at_peak={"optimizer state": 40 * GIB, "parameter": 12 * GIB, "buffer": 1},
            batch=33,
            possible_batch=34,
            most_batch=34,
            searched=True,
        ),
        RankRow(parallel="hsdp", title="HSDP of 8", gpus=16, query=ways["hsdp"], reason="no kernel"),
    )
    return RankReport(query=query, rows=rows, fewest=2)


def budgets_for(query: str) -> BudgetReport:
    """40 GiB eagerly, no checkpointing, 30 GiB compiled, 20 at budget 0.4 and 25 at 0."""
    asked = replace(parse_query(query), compile="default")

    def point(budget: float, gib: int, share: float) -> BudgetPoint:
        told = {"recomputed_flops_share": share, "recomputed": ("3 × aten.mul.Tensor",) if share else ()}
        peaks = {"peak_allocated_bytes": gib * GIB, "peak_reserved_bytes": (gib + 1) * GIB}
        return BudgetPoint(budget=budget, query=format_query(replace(asked, budget=budget)), **peaks, **told)

    points = (point(1.0, 30, 0.0), point(0.4, 20, 0.25), point(0.0, 25, 0.75))
    return BudgetReport(query=query, eager=cell(query, 40), reason="no blocks to checkpoint", points=points)


def served_figures(fits: object, requests: float, gpus: int = 1) -> ServedFigures:
    """A server of which 8 requests of 32,768 tokens are wanted."""
    tokens = int(requests * 32_768)
    return ServedFigures(
        starts=True,
        fits=fits,
        gpus=gpus,
        length=32_768,
        requests_at_once=requests,
        requests_at_once_low=requests,
        requests_at_once_high=requests,
        kv_tokens=tokens,
        kv_tokens_low=tokens,
        kv_tokens_high=tokens,
        weights_bytes=15 * GIB,
        kv_cache_bytes=int(requests * 4 * GIB),
        longest=tokens,
        want=Want(requests=8, tokens=32_768, fits=fits, missing_bytes=0),
    )


def served_devices_for(query: str) -> DeviceReport:
    """An H100 holds what is wanted, an L4 does not, and a Mac has no vLLM."""
    held = {"h100-80gb": served_figures(True, 13.8), "l4": served_figures(False, 0.9), "m2-ultra-64gb": None}
    rows = tuple(
        DeviceRow(
            gpu=key,
            name=GPUS[key].name,
            total_bytes=GPUS[key].total_bytes,
            query=format_query(replace(parse_query(query), gpu=key)),
            reason="" if found else "vLLM's rules are not known on devices of mps",
            serve=found,
        )
        for key, found in held.items()
    )
    return DeviceReport(query=query, rows=rows, serves=True)


def served_ranks_for(query: str) -> RankReport:
    """Two GPUs hold what is wanted, one does not."""
    rows = tuple(
        RankRow(parallel="none", title=title, gpus=gpus, query=f"{query}&tp={gpus}", serve=served_figures(fits, requests, gpus))
        for title, gpus, fits, requests in (("tensor parallel of 2", 2, True, 9.0), ("One GPU", 1, False, 0.9))
    )
    return RankReport(query=query, rows=rows, fewest=2, serves=True)

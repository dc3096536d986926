"""A server on every device, on several numbers of GPUs, and with other flags, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sizer.base.units import format_bytes
from sizer.commands.text import format_table
from sizer.report.decision import DeviceReport, LeverReport, RankReport
from sizer.report.served import ServedFigures
from sizer.serving.words import STARTS, describe_served_devices, describe_served_ranks, gib, verdict_words, want_line

FIGURES = ("verdict", "requests", "of tokens", "KV tokens", "longest", "weights", "KV cache")
NONE = ("-",) * len(FIGURES)


def format_served_devices(found: DeviceReport, width: int | None = None) -> Iterator[str]:
    """Yield a row for each device, those first that hold what is wanted, then why others have none, and the smallest."""
    rows = ((row.gpu, format_bytes(row.total_bytes), *_figures(row.serve)) for row in found.rows)
    yield from format_table(("gpu", "memory", *FIGURES), rows, width=width)
    yield ""
    yield from _reasons((row.gpu, row.reason) for row in found.rows)
    yield describe_served_devices(found)


def format_served_ranks(found: RankReport, width: int | None = None) -> Iterator[str]:
    """Yield a row for each split of each number of GPUs, those first that hold what is wanted; then the fewest GPUs that do.

    Requests are those of all GPUs; tokens, weights and cache those of one GPU.
    """
    rows = ((f"{row.gpus}", row.title, *_figures(row.serve)) for row in found.rows)
    yield from format_table(("GPUs", "by", *FIGURES), rows, left=2, width=width)
    yield ""
    yield from _reasons((f"{row.title} on {row.gpus}", row.reason) for row in found.rows)
    yield from describe_served_ranks(found)


def format_served_levers(found: LeverReport, width: int | None = None) -> Iterator[str]:
    """Yield the server as it is, each change with what the server then holds, and the question with it."""
    if (base := found.serve) is None:
        return
    yield f"{STARTS[base.starts]} {base.requests_at_once:,.1f} requests of {base.length:,} tokens at once"
    if base.want is not None:
        yield want_line(base.want)
    yield found.search
    yield ""
    levers = [(row, row.serve) for row in found.rows if row.serve is not None]
    rows = (
        (row.title, f"{one.requests_at_once:,.1f}", f"{one.gained:+,.1f}", f"{gib(one.kv_cache_bytes)} GiB", row.cost)
        for row, one in levers
    )
    if not levers:
        yield "Nothing that is known here makes room for more requests."
        return
    yield from format_table(("change", "requests", "gained", "KV cache", "costs"), rows, width=width)
    yield ""
    yield from (f"{row.title}: {row.query}" for row, _ in levers)


def _figures(found: ServedFigures | None) -> tuple[str, ...]:
    if found is None:
        return NONE
    return (
        verdict_words(found),
        f"{found.requests_at_once:,.1f}",
        f"{found.length:,}",
        f"{found.kv_tokens:,}",
        f"{found.longest:,}",
        f"{gib(found.weights_bytes)} GiB",
        f"{gib(found.kv_cache_bytes)} GiB",
    )


def _reasons(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield each reason once, with the names of the rows that have it."""
    reasons: dict[str, list[str]] = {}
    for name, reason in rows:
        if reason:
            reasons.setdefault(reason, []).append(name)
    yield from (f"{', '.join(names)}: {reason}" for reason, names in reasons.items())

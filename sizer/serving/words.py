"""The answer for a server in words: what the command line prints, and the page's lines."""

from __future__ import annotations

from collections.abc import Iterator

from sizer.memory.served import Served, Want
from sizer.units import GIB, counted, format_bytes

STARTS = {True: "Starts.", False: "Does not start.", "uncertain": "May not start."}


def gib(size: int, digits: int = 2) -> str:
    """Return bytes in GiB without the unit."""
    return f"{size / GIB:.{digits}f}"


def headline(served: Served) -> str:
    """Return whether the server starts, requests at once and tokens."""
    length = served.flags.get("max_model_len")
    requests = f"{served.requests_at_once:,.1f}"
    return (
        f"{STARTS[served.starts]} {requests} requests of {length:,} tokens at once; {served.kv_tokens:,} KV tokens "
        "(worst case: every request at full length)."
    )


def sum_line(served: Served, vocabulary: int | None = None) -> str:
    """Return the budget as the sum of its parts, in GiB."""
    logits = ""
    if vocabulary and served.sampler_bytes > served.forward_bytes:
        logits = f" (sampler: {served.flags['max_num_seqs']:,} × {vocabulary:,} logits)"
    graphs = f" + {gib(served.graphs_bytes)} CUDA graphs" if served.graphs_in_budget and served.graphs_bytes else ""
    cache = "+" if served.kv_cache_bytes >= 0 else "−"
    peak = f" + {gib(served.profile_peak_bytes)} profile{logits}" if served.profile_peak_bytes else ""
    outside = f" + {gib(served.outside_torch_bytes)} outside PyTorch" if served.outside_torch_bytes else ""
    parts = f"{gib(served.weights_bytes)} weights{peak}{outside}{graphs}"
    return f"{gib(served.budget_bytes)} GiB budget = {parts} {cache} {gib(abs(served.kv_cache_bytes))} KV cache"


def graphs_line(served: Served) -> str:
    """Return what CUDA graphs hold, and whether that comes off the budget."""
    if served.engine == "sglang":
        return "CUDA graphs and activations: of the memory that the static share leaves, not counted"
    if not served.graphs_bytes:
        return "CUDA graphs: none"
    where = (
        "estimated before the cache is sized, part of the budget in this version"
        if served.graphs_in_budget
        else "captured after the cache, outside the budget in this version"
    )
    return f"CUDA graphs: {gib(served.graphs_bytes, 1)} GiB, {where}"


def want_line(want: Want) -> str:
    """Return whether the server holds what was asked for, and what is missing."""
    asked = f"{counted(want.requests, 'request')} of {want.tokens:,} tokens at once"
    if want.fits is True:
        return f"Yes: {asked}."
    missing = f"; {format_bytes(want.missing_bytes)} of cache are missing" if want.missing_bytes else ""
    return f"{'Perhaps' if want.fits == 'uncertain' else 'No'}: {asked}{missing}."


def range_line(served: Served) -> str:
    """Return the range of requests at once and tokens, and why it is as wide."""
    low, high = served.requests_at_once_low, served.requests_at_once_high
    return (
        f"Range: {low:,.1f} to {high:,.1f} requests, {served.kv_tokens_low:,} to {served.kv_tokens_high:,} tokens "
        f"({'; '.join(served.reasons)})"
    )


def lever_lines(served: Served) -> Iterator[str]:
    """Yield each lever as one line."""
    if served.levers:
        yield "To hold more requests:" if served.starts is True else "To start:"
    for lever in served.levers:
        yield (
            f"  {lever.flags}: {lever.requests_at_once:,.1f} requests at once ({lever.gained:+,.1f}), "
            f"{gib(lever.kv_cache_bytes)} GiB of cache; {lever.note}"
        )

"""The answer for a server as text, for the command line and the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sizer.base.units import GIB, format_bytes, pluralize
from sizer.report.decision import DeviceReport, RankReport
from sizer.report.served import Served, ServedFigures, Starts, Want

STARTS = {True: "Starts.", False: "Does not start.", "uncertain": "May not start."}


VERDICTS: dict[Starts, str] = {True: "starts", "uncertain": "may not start", False: "does not start"}
HOLDS: dict[Starts, str] = {True: "holds it", "uncertain": "may hold it", False: "too small"}
SMALLEST_NAMED = 3  # devices in a sentence


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
    if served.drafting_bytes == served.profile_peak_bytes > 0:
        logits = " (the draft's forward pass)"
    elif served.encoder_bytes >= served.profile_peak_bytes > 0:
        logits = " (encoder of images)"
    elif served.compiling_bytes >= served.profile_peak_bytes > 0:
        logits = " (compiling: a tensor of the embedding's size)"
    elif vocabulary and served.sampler_bytes > served.forward_bytes:
        verifies = served.flags.get("speculative_method") and served.flags.get("model_runner") == 1
        drafted = ", and those of drafted tokens" if verifies else ""
        logits = f" (sampler: {served.flags['max_num_seqs']:,} × {vocabulary:,} logits{drafted})"
    graphs = f" + {gib(served.graphs_bytes)} CUDA graphs" if served.graphs_in_budget and served.graphs_bytes else ""
    cache = "+" if served.kv_cache_bytes >= 0 else "−"
    profile = "compute buffer" if served.engine == "llama.cpp" else "profile"
    peak = f" + {gib(served.profile_peak_bytes)} {profile}{logits}" if served.profile_peak_bytes else ""
    outside = f" + {gib(served.outside_torch_bytes)} outside PyTorch" if served.outside_torch_bytes else ""
    adapters = f" + {gib(served.lora_bytes)} LoRA adapters" if served.lora_bytes else ""
    draft = f" + {gib(served.draft_bytes)} draft" if served.draft_bytes else ""
    host = f" ({gib(served.offloaded_bytes)} more on the host)" if served.offloaded_bytes else ""
    parts = f"{gib(served.weights_bytes)} weights{host}{adapters}{draft}{peak}{outside}{graphs}"
    return f"{gib(served.budget_bytes)} GiB budget = {parts} {cache} {gib(abs(served.kv_cache_bytes))} KV cache"


def graphs_line(served: Served) -> str:
    """Return the memory of CUDA graphs, and whether it is part of the budget."""
    if served.engine == "llama.cpp":
        return "CUDA graphs and the pools of kernels: not counted"
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
    """Return whether the server holds the wanted requests, and the missing bytes."""
    asked = f"{pluralize(want.requests, 'request')} of {want.tokens:,} tokens at once"
    if want.fits is True:
        return f"Yes: {asked}."
    missing = f"; {format_bytes(want.missing_bytes)} of cache are missing" if want.missing_bytes else ""
    return f"{'Perhaps' if want.fits == 'uncertain' else 'No'}: {asked}{missing}."


def range_line(served: Served) -> str:
    """Return the range of requests at once and tokens, and why it is as wide."""
    low, high, length = served.requests_at_once_low, served.requests_at_once_high, served.flags.get("max_model_len")
    if served.engine == "llama.cpp":
        return f"Counted: {'; '.join(served.reasons)}"
    tokens = f"{served.kv_tokens_low:,} to {served.kv_tokens_high:,} KV tokens"
    return f"Range: {low:,.1f} to {high:,.1f} requests of {length:,} tokens, {tokens} ({'; '.join(served.reasons)})"


def lever_lines(served: Served) -> Iterator[str]:
    """Yield each lever as one line."""
    if served.levers:
        yield f"To {_aim_of_levers(served)}:"
    for lever in served.levers:
        yield (
            f"  {lever.flags}: {lever.requests_at_once:,.1f} requests at once ({lever.gained:+z,.1f}), "
            f"{gib(lever.kv_cache_bytes)} GiB of cache; {lever.note}"
        )


def _aim_of_levers(served: Served) -> str:
    """Return the purpose of a server's suggested changes."""
    if served.want is not None and served.want.fits is not True and served.levers[0].fits is True:
        return f"hold {pluralize(served.want.requests, 'request')} of {served.want.tokens:,} tokens at once"
    return "hold more requests" if served.starts is True else "start"


def verdict_words(found: Served | ServedFigures) -> str:
    """Return in two or three words whether a server starts, and if so whether it holds the wanted requests."""
    if found.want is None or found.starts is False:
        return VERDICTS[found.starts]
    return HOLDS[found.fits]


def _aim(rows: Iterable[ServedFigures | None]) -> str:
    """Return the aim of servers: to hold the wanted requests, else to start."""
    want = next((one.want for one in rows if one is not None and one.want is not None), None)
    if want is None:
        return "start"
    return f"hold {pluralize(want.requests, 'request')} of {want.tokens:,} tokens at once"


def describe_served_devices(found: DeviceReport) -> str:
    """Return on how many devices a server surely reaches its aim, and the smallest of them."""
    fitting = [row.name for row in found.rows if row.serve is not None and row.serve.fits is True]
    unsure = sum(row.serve is not None and row.serve.fits == "uncertain" for row in found.rows)
    aim = _aim(row.serve for row in found.rows)
    more = f"; it may on {unsure:,} more" if unsure else ""
    gpus = next((row.serve.gpus for row in found.rows if row.serve is not None), 1)
    each = f", {gpus} GPUs of each," if gpus > 1 else ""
    smallest = f"; the smallest: {', '.join(fitting[:SMALLEST_NAMED])}" if fitting else ""
    return f"The server can {aim} on {pluralize(len(fitting), 'device')}{each} of {len(found.rows):,}{smallest}{more}."


def describe_served_ranks(found: RankReport) -> Iterator[str]:
    """Yield the fewest GPUs on which a server surely reaches its aim, and the splits that do so."""
    aim = _aim(row.serve for row in found.rows)
    unsure = min((row.gpus for row in found.rows if row.serve is not None and row.serve.fits == "uncertain"), default=None)
    if found.fewest is None:
        if found.rows and not found.pending:
            more = f"; it may on {pluralize(unsure, 'GPU')}" if unsure is not None else ""
            yield f"The server can surely {aim} on none of up to {max(row.gpus for row in found.rows)} GPUs{more}."
        return
    more = f"; it may on {unsure}" if unsure is not None and unsure < found.fewest else ""
    yield f"The server can {aim} on {pluralize(found.fewest, 'GPU')}{more}:"
    for row in found.rows:
        if row.gpus == found.fewest and row.serve is not None and row.serve.fits is True:
            requests = f"{row.serve.requests_at_once:,.1f} requests of {row.serve.length:,} tokens at once"
            yield f"  {row.title}: {requests}"

"""Answer for a server as plain data: sizer.serving plans it, and pages, command line and JSON show it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from sizer.base.codec import Difference

Starts = bool | Literal["uncertain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Wanted number of concurrent requests and tokens each: whether the cache holds them, and the missing bytes."""

    requests: int
    tokens: int
    fits: Starts
    missing_bytes: int


def both(starts: Starts, want: Want | None) -> Starts:
    """Return whether a server starts and holds the wanted requests, "uncertain" if either is."""
    parts = {starts, True if want is None else want.fits}
    return False if False in parts else "uncertain" if "uncertain" in parts else True


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """Flags to change, the server's figures with them, and the gain in concurrent requests.

    `fits` is true if the server then starts and holds the wanted requests.
    """

    flags: str
    query: str
    starts: Starts
    fits: Starts
    kv_cache_bytes: Difference
    requests_at_once: float
    gained: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRow:
    """Number of requests of `context` tokens each that the cache holds at once."""

    context: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Memory of a server on one GPU, in bytes.

    `budget_bytes` is the memory that the server may use. `lora_bytes` are slots of adapters, apart from the weights, and
    `draft_bytes` the weights of a draft. `offloaded_bytes` are weights on the host. `profile_peak_bytes` is the largest of five
    phases: a forward pass (`forward_bytes`); that of a draft (`drafting_bytes`); the sampler (`sampler_bytes`), with the memory
    that both hold; the dummy run of an image encoder (`encoder_bytes`); the compilation of a first start (`compiling_bytes`).
    `graphs_bytes` are subtracted from the budget if
    `graphs_in_budget`. The rest is `kv_cache_bytes`: `blocks` of `block_tokens` tokens each.

    `requests_at_once` counts requests of the longest allowed length. `longest` is the length in tokens of one request that
    fills the cache. `message` is the server's own if it does not start. `flags` are the server's flags as resolved. `reasons`
    say why the range is as wide as it is.
    """

    engine: str
    engine_version: str
    flags: dict[str, bool | int | float | str | None]
    gpus: int
    budget_bytes: int
    weights_bytes: int
    profile_peak_bytes: int
    forward_bytes: int
    sampler_bytes: int
    encoder_bytes: int
    compiling_bytes: int
    outside_torch_bytes: int
    graphs_bytes: int
    graphs_in_budget: bool
    kv_cache_bytes: Difference
    kv_cache_low_bytes: Difference
    kv_cache_high_bytes: Difference
    blocks: int
    block_tokens: int
    kv_tokens: int
    kv_tokens_low: int
    kv_tokens_high: int
    requests_at_once: float
    requests_at_once_low: float
    requests_at_once_high: float
    longest: int
    starts: Starts
    command: str
    lora_bytes: int = 0
    draft_bytes: int = 0
    drafting_bytes: int = 0
    offloaded_bytes: int = 0
    message: str = ""
    summary: str = ""
    want: Want | None = None
    levers: tuple[Lever, ...] = ()
    contexts: tuple[ContextRow, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def fits(self) -> Starts:
        """Return whether the server starts and holds the wanted requests, "uncertain" if either is."""
        return both(self.starts, self.want)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFigures:
    """Figures of a plan for tables of devices or numbers of GPUs, as in `Served`.

    `fits` is true if the server starts and holds the wanted requests. `length` is the longest allowed request in tokens.
    `kv_tokens` are those of one data-parallel copy, bytes those of one GPU. Requests are those of all copies on all `gpus`.
    """

    starts: Starts
    fits: Starts
    gpus: int
    length: int
    requests_at_once: float
    requests_at_once_low: float
    requests_at_once_high: float
    kv_tokens: int
    kv_tokens_low: int
    kv_tokens_high: int
    weights_bytes: int
    kv_cache_bytes: Difference
    longest: int
    want: Want | None = None
    message: str = ""


def figures_of(served: Served) -> ServedFigures:
    """Return the figures of a plan for a table."""
    shared = {spec.name: getattr(served, spec.name) for spec in fields(ServedFigures) if spec.name != "length"}
    length = served.flags["max_model_len"]
    return ServedFigures(**shared, length=length if isinstance(length, int) else 0)

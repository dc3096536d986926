"""Size of a generation's cache by context length, read from the architecture's own cache, and the effect of paging.

transformers' cache has one tensor for each layer's keys and one for its values, of every token; a server with paged attention
(vLLM, SGLang) gives each sequence blocks of a few tokens instead, out of what its share of the device leaves beside the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sizer.catalogue.gpus import Gpu

CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)
BLOCK_TOKENS = 16  # vllm/config/cache.py, CacheConfig.block_size, and SGLang's page sizes are at most that; vLLM 0.11
MEMORY_PERCENT = 90  # of the device: vllm/config/cache.py, CacheConfig.gpu_memory_utilization = 0.9; vLLM 0.11
PAGED_NOTE = (
    f"a server with paged attention (vLLM, SGLang) has at most {{budget}} for it on this device: {MEMORY_PERCENT} % of its memory "
    f"without the weights, in blocks of {BLOCK_TOKENS} tokens. What its own forward pass takes is not subtracted"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSegment:
    """From `start` tokens on a sequence's cache takes `constant_bytes` and for each of its tokens `token_bytes`; of an offloaded
    cache `host_constant_bytes` and `host_token_bytes` of these are on the host."""

    start: int
    constant_bytes: int
    token_bytes: int
    host_constant_bytes: int = 0
    host_token_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRow:
    """One sequence of `context` tokens: the bytes of its cache, the bytes of whole blocks for it, and how many such sequences a
    server with paged attention holds at once."""

    context: int
    sequence_bytes: int
    paged_bytes: int
    paged_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """The cache of one dtype. `token_bytes` is what each token adds to a sequence that fills no window yet.

    `paged_budget_bytes` is what a server with paged attention has for caches on the device: MEMORY_PERCENT of its memory
    without the weights. What its own profile of a forward pass takes comes off that, and is not counted here. `host_bytes` is what
    of an offloaded cache one whole sequence has on the host, 0 of any other.
    """

    dtype: str
    token_bytes: int
    segments: tuple[KvSegment, ...]
    paged_budget_bytes: int
    rows: tuple[KvRow, ...]
    host_bytes: int = 0


def describe_growth(cache: KvCache) -> str:
    """Return the bytes that a token adds, and those from the last full window on if they differ."""
    last = cache.segments[-1]
    later = f" ({last.token_bytes:,} from {last.start:,} tokens on)" if last.token_bytes != cache.token_bytes else ""
    return f"{cache.token_bytes:,} bytes a token{later}"


def sequence_bytes(segments: Iterable[KvSegment], context: int) -> int:
    """The bytes of the cache of a sequence of `context` tokens, of which the last was just made."""
    segment = _segment(segments, context)
    return segment.constant_bytes + context * segment.token_bytes


def host_bytes(segments: Iterable[KvSegment], context: int) -> int:
    """Return what of the cache of a sequence of `context` tokens is on the host."""
    segment = _segment(segments, context)
    return segment.host_constant_bytes + context * segment.host_token_bytes


def _segment(segments: Iterable[KvSegment], context: int) -> KvSegment:
    return [one for one in segments if one.start <= context][-1]


def build_kv_cache(
    segments: tuple[KvSegment, ...], *, dtype: str, weights_bytes: int, gpu: Gpu, tokens: int = 0
) -> KvCache:
    """The cache of one dtype on a device, for contexts from 1,024 tokens on; `tokens` are those of a whole sequence."""
    budget = max(0, gpu.total_bytes * MEMORY_PERCENT // 100 - weights_bytes)
    rows = []
    for context in CONTEXTS:
        paged = sequence_bytes(segments, -(-context // BLOCK_TOKENS) * BLOCK_TOKENS)
        rows.append(
            KvRow(
                context=context,
                sequence_bytes=sequence_bytes(segments, context),
                paged_bytes=paged,
                paged_sequences=budget // paged if paged else 0,
            )
        )
    return KvCache(
        dtype=dtype,
        token_bytes=segments[0].token_bytes,
        segments=segments,
        paged_budget_bytes=budget,
        rows=tuple(rows),
        host_bytes=host_bytes(segments, tokens),
    )

"""Size of a generation's cache by context length, read from the architecture's own cache.

transformers' cache has one tensor for each layer's keys and one for its values, of every token. The cache of a server with
paged attention (vLLM, SGLang) is planned by `sizer.serving`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)
SERVER_NOTE = "mode=serve plans the number of sequences of a server with paged attention (vLLM, SGLang)"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSegment:
    """Bytes of a sequence's cache from `start` tokens on: `constant_bytes`, and `token_bytes` for each token.

    Of an offloaded cache `host_constant_bytes` and `host_token_bytes` of these are on the host.
    """

    start: int
    constant_bytes: int
    token_bytes: int
    host_constant_bytes: int = 0
    host_token_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRow:
    """One sequence of `context` tokens, and the bytes of its cache."""

    context: int
    sequence_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """The cache of one dtype. `token_bytes` are the bytes of each token, until a window of the sequence is full.

    `host_bytes` is the part of an offloaded cache of one whole sequence on the host; 0 without offloading.
    """

    dtype: str
    token_bytes: int
    segments: tuple[KvSegment, ...]
    rows: tuple[KvRow, ...]
    host_bytes: int = 0


def describe_growth(cache: KvCache) -> str:
    """Return the bytes that a token adds, and those from the last full window on if they differ."""
    last = cache.segments[-1]
    later = f" ({last.token_bytes:,} from {last.start:,} tokens on)" if last.token_bytes != cache.token_bytes else ""
    return f"{cache.token_bytes:,} bytes a token{later}"


def sequence_bytes(segments: Iterable[KvSegment], context: int) -> int:
    """Return the bytes of the cache of a sequence of `context` tokens, right after the last token was generated."""
    segment = _segment(segments, context)
    return segment.constant_bytes + context * segment.token_bytes


def host_bytes(segments: Iterable[KvSegment], context: int) -> int:
    """Return the bytes on the host of the cache of a sequence of `context` tokens."""
    segment = _segment(segments, context)
    return segment.host_constant_bytes + context * segment.host_token_bytes


def _segment(segments: Iterable[KvSegment], context: int) -> KvSegment:
    return [one for one in segments if one.start <= context][-1]


def build_kv_cache(segments: tuple[KvSegment, ...], *, dtype: str, tokens: int = 0) -> KvCache:
    """Return the cache of one dtype for contexts from 1,024 tokens on; `tokens` is the length of a whole sequence."""
    rows = tuple(KvRow(context=context, sequence_bytes=sequence_bytes(segments, context)) for context in CONTEXTS)
    return KvCache(
        dtype=dtype,
        token_bytes=segments[0].token_bytes,
        segments=segments,
        rows=rows,
        host_bytes=host_bytes(segments, tokens),
    )

"""Groups of layers that share a block table, and the groups of DeepSeek V4: entries and keys of the indexer, windows, states.

Source: vllm/v1/core/kv_cache_utils.py, _get_kv_cache_groups_uniform_groups and _get_kv_cache_config_deepseek_v4 (0.20 to 0.23),
_get_kv_cache_config_packed (0.24 to 0.28), _get_packed_kv_cache_groups (0.29 to 0.33); vllm/models/deepseek_v4/attention.py and
compressor.py, vllm/v1/attention/backends/mla/sparse_swa.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sizer.serving.architecture import FULL, SLIDING, Layer

BLOCK = 256  # tokens of a block of entries
WINDOW_BLOCK = 64
STATE_BLOCKS = {4: 4, 128: 8}  # by the number of tokens of an entry
OVERLAPPING = 4  # two windows of such entries overlap: states are kept twice, for two entries
ALIGNMENT = 576
ENTRY_BYTES = 584  # 448 elements in FP8, 64 for rotation in 16 bits, eight bytes of scales
INDEX_SCALE_BYTES = 4  # per key of the indexer; an element of a key takes one byte
TUPLES, SLOTS, GROUPS = "tuples", "slots", "groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share a block table. A block has `tokens` tokens. `window` is the size of a window or a chunk, 0 without one.

    `page_bytes` is the page size of all layers of the group, 0 if all groups have the same size.
    """

    kind: str
    window: int
    tokens: int
    page_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Layers of one kind that need as many blocks of a request: the layers of each size of a page, in bytes."""

    kind: str
    window: int
    tokens: int
    layers: dict[int, int]

    @property
    def repeats(self) -> int:
        """Return how many layers the commonest page has."""
        return max(self.layers.values())

    @property
    def is_balanced(self) -> bool:
        """Return whether each page size has the same number of layers."""
        return len(set(self.layers.values())) == 1

    def split(self, parts: int) -> list[Bucket]:
        """Return `parts` buckets; the first buckets have one layer more if the layers do not divide evenly."""
        counts = [{size: -(-(count - part) // parts) for size, count in self.layers.items()} for part in range(parts)]
        return [Bucket(self.kind, self.window, self.tokens, one) for one in counts]

    def padded(self, sizes: Sequence[int]) -> Bucket:
        """Return the bucket with each page as large as the next of some sizes."""
        layers: dict[int, int] = {}
        for size, count in self.layers.items():
            next_size = min(one for one in sizes if one >= size)
            layers[next_size] = layers.get(next_size, 0) + count
        return Bucket(self.kind, self.window, self.tokens, layers)


def compressed_groups(layers: Sequence[Layer], packing: str) -> tuple[tuple[Group, ...], int, int]:
    """Return the groups of a stage's layers, the bytes of a block, and the bytes per block in the check of one request.

    `packing` is how a version packs pages: TUPLES, SLOTS or GROUPS.
    """
    entries, *others = [bucket for bucket in _buckets(layers) if bucket.layers]
    if packing in (TUPLES, SLOTS):
        sizes = sorted(entries.layers)
        others = [bucket.padded(sizes) for bucket in others]
        together = _common_repeats([entries.repeats, *(bucket.repeats for bucket in others)], entries.repeats)
        split = [entries, *(part for bucket in others for part in bucket.split(-(-bucket.repeats // together)))]
        block = checked = sum(sizes) * max(bucket.repeats for bucket in split)
        if packing == SLOTS:
            block = sum(size * max(bucket.layers.get(size, 0) for bucket in split) for size in sizes)
    else:
        balanced = [bucket for bucket in (entries, *others) if bucket.is_balanced]
        least = max((bucket.repeats for bucket in balanced if len(bucket.layers) > 1), default=0)
        together = _common_repeats([bucket.repeats for bucket in balanced], least) if least else 0
        split = []
        for bucket in (entries, *others):
            whole = bucket not in balanced or not together
            split += [bucket] if whole else bucket.split(-(-bucket.repeats // together))
        block = checked = max(_page_bytes(bucket) for bucket in split)
    groups = (Group(kind=one.kind, window=one.window, tokens=one.tokens, page_bytes=_page_bytes(one)) for one in split)
    return tuple(groups), block, checked


def _buckets(layers: Sequence[Layer]) -> list[Bucket]:
    """Return the entries and the indexer's keys, the windows, and the states of the compressors for each ratio."""
    entries: dict[int, int] = {}
    states: dict[int, dict[int, int]] = {}
    for layer in layers:
        if layer.ratio == 1:
            continue
        _add(entries, BLOCK // layer.ratio * ENTRY_BYTES)
        tokens = STATE_BLOCKS[layer.ratio]
        overlap = 2 if layer.ratio == OVERLAPPING else 1
        _add(states.setdefault(layer.ratio, {}), tokens * 2 * overlap * layer.elements * 4)
        if layer.index_bytes:
            _add(entries, BLOCK // layer.ratio * layer.index_bytes)
            _add(states[layer.ratio], tokens * 2 * overlap * (layer.index_bytes - INDEX_SCALE_BYTES) * 4)
    windows: dict[int, int] = {}
    for _ in layers:
        _add(windows, WINDOW_BLOCK * ENTRY_BYTES)
    found = [Bucket(FULL, 0, BLOCK, entries), Bucket(SLIDING, layers[0].window, WINDOW_BLOCK, windows)]
    for ratio, sizes in states.items():
        window = ratio * (2 if ratio == OVERLAPPING else 1)
        found.append(Bucket(SLIDING, window, STATE_BLOCKS[ratio], sizes))
    return found


def _add(pages: dict[int, int], size: int) -> None:
    """Count one layer with a page of `size` bytes, rounded up to the alignment."""
    size = -(-size // ALIGNMENT) * ALIGNMENT
    pages[size] = pages.get(size, 0) + 1


def _page_bytes(bucket: Bucket) -> int:
    return sum(size * count for size, count in bucket.layers.items())


def _common_repeats(counts: Sequence[int], least: int) -> int:
    """Return the number from `least` on for which multiples pad the counts least; the largest of several (_approximate_gcd)."""
    return min(range(least, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size))

"""The KV cache as vLLM plans it: layers in groups that share one pool of pages, blocks, tokens, requests at once.

Source: vllm/v1/core/kv_cache_utils.py, kv_cache_planning.py, kv_cache_interface.py and platforms/interface.py; vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import lcm

from sizer.serving.architecture import CHUNKED, CROSS, FULL, SLIDING, STATE, Architecture, Layer
from sizer.serving.drafts import draft_layers
from sizer.serving.flags import Flags
from sizer.serving.groups import Group, compressed_groups
from sizer.serving.layout import stage_layers

_SPARSE_BYTES = 656  # kv_cache_interface.py, MLAAttentionSpec.real_page_size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Capacity of a cache of a given size in bytes.

    A block of a group takes `block_bytes`; a block of full attention has `block_tokens` tokens. Requests may use `usable`
    blocks. When the server checks that a request fits, it counts `checked_bytes` per block.
    """

    groups: tuple[Group, ...]
    block_bytes: int
    block_tokens: int
    blocks: int
    blocks_per_request: int
    kv_tokens: int
    usable: int
    checked_bytes: int

    @property
    def requests_at_once(self) -> float:
        """Return how many requests of the longest allowed length the cache holds."""
        return self.blocks / self.blocks_per_request if self.blocks_per_request else 0.0

    @property
    def needed_bytes(self) -> int:
        """The bytes of one request of the longest allowed length."""
        return self.blocks_per_request * self.checked_bytes


def page_elements(layer: Layer, tp: int) -> int:
    """Return the elements that one token takes on one rank; heads are replicated if there are more ranks than heads."""
    if layer.shared:
        return layer.elements
    return layer.elements * max(1, layer.kv_heads // tp) // layer.kv_heads


def token_bytes(layer: Layer, tp: int, itemsize: int) -> int:
    """Return the cache bytes of one token in a layer on one rank, for elements of `itemsize` bytes.

    Sparse attention keeps a latent of 512 elements in FP8 with four scales, and 64 elements for rotation in 16 bits
    (`fp8_ds_mla`).
    """
    sparse = layer.index_bytes and itemsize == 1
    return (_SPARSE_BYTES if sparse else page_elements(layer, tp) * itemsize) + layer.index_bytes


def state_bytes(layer: Layer, architecture: Architecture, tp: int, drafted: int = 0) -> int:
    """Return the bytes of a request's state in one layer on one rank, with some drafted tokens."""
    conv = layer.conv_elements + drafted * layer.conv_channels
    return -(-layer.state_elements // tp) * architecture.state_itemsize + -(-conv // tp) * 2


def plan_cache(architecture: Architecture, flags: Flags, available: int, stage: int = 0) -> CachePlan:
    """Return the capacity of a cache of `available` bytes on one rank of a pipeline stage."""
    groups, block_bytes, block_tokens, checked = _groups(architecture, flags, stage)
    blocks = max(0, available) // block_bytes if block_bytes else 0
    each = blocks_of_request(groups, flags, flags.max_model_len, architecture.encoder_tokens)
    if flags.rules.tokens_of_requests:
        logged = _logged_blocks(groups, flags) if flags.rules.weighted_groups and architecture.is_compressed else each
        tokens = blocks * flags.max_model_len // logged if logged else 0
    else:
        least = min((group.tokens for group in groups if group.page_bytes), default=block_tokens)
        tokens = blocks // max(1, len(groups)) * least * flags.dcp
    return CachePlan(
        groups=groups,
        block_bytes=block_bytes,
        block_tokens=block_tokens,
        blocks=blocks,
        blocks_per_request=each,
        kv_tokens=tokens,
        usable=max(0, max(0, available) // checked - flags.rules.idle_block) if checked else 0,
        checked_bytes=checked,
    )


def _logged_blocks(groups: tuple[Group, ...], flags: Flags) -> int:
    """Return the number of blocks per request that some logs use to count tokens.

    Blocks are weighted by the page size of their group.
    """
    needed = sum(group.page_bytes * blocks_of_request((group,), flags, flags.max_model_len) for group in groups)
    return -(-needed // groups[0].page_bytes)


def blocks_of_request(groups: tuple[Group, ...], flags: Flags, length: int, encoder_tokens: int = 0) -> int:
    """Return the blocks that one request of `length` tokens holds in all groups."""
    total, in_flight = 0, flags.max_num_batched_tokens * flags.steps_in_flight
    for group in groups:
        if group.kind == STATE:
            # MambaSpec.max_memory_usage_bytes
            total += (2 + flags.state_blocks if flags.prefix_caching else 1) + flags.draft_tokens
        elif group.kind == CROSS:
            total += -(-encoder_tokens // group.tokens)
        elif group.kind == SLIDING:
            total += -(-min(group.window - 1 + in_flight, length) // group.tokens) + 1
        elif group.kind == CHUNKED:
            total += -(-min(group.window + in_flight, length) // group.tokens)
        else:
            # FullAttentionSpec.max_memory_usage_bytes: each rank of decode context parallel has its share of the tokens
            own = -(-length // flags.dcp)
            total += -(-own // group.tokens)
    return total


def longest_request(plan: CachePlan, flags: Flags, limit: int, encoder_tokens: int = 0) -> int:
    """Return the longest request in tokens, up to `limit`, that the blocks of a plan hold (estimate_max_model_len)."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        fits = blocks_of_request(plan.groups, flags, middle, encoder_tokens) <= plan.usable
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _groups(architecture: Architecture, flags: Flags, stage: int) -> tuple[tuple[Group, ...], int, int, int]:
    """Return the groups of a stage's layers, the bytes and the tokens of a block over a group's layers, and `checked_bytes`."""
    layers = [architecture.layers[number] for number in stage_layers(len(architecture.layers), flags.pp)[stage]]
    if architecture.is_compressed:
        groups, block_bytes, checked = compressed_groups(layers, flags.rules.packing)
        return groups, block_bytes, flags.block, checked
    kinds: dict[Layer, int] = {}
    for layer in (*layers, *draft_layers(architecture, flags, stage)):
        if layer.kind == CHUNKED and not flags.keeps_chunks:
            layer = replace(layer, kind=FULL, window=0)
        if layer.elements or layer.state_elements or layer.conv_elements:
            kinds[layer] = kinds.get(layer, 0) + 1
    if not kinds:
        return (), 0, flags.block, 0
    attention = {layer: count for layer, count in kinds.items() if layer.kind != STATE}
    if not attention:
        return _states_alone(kinds, architecture, flags)
    if len(kinds) > 1 and all(layer.kind == FULL for layer in kinds):
        # kv_cache_interface.py, UniformTypeKVCacheSpecs, from 0.11: one group, in which each layer has its own page
        size = flags.block * sum(token_bytes(layer, flags.tp, flags.kv_itemsize) * count for layer, count in kinds.items())
        return (Group(kind=FULL, window=0, tokens=flags.block),), size, flags.block, size
    blocks, page = _pages(attention, kinds, architecture, flags)
    size = _group_size(kinds.values(), flags.rules.padding)
    groups = tuple(
        Group(kind=layer.kind, window=layer.window, tokens=blocks.get(layer, 0))
        for layer, count in sorted(kinds.items(), key=lambda item: item[0].kind == STATE)
        for _ in range(-(-count // size))
    )
    return groups, page * size, next(iter(blocks.values())), page * size


def _pages(
    attention: Mapping[Layer, int], kinds: Mapping[Layer, int], architecture: Architecture, flags: Flags
) -> tuple[dict[Layer, int], int]:
    """Return the tokens of a block by attention layer, and the bytes of a page, which all layers share.

    The largest page decides: blocks of layers with smaller tokens have more of them (unify_kv_cache_spec_page_size), and attention
    blocks grow until a page holds the state of a layer that has one.
    """
    token = {layer: token_bytes(layer, flags.tp, flags.kv_itemsize) for layer in attention}
    states = [state_bytes(layer, architecture, flags.tp, flags.draft_tokens) for layer in kinds if layer.kind == STATE]
    block = flags.block
    if states:
        tokens = -(-max(states) // min(token.values()))
        block = max(block, -(-tokens // flags.state_step) * flags.state_step)
    largest = max(token.values())
    page = largest * block
    if any(page % size for size in token.values()):
        page = lcm(*token.values()) * block if len(token) == 2 else page
    return {layer: max(1, page // size) for layer, size in token.items()}, page


def _states_alone(
    kinds: Mapping[Layer, int], architecture: Architecture, flags: Flags
) -> tuple[tuple[Group, ...], int, int, int]:
    """Return the one group of a model without attention: a block is the state of a request."""
    page = max(state_bytes(layer, architecture, flags.tp, flags.draft_tokens) for layer in kinds)
    group = Group(kind=STATE, window=0, tokens=flags.max_model_len)
    size = page * sum(kinds.values())
    return (group,), size, flags.max_model_len, size


def _group_size(counts: Collection[int], padding: float) -> int:
    """Return how many layers a group has: the least count of a kind, the largest if that is less than `padding` times as much."""
    low, high = min(counts), max(counts)
    return high if high < low * padding else low


def with_length(flags: Flags, length: int) -> Flags:
    """Return the flags with another longest length in tokens."""
    return replace(flags, max_model_len=length)

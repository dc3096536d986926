"""Memory of llama.cpp's compute buffer: one micro-batch's graph of a few layers, placed as ggml's graph allocator places it.

The allocator puts each tensor into the smallest free block that is large enough, else behind all others, and frees it after its
last use. An operator that may work in place takes the place of an argument that nothing else uses; not that of a view. A weight
that is on the host is copied to the device for the operator that multiplies it, as are keys and values of a cache on the host.

Source: llama.cpp b11549 (October 2026), ggml/src/ggml-alloc.c, ggml/src/ggml-backend.cpp (ggml_backend_sched_split_graph),
src/llama-graph.cpp and src/models/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

ALIGNMENT = 128  # ggml/src/ggml-cuda/ggml-cuda.cu, ggml_backend_cuda_buffer_type_get_alignment
FLOAT, POSITION, CELL = 4, 4, 8  # bytes of an element, of a token's position, and of the number of its cell
_ENDLESS = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Elements of a head with MLA: `key` and `value` without rotation, `rotary` with it, `rank` of the shared cache.

    `narrow` is the rank of queries, 0 if they are projected at once.
    """

    heads: int
    rank: int
    key: int
    value: int
    rotary: int
    narrow: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Sizes of one layer in elements of a token.

    `feed` is the width of the dense feed-forward part, or that of the shared expert, 0 without. `used` of `experts` experts of
    `width` each run for a token. `gate` is "split" for separate gate and up projections, "whole" for one matrix, "" without a
    gate; `expert_gate` is that of experts. `fused` layers project queries, keys and values with one matrix. In `parallel` ones
    both parts read the same hidden states. `weights` are the bytes of matrices that are on the host, by their role; `cached` is
    True if keys and values are there.
    """

    query: int
    key: int
    value: int
    feed: int
    gate: str = "split"
    expert_gate: str = "split"
    experts: int = 0
    used: int = 0
    width: int = 0
    fused: bool = False
    parallel: bool = False
    rotated: bool = True
    norms_first: bool = True
    latent: Latent | None = None
    weights: dict[str, int] = field(default_factory=dict)
    cached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch: its tokens, the cells of each cache that a token attends to, and the logits that are kept.

    `item` is the numerator and denominator of the bytes of a cached element. `turns` are the bytes of the matrices that rotate
    keys and values of a quantized cache, empty without. `copies` is True if attention copies this cache to 16 bits behind its
    result (ggml/src/ggml-cuda/fattn.cu, ggml_cuda_flash_attn_ext_get_alloc_size). `inputs` are the elements of a token that all
    layers together read from embeddings of their own (Gemma 3n and 4). `streams` are the micro-batches in flight over several
    devices, whose inputs exist at once (ggml-backend.cpp, GGML_SCHED_MAX_COPIES). `borrowed` are the bytes of keys and values on
    another device that layers of this one read (Gemma 3n and 4): each layer copies its own view, once for each micro-batch.
    """

    tokens: int
    cells: tuple[int, ...]
    outputs: int
    hidden: int
    vocabulary: int
    item: tuple[int, int] = (2, 1)
    turns: tuple[int, ...] = ()
    inputs: int = 0
    copies: bool = False
    streams: int = 1
    borrowed: int = 0


class _Heap:
    """A device's compute buffer while it is planned (ggml_dyn_tallocr)."""

    def __init__(self) -> None:
        self.free = [(0, _ENDLESS)]
        self.peak = 0

    def take(self, size: int) -> int:
        """Return the place of a tensor: the smallest block that holds it, the last one of equals; the end if none does."""
        size = _padded(size)
        fitting = [(length, -place) for place, length in self.free[:-1] if length >= size]
        place = -min(fitting)[1] if fitting else self.free[-1][0]
        index = next(i for i, (start, _) in enumerate(self.free) if start == place)
        length = self.free[index][1]
        self.free[index : index + 1] = [(place + size, length - size)] if length > size else []
        self.peak = max(self.peak, place + size)
        return place

    def give(self, place: int, size: int) -> None:
        """Free the block of a tensor."""
        self.free = sorted([*self.free, (place, _padded(size))])
        merged = [self.free[0]]
        for start, length in self.free[1:]:
            before, held = merged[-1]
            merged[-1:] = [(before, held + length)] if before + held == start else [merged[-1], (start, length)]
        self.free = merged


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Graph:
    """Operators in their order: the bytes of each result, its arguments, and whether it may take an argument's place."""

    def __init__(self) -> None:
        self.operators: list[tuple[int, tuple[int, ...], bool]] = []

    def add(self, size: int, *arguments: int, reuses: bool = False) -> int:
        """Append an operator and return its number. One of 0 bytes writes elsewhere."""
        self.operators.append((size, arguments, reuses))
        return len(self.operators) - 1

    def multiply(self, size: int, argument: int, weight: int = 0) -> int:
        """Append a product with a weight, which is copied first if it has bytes on the host."""
        return self.add(size, self.add(weight), argument) if weight else self.add(size, argument)

    def change(self, value: int, *arguments: int) -> int:
        """Append an operator that works in place."""
        return self.add(self.operators[value][0], value, *arguments, reuses=True)

    def peak(self) -> int:
        """Return the bytes of the buffer that all results need."""
        uses = [0] * len(self.operators)
        for _, arguments, _ in self.operators:
            for one in arguments:
                uses[one] += 1
        heap, places = _Heap(), dict[int, int]()
        for number, (size, arguments, reuses) in enumerate(self.operators):
            taken = [one for one in arguments if reuses and uses[one] == 1 and one in places and self.operators[one][0] == size]
            if taken:
                places[number] = places.pop(taken[0])
            elif size:
                places[number] = heap.take(size)
            for one in arguments:
                uses[one] -= 1
                if not uses[one] and one in places:
                    heap.give(places.pop(one), self.operators[one][0])
        return heap.peak


def compute_bytes(blocks: Sequence[Block], batch: Batch, *, is_first: bool = True, is_last: bool = True) -> int:
    """Return the bytes of a device's compute buffer for its layers in their order.

    Args:
        blocks: The layers; those on the host come first.
        batch: The micro-batch.
        is_first: False for a device that gets the hidden states, and their first norm, from another one.
        is_last: True for the device of the head.
    """
    graph, token = _Graph(), FLOAT * batch.tokens
    inputs = _Inputs(graph, batch, rotates=any(block.rotated for block in blocks))
    normed = inputs.take(batch.hidden * token) if not is_first and blocks[0].norms_first else None
    state = inputs.take(batch.hidden * token) if is_first else 0
    if not blocks[0].cached:  # one split of the graph, whose inputs are copied when it begins
        inputs.make()
    if not is_first:
        state = inputs.take(batch.hidden * token)
    if batch.borrowed:  # ggml_backend_sched_split_graph: copies are outputs, which nothing overwrites
        inputs.held += [graph.add(batch.borrowed) for _ in range(batch.streams)]
    kept = (inputs.take(POSITION * batch.outputs),) if is_last and not blocks[0].cached else ()
    embedded = []
    if batch.inputs and not is_first:
        embedded = [inputs.take(batch.inputs * token)]
    elif batch.inputs:
        own = inputs.take(batch.inputs * token)
        projected = graph.change(graph.add(batch.inputs * token, state))
        embedded = [graph.add(batch.inputs * token, graph.change(projected, own))]
    for number, block in enumerate(blocks):
        ends = number == len(blocks) - 1
        if ends:
            graph.add(0, *inputs.masks, *inputs.places)  # each kind of layer needs its own almost up to the last layer
        normed = _norm(graph, block, state) if number or normed is None else graph.change(normed)
        state = _layer(graph, block, batch, state, normed, inputs, kept if ends and is_last else None)
    graph.add(0, *embedded)
    if is_last:
        graph.add(batch.vocabulary * FLOAT * batch.outputs, graph.change(graph.change(state)))
    else:  # both go to the next device
        graph.add(0, state, graph.add(batch.hidden * token, state))
    graph.add(0, *inputs.held)
    return graph.peak()


class _Inputs:
    """Tensors that all layers read, made when the first of them needs one. Those of other micro-batches in flight are `held`."""

    def __init__(self, graph: _Graph, batch: Batch, *, rotates: bool) -> None:
        self.graph, self.batch, self.rotates = graph, batch, rotates
        self.masks: list[int] = []
        self.places: list[int] = []
        self.held: list[int] = []
        self._positions: list[int] | None = None

    def take(self, size: int) -> int:
        """Append an input, once for each micro-batch in flight, and return the first."""
        found = [self.graph.add(size) for _ in range(self.batch.streams)]
        self.held += found if len(found) > 1 else []
        return found[0]

    def make(self) -> None:
        """Make all tensors in the order of the first layer."""
        self.positions()
        for size in self.batch.turns:
            self.take(size)
        self.mask(writes=True)

    def positions(self) -> list[int]:
        """Return the positions of tokens, nothing for a model that does not rotate queries and keys."""
        if self._positions is None:
            self._positions = [self.take(POSITION * self.batch.tokens)] if self.rotates else []
        return self._positions

    def mask(self, *, writes: bool = False) -> int:
        """Return the mask of the first kind of layer. A device that `writes` keys and values needs the numbers of their cells."""
        for cells in self.batch.cells[len(self.masks) :]:
            self.places += [self.take(CELL * self.batch.tokens) for _ in range(2 if writes else 0)]
            self.masks.append(self.take(2 * cells * self.batch.tokens))
        return self.masks[0]


def _layer(
    graph: _Graph, block: Block, batch: Batch, state: int, normed: int, inputs: _Inputs, kept: tuple[int, ...] | None
) -> int:
    """Append one layer and return its output. The last one has `kept`, after whose attention only tokens with logits go on."""
    token = FLOAT * batch.tokens
    attended = normed
    if block.latent is not None:
        attended = _attend_latent(graph, block, block.latent, batch, normed, inputs)
    elif block.query:
        attended = _attend(graph, block, batch, normed, inputs)
    out = graph.multiply(batch.hidden * token, attended, block.weights.get("attn_output", 0))
    if kept is not None:
        batch = replace(batch, tokens=batch.outputs)
        out, state = (graph.add(batch.hidden * FLOAT * batch.outputs, one, *kept) for one in (out, state))
        normed = graph.add(batch.hidden * FLOAT * batch.outputs, normed, *kept) if block.parallel else normed
    if block.parallel:
        fed = _feed(graph, block, batch, normed)
        return graph.change(graph.change(out, fed), state)
    out = graph.change(out, state)
    fed = _feed(graph, block, batch, _norm(graph, block, out))
    return graph.change(fed, out)


def _attend(graph: _Graph, block: Block, batch: Batch, normed: int, inputs: _Inputs) -> int:
    """Append an attention layer without its last projection and return its result."""
    token = FLOAT * batch.tokens
    query, key, value = _heads(graph, block, batch, normed, inputs)
    graph.add(0, key, *inputs.places[:1])
    graph.add(0, value, *inputs.places[1:2])
    numerator, denominator = batch.item
    copies = [graph.add(batch.cells[0] * one * numerator // denominator) for one in (block.key, block.value) if block.cached]
    size = (block.query // block.key * block.value if block.key else block.query) * token
    extra = 2 * batch.cells[0] * (block.key + block.value) if batch.copies else 0
    attended = graph.add(size + extra, query, *copies, inputs.mask())
    return graph.multiply(size, attended) if batch.turns else attended


def _attend_latent(graph: _Graph, block: Block, latent: Latent, batch: Batch, normed: int, inputs: _Inputs) -> int:
    """Append attention with MLA, whose queries are multiplied by the keys' matrix (src/models/deepseek2.cpp)."""
    token, weights, heads = FLOAT * batch.tokens, block.weights, latent.heads
    query = normed
    if latent.narrow:
        query = graph.change(graph.change(graph.multiply(latent.narrow * token, query, weights.get("attn_q_a", 0))))
    whole = heads * (latent.key + latent.rotary) * token
    query = graph.multiply(whole, query, weights.get("attn_q_a" if latent.narrow else "attn_q", 0))
    absorbed = graph.multiply(heads * latent.rank * token, query, weights.get("attn_k_b", 0))
    turned = graph.add(heads * latent.rotary * token, query, *inputs.positions())
    query = graph.add(heads * (latent.rank + latent.rotary) * token, absorbed, turned)
    shared = graph.multiply((latent.rank + latent.rotary) * token, normed, weights.get("attn_kv_a_mqa", 0))
    compressed = graph.change(graph.add(latent.rank * token, shared))
    turned = graph.add(latent.rotary * token, shared, *inputs.positions())
    graph.add(0, graph.add((latent.rank + latent.rotary) * token, compressed, turned), *inputs.places[:1])
    numerator, denominator = batch.item
    copied = batch.cells[0] * (latent.rank + latent.rotary) * numerator // denominator
    copies = [graph.add(copied)] if block.cached else []
    extra = 2 * batch.cells[0] * (latent.rank + latent.rotary) if batch.copies else 0
    attended = graph.add(heads * latent.rank * token + extra, query, *copies, inputs.mask())
    return graph.multiply(heads * latent.value * token, attended, weights.get("attn_v_b", 0))


def _norm(graph: _Graph, block: Block, state: int) -> int:
    """Append a norm and its weights, which are copied if they are on the host; nothing for a layer whose norms come last."""
    if not block.norms_first:
        return state
    normed = graph.change(state)
    return graph.change(normed, *([graph.add(block.weights["norm"])] if "norm" in block.weights else []))


def _heads(graph: _Graph, block: Block, batch: Batch, normed: int, inputs: _Inputs) -> tuple[int, int, int]:
    """Append the projections of an attention layer and return queries, keys and values."""
    weights, token = block.weights, FLOAT * batch.tokens

    def place(value: int, size: int) -> int:
        """Append the rotation by positions, and that of a quantized cache."""
        value = graph.add(size, value, *inputs.positions()) if block.rotated else value
        return graph.multiply(size, value) if batch.turns else value

    if block.fused:
        whole = graph.multiply((block.query + block.key + block.value) * token, normed, weights.get("attn_qkv", 0))
        query = place(whole, block.query * token)
        value = graph.multiply(block.value * token, whole) if batch.turns else whole
        return query, place(whole, block.key * token), value
    query = place(graph.multiply(block.query * token, normed, weights.get("attn_q", 0)), block.query * token)
    value = graph.multiply(block.value * token, normed, weights.get("attn_v", 0))
    value = graph.multiply(block.value * token, value) if batch.turns else value
    return query, place(graph.multiply(block.key * token, normed, weights.get("attn_k", 0)), block.key * token), value


def _feed(graph: _Graph, block: Block, batch: Batch, normed: int) -> int:
    """Append the feed-forward part of a layer and return its output."""
    if not block.experts:
        return _dense(graph, block, batch, normed)
    token, weights, used = FLOAT * batch.tokens, block.weights, block.used
    scores = graph.change(graph.add(block.experts * token, normed))
    chosen = graph.add(block.experts * token, scores)
    shares = graph.add(used * token, scores, chosen)
    total = graph.change(graph.add(token, shares))
    shares = graph.add(used * token, shares, total, reuses=True)
    width = block.width * used * token

    def expand(role: str, size: int) -> int:
        return graph.add(size, *([graph.add(weights[role])] if weights.get(role) else []), normed, chosen)

    if block.expert_gate == "split":
        product = graph.add(width, expand("ffn_gate_exps", width), expand("ffn_up_exps", width))
    elif block.expert_gate == "whole":
        product = graph.add(width, expand("ffn_up_exps", 2 * width))
    else:
        product = graph.change(expand("ffn_up_exps", width))
    down = weights.get("ffn_down_exps", 0)
    result = graph.add(batch.hidden * used * token, *([graph.add(down)] if down else []), product, chosen)
    result = graph.change(result, shares)
    out = graph.add(batch.hidden * token, result, result)
    for _ in range(used - 2):
        out = graph.change(out, result)
    if block.feed:
        out = graph.change(out, _dense(graph, block, batch, normed))
    return out


def _dense(graph: _Graph, block: Block, batch: Batch, normed: int) -> int:
    """Append a dense feed-forward part, or a shared expert, and return its output."""
    width, weights = block.feed * FLOAT * batch.tokens, block.weights
    if block.gate == "split":
        gate = graph.multiply(width, normed, weights.get("ffn_gate", 0))
        product = graph.add(width, gate, graph.multiply(width, normed, weights.get("ffn_up", 0)))
    elif block.gate == "whole":
        product = graph.add(width, graph.multiply(2 * width, normed, weights.get("ffn_up", 0)))
    else:
        product = graph.change(graph.multiply(width, normed, weights.get("ffn_up", 0)))
    return graph.multiply(batch.hidden * FLOAT * batch.tokens, product, weights.get("ffn_down", 0))

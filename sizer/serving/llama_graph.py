"""Memory of llama.cpp's compute buffer: one micro-batch's graph of a few layers, placed as ggml's graph allocator places it.

The allocator puts each tensor into the smallest free block that is large enough, else behind all others, and frees it after its
last use. An operator that may work in place takes the place of an argument that nothing else uses; not that of a view. A weight
that is on the host is copied to the device for the operator that multiplies it, which begins a split of the graph. Inputs that
operators of a split read first, such as the mask, are copied when the split begins.

Source: llama.cpp b11549 (October 2026), ggml/src/ggml-alloc.c, ggml/src/ggml-backend.cpp (ggml_backend_sched_split_graph),
src/llama-graph.cpp, src/models/llama.cpp, delta-net-base.cpp, mamba-base.cpp and lfm2.cpp.
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
class State:
    """Elements of a layer with a state: `kept` of the convolution's state and `held` of the other one, for each request.

    `kind` is "delta" (gated delta net), "mamba", "mamba2" or "convolution" (LFM2). A token has `projected` elements after the first
    matrix, `channels` in the convolution, `inner` before the last matrix, and `steps` for the sizes of steps. `ranks` are those
    of the matrix from which Mamba makes these. `requests` have a state each.
    """

    kind: str
    kept: int
    held: int
    projected: int
    channels: int
    inner: int
    steps: int = 0
    ranks: int = 0
    requests: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Sizes of one layer in elements of a token.

    `feed` is the width of the dense feed-forward part, or that of the shared expert, 0 without. `used` of `experts` experts of
    `width` each run for a token. `gate` is "split" for separate gate and up projections, "whole" for one matrix, "" without a
    gate; `expert_gate` is that of experts. `fused` layers project queries, keys and values with one matrix. In `parallel` ones
    both parts read the same hidden states. A token attends to `cells` of the cache for this `kind` of layers. `gated` attention
    multiplies its result by a gate, which the queries' matrix makes, too; the shared expert has one of its own if it is
    `feed_gated`. If a layer `adds_last`, sums take the place of the residual. `weights` are the bytes of tensors that are on the
    host, by their role; `cached` is True if keys and values are there.
    """

    query: int
    key: int
    value: int
    feed: int
    heads: int = 0
    gate: str = "split"
    expert_gate: str = "split"
    experts: int = 0
    used: int = 0
    width: int = 0
    fused: bool = False
    parallel: bool = False
    rotated: bool = True
    norms_first: bool = True
    kind: str = ""
    cells: int = 0
    gated: bool = False
    feed_gated: bool = False
    adds_last: bool = False
    latent: Latent | None = None
    state: State | None = None
    weights: dict[str, int] = field(default_factory=dict)
    cached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch: its tokens, and the logits that are kept.

    `item` is the numerator and denominator of the bytes of a cached element. `turns` are the bytes of the matrices that rotate
    keys and values of a quantized cache, empty without. `copies` is True if attention copies this cache to 16 bits behind its
    result (ggml/src/ggml-cuda/fattn.cu, ggml_cuda_flash_attn_ext_get_alloc_size). `inputs` are the elements of a token that all
    layers together read from embeddings of their own (Gemma 3n and 4), `embedded` those of a layer. `streams` are the
    micro-batches in flight over several devices, whose inputs exist at once (ggml-backend.cpp, GGML_SCHED_MAX_COPIES).
    `borrowed` are the bytes of keys and values on another device that layers of this one read (Gemma 3n and 4): each layer
    copies its own view, once for each micro-batch. Rows with logits are chosen in the last layer, or after it if `late`.
    Attention without `flash` holds the products of all queries and keys, and a mask in 32 bits.
    """

    tokens: int
    outputs: int
    hidden: int
    vocabulary: int
    item: tuple[int, int] = (2, 1)
    turns: tuple[int, ...] = ()
    inputs: int = 0
    embedded: int = 0
    copies: bool = False
    streams: int = 1
    borrowed: int = 0
    late: bool = False
    flash: bool = True


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
        self.order: list[int] = []
        self.split = 0  # the place in the order at which the next input is copied
        self.copies = 0  # inputs of the split

    def add(self, size: int, *arguments: int, reuses: bool = False) -> int:
        """Append an operator and return its number. One of 0 bytes writes elsewhere."""
        self.operators.append((size, arguments, reuses))
        self.order.append(len(self.operators) - 1)
        return self.order[-1]

    def begin(self) -> None:
        """Begin a split (ggml-backend.cpp, ggml_backend_sched_split_graph)."""
        self.split, self.copies = len(self.order), 0

    def copy(self, size: int) -> int:
        """Insert the copy of an input where the split begins, and return its number."""
        number = self.add(size)
        self.order.insert(self.split, self.order.pop())
        self.split += 1
        self.copies += 1
        return number

    def weigh(self, size: int) -> list[int]:
        """Copy a weight, for which a split with inputs ends; nothing if it has no bytes on the host."""
        if not size:
            return []
        if self.copies:
            self.begin()
        return [self.copy(size)]

    def multiply(self, size: int, argument: int, weight: int = 0) -> int:
        """Append a product with a weight, which is copied first if it has bytes on the host."""
        return self.add(size, *self.weigh(weight), argument)

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
        for number in self.order:
            size, arguments, reuses = self.operators[number]
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
    # mamba-base.cpp: a gate is read after the next layer's states, and therefore on the next device, which gives its copy back
    mamba = blocks[0].state if batch.streams > 1 and blocks[0].state is not None and blocks[0].state.kind == "mamba" else None
    if mamba is not None and not is_first:
        inputs.take(mamba.projected * token - FLOAT * (mamba.projected - mamba.inner))
    normed = inputs.take(batch.hidden * token) if not is_first and blocks[0].norms_first else None
    own = inputs.take(batch.inputs * token) if batch.inputs and is_first else 0
    state = first = inputs.take(batch.hidden * token) if is_first else 0
    if not blocks[0].cached and blocks[0].state is None:
        inputs.make(blocks[0])
    if not is_first:
        state = inputs.take(batch.hidden * token)
    if mamba is not None and not is_last:
        inputs.take(mamba.inner * token)
    if batch.borrowed:  # ggml_backend_sched_split_graph: copies are outputs, which nothing overwrites
        inputs.held += [graph.copy(batch.borrowed) for _ in range(batch.streams)]
    embedded = [inputs.take(batch.inputs * token)] if batch.inputs and not is_first else []
    for number, block in enumerate(blocks):
        ends = number == len(blocks) - 1
        normed = _norm(graph, block, state) if number or normed is None else graph.change(normed)
        chooses = ends and is_last and not batch.late
        state = _layer(graph, block, batch, state, normed, inputs, chooses=chooses)
        if batch.inputs:  # src/models/gemma4.cpp, project_per_layer_inputs in the first layer
            kept = FLOAT * batch.outputs if chooses else token
            gate = graph.change(graph.add(batch.embedded * kept, state))
            if not embedded:
                projected = graph.change(graph.add(batch.inputs * token, first))
                whole = graph.change(graph.add(batch.inputs * token, projected), own)
                embedded = [graph.add(batch.inputs * token, whole)]
            gate = graph.change(gate, *([graph.add(batch.embedded * kept, *embedded)] if chooses else embedded))
            state = graph.change(state, graph.change(graph.add(batch.hidden * kept, gate)))
    graph.add(0, *embedded)
    if is_last:
        state = graph.change(graph.change(state))
        if batch.late:
            state = graph.add(batch.hidden * FLOAT * batch.outputs, state, inputs.rows())
        graph.add(batch.vocabulary * FLOAT * batch.outputs, state)
    else:  # both go to the next device
        graph.add(0, state, graph.add(batch.hidden * token, state))
    graph.add(0, *inputs.held)
    return graph.peak()


class _Inputs:
    """Tensors that several layers read, made when one needs them first. Those of other micro-batches in flight are `held`."""

    def __init__(self, graph: _Graph, batch: Batch, *, rotates: bool) -> None:
        self.graph, self.batch, self.rotates = graph, batch, rotates
        self.held: list[int] = []
        self._masks: dict[tuple[str, int], int] = {}
        self._places: dict[tuple[str, int], list[int]] = {}
        self._positions: list[int] | None = None
        self._turned = False
        self._requests: list[int] = []
        self._rows: int | None = None
        self._factors: list[int] = []

    def take(self, size: int) -> int:
        """Append an input, once for each micro-batch in flight, and return the first."""
        found = [self.graph.copy(size) for _ in range(self.batch.streams)]
        self.held += found if len(found) > 1 else []
        return found[0]

    def make(self, block: Block) -> None:
        """Make all tensors of an attention layer on the device, in its order."""
        self.positions()
        self.turn()
        self.places(block)
        self.mask(block)

    def turn(self) -> None:
        """Make the matrices that rotate keys and values of a quantized cache."""
        for size in () if self._turned else self.batch.turns:
            self.take(size)
        self._turned = True

    def positions(self) -> list[int]:
        """Return the positions of tokens, nothing for a model that does not rotate queries and keys."""
        if self._positions is None:
            self._positions = [self.take(POSITION * self.batch.tokens)] if self.rotates else []
        return self._positions

    def rows(self) -> int:
        """Return the numbers of the tokens with logits."""
        self._rows = self.take(POSITION * self.batch.outputs) if self._rows is None else self._rows
        return self._rows

    def rotation(self, size: int) -> list[int]:
        """Return positions, and factors of `size` bytes that are on the host, for which a split ends each time."""
        if size and self.graph.copies:
            self.graph.begin()
        found = self.positions()
        if size and not self._factors:
            self._factors = [self.graph.copy(size)]
        return [*found, *self._factors]

    def requests(self) -> list[int]:
        """Return the numbers of the requests' states."""
        self._requests = self._requests or [self.take(POSITION)]
        return self._requests

    def places(self, block: Block) -> list[int]:
        """Return the numbers of the cells to which a layer writes keys and values, nothing if the host writes them."""
        key = (block.kind, block.cells)
        if key not in self._places and not block.cached:
            rows = 1 if self.batch.flash or block.latent else block.value  # values are written to turned cells
            self._places[key] = [self.take(CELL * self.batch.tokens * one) for one in (1, rows)]
        return [] if block.cached else self._places[key]

    def mask(self, block: Block) -> int:
        """Return the mask of a kind of layer."""
        key = (block.kind, block.cells)
        if key not in self._masks:
            self._masks[key] = self.take((2 if self.batch.flash else FLOAT) * block.cells * self.batch.tokens)
        return self._masks[key]


def _layer(graph: _Graph, block: Block, batch: Batch, state: int, normed: int, inputs: _Inputs, *, chooses: bool) -> int:
    """Append one layer and return its output. One that `chooses` has tokens with logits alone after its attention."""
    token, weights = FLOAT * batch.tokens, block.weights
    feeds, out = bool(block.feed or block.experts), None
    if block.state is not None:
        inner = _keep_state(graph, block, block.state, batch, normed, inputs)
        out = graph.multiply(batch.hidden * token, inner, weights.get("ssm_out", 0))
    elif block.latent is not None or block.query:
        attended = (
            _attend(graph, block, batch, normed, inputs)
            if block.latent is None
            else _attend_latent(graph, block, block.latent, batch, normed, inputs)
        )
        out = graph.multiply(batch.hidden * token, attended, weights.get("attn_output", 0))
    if chooses:
        kept = inputs.rows()
        batch = replace(batch, tokens=batch.outputs)
        chosen = batch.hidden * FLOAT * batch.outputs
        out = None if out is None else graph.add(chosen, out, kept)
        state = graph.add(chosen, state, kept)
        normed = graph.add(chosen, normed, kept) if block.parallel or out is None else normed
    if block.parallel and out is not None:
        fed = _feed(graph, block, batch, normed)
        return graph.change(graph.change(out, fed), state)

    def join(part: int, residual: int, *, viewed: bool = False) -> int:
        """Append the sum with the residual; it doesn't take the place of a part that is viewed."""
        part = part if block.norms_first else graph.change(part, *graph.weigh(weights.get("norm", 0)))
        last = block.adds_last or (viewed and not chooses)
        return graph.change(residual, part) if last else graph.change(part, residual)

    if out is not None:
        viewed = block.state is not None and block.state.kind != "mamba2"
        state = join(out, state, viewed=viewed)
        normed = _norm(graph, block, state) if feeds else normed
    return join(_feed(graph, block, batch, normed), state) if feeds else state


def _keep_state(graph: _Graph, block: Block, state: State, batch: Batch, normed: int, inputs: _Inputs) -> int:
    """Append a layer with a state, without its last projection, and return its result."""
    token, weights, requests = FLOAT * batch.tokens, block.weights, FLOAT * state.requests

    def read(size: int) -> int:
        """Read states from the cache, which are copied if it is on the host."""
        return graph.copy(size * requests) if block.cached else graph.add(size * requests, *inputs.requests())

    def convolve(whole: int) -> int:
        """Append the convolution, after the host has written the last of its inputs if the cache is there."""
        if block.cached:
            graph.begin()
        return graph.add(state.channels * token, *graph.weigh(weights.get("ssm_conv1d", 0)), whole)

    kept = read(state.kept)
    projected = graph.multiply(state.projected * token, normed, weights.get("ssm_in", weights.get("attn_qkv", 0)))
    if state.kind == "convolution":
        product = graph.add(state.channels * token, projected)
        whole = graph.add(state.channels * token + state.kept * requests, kept, product)
        return graph.change(convolve(whole), projected)
    whole = graph.add(state.channels * token + state.kept * requests, kept, projected)
    inner, result = state.inner * token, state.inner * token + state.held * requests
    if state.kind == "delta":
        held = read(state.held)
        mixed = graph.change(convolve(whole))
        query, key = (graph.change(graph.add((state.channels - state.inner) // 2 * token, mixed)) for _ in range(2))
        steps = graph.change(graph.change(graph.add(state.steps * token, graph.multiply(state.steps * token, normed))))
        shares = graph.add(state.steps * token, graph.multiply(state.steps * token, normed))
        found = graph.add(inner, graph.add(result, query, key, mixed, steps, shares, held))
        gate = graph.multiply(inner, normed, weights.get("attn_gate", 0))
        return graph.change(found, graph.add(inner, gate))
    mixed = graph.change(convolve(whole))
    if state.kind == "mamba":
        ranks = graph.multiply(state.ranks * token, mixed, weights.get("ssm_x", 0))
        steps = graph.change(graph.multiply(inner, graph.add(state.steps * token, ranks), weights.get("ssm_dt", 0)))
        scanned = graph.add(result, mixed, steps, ranks)
        gate = graph.add(inner, projected)
        return graph.add(inner, gate, graph.change(mixed, scanned))
    scanned = graph.add(result, mixed, graph.change(graph.add(state.steps * token, projected)))
    gate = graph.add(inner, projected)
    found = graph.change(graph.add(inner, mixed), scanned)
    return graph.change(graph.add(inner, graph.add(inner, gate, found)))


def _attend(graph: _Graph, block: Block, batch: Batch, normed: int, inputs: _Inputs) -> int:
    """Append an attention layer without its last projection and return its result."""
    token = FLOAT * batch.tokens
    query, key, value, gate = _heads(graph, block, batch, normed, inputs)
    places = inputs.places(block)
    graph.add(0, key, *places[:1])
    graph.add(0, value, *places[1:])
    numerator, denominator = batch.item
    if block.cached:  # the host writes keys and values
        graph.begin()
    copies = [graph.copy(block.cells * one * numerator // denominator) for one in (block.key, block.value) if block.cached]
    if not batch.flash:
        return _attend_whole(graph, block, batch, query, copies, inputs, gate)
    size = (block.query // block.key * block.value if block.key else block.query) * token
    extra = 2 * block.cells * (block.key + block.value) if batch.copies else 0
    attended = graph.add(size + extra, query, *copies, inputs.mask(block))
    attended = graph.multiply(size, attended) if batch.turns else attended
    return graph.change(graph.add(size, *gate), attended) if gate else attended


def _attend_whole(
    graph: _Graph, block: Block, batch: Batch, query: int, copies: list[int], inputs: _Inputs, gate: tuple[int, ...]
) -> int:
    """Append attention that holds the products of all queries and keys (llama-graph.cpp, build_attn_mha)."""
    token = FLOAT * batch.tokens
    products = graph.change(graph.add(block.heads * block.cells * token, query, *copies[:1]), inputs.mask(block))
    size = (block.query // block.key * block.value if block.key else block.query) * token
    attended = graph.add(size, graph.add(size, products, *copies[1:]))
    attended = graph.multiply(size, attended) if batch.turns else attended
    return graph.change(graph.add(size, *gate), attended) if gate else attended


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
    graph.add(0, graph.add((latent.rank + latent.rotary) * token, compressed, turned), *inputs.places(block)[:1])
    numerator, denominator = batch.item
    copied = block.cells * (latent.rank + latent.rotary) * numerator // denominator
    if block.cached:
        graph.begin()
    copies = [graph.copy(copied)] if block.cached else []
    extra = 2 * block.cells * (latent.rank + latent.rotary) if batch.copies else 0
    if batch.flash:
        attended = graph.add(heads * latent.rank * token + extra, query, *copies, inputs.mask(block))
        return graph.multiply(heads * latent.value * token, attended, weights.get("attn_v_b", 0))
    products = graph.change(graph.add(heads * block.cells * token, query, *copies), inputs.mask(block))
    turned = graph.add(2 * block.cells * latent.rank, *copies)  # values are part of the keys, and turned
    attended = graph.add(heads * latent.rank * token, turned, products)
    attended = graph.multiply(heads * latent.value * token, attended, weights.get("attn_v_b", 0))
    return graph.add(heads * latent.value * token, attended)


def _norm(graph: _Graph, block: Block, state: int) -> int:
    """Append a norm and its weights, which are copied if they are on the host; nothing for a layer whose norms come last."""
    if not block.norms_first:
        return state
    normed = graph.change(state)
    return graph.change(normed, *graph.weigh(block.weights.get("norm", 0)))


def _heads(graph: _Graph, block: Block, batch: Batch, normed: int, inputs: _Inputs) -> tuple[int, int, int, tuple[int, ...]]:
    """Append the projections of an attention layer and return queries, keys, values, and the tensor of a gate if there is one."""
    weights, token = block.weights, FLOAT * batch.tokens

    def project(role: str, size: int) -> int:
        """Append a projection and its bias."""
        return tune(graph.multiply(size, normed, weights.get(role, 0)), f"{role}.bias")

    def tune(value: int, role: str) -> int:
        """Append an operator in place with a vector, if that is on the host."""
        return graph.change(value, *graph.weigh(weights[role])) if role in weights else value

    def place(value: int, size: int, norm: str) -> int:
        """Append a norm, the rotation by positions, and that of a quantized cache."""
        if not block.norms_first:  # OLMo 2: norms of all heads together
            value = tune(value, norm)
        if norm in weights and block.norms_first:
            value = tune(graph.add(size, value), norm)
            value = graph.change(value, *inputs.rotation(weights.get("rope_freqs", 0))) if block.rotated else value
        elif block.rotated:
            value = graph.add(size, value, *inputs.rotation(weights.get("rope_freqs", 0)))
        return graph.multiply(size, value) if batch.turns else value

    if block.fused:
        whole = project("attn_qkv", (block.query + block.key + block.value) * token)
        query = place(whole, block.query * token, "attn_q_norm")
        value = graph.multiply(block.value * token, whole) if batch.turns else whole
        return query, place(whole, block.key * token, "attn_k_norm"), value, ()
    whole = project("attn_q", (2 if block.gated else 1) * block.query * token)
    query = place(whole, block.query * token, "attn_q_norm")
    value = project("attn_v", block.value * token)
    value = graph.multiply(block.value * token, value) if batch.turns else value
    key = place(project("attn_k", block.key * token), block.key * token, "attn_k_norm")
    return query, key, value, (whole,) if block.gated else ()


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
        return tune(graph.add(size, *graph.weigh(weights.get(role, 0)), normed, chosen))

    def tune(value: int) -> int:
        """Append the biases of experts, if they are on the host."""
        return graph.change(value, *graph.weigh(weights["ffn_bias_exps"]), chosen) if "ffn_bias_exps" in weights else value

    if block.expert_gate == "split":
        product = graph.add(width, expand("ffn_gate_exps", width), expand("ffn_up_exps", width))
    elif block.expert_gate == "whole":
        product = graph.add(width, expand("ffn_up_exps", 2 * width))
    else:
        product = graph.change(expand("ffn_up_exps", width))
    result = tune(graph.add(batch.hidden * used * token, *graph.weigh(weights.get("ffn_down_exps", 0)), product, chosen))
    if "ffn_down_exps.scale" in weights:
        result = graph.change(result, graph.add(used * token, *graph.weigh(weights["ffn_down_exps.scale"]), chosen))
    result = graph.change(result, shares)
    out = graph.add(batch.hidden * token, result, result)
    for _ in range(used - 2):
        out = graph.change(out, result)
    if block.feed:
        shared = _dense(graph, block, batch, normed)
        shared = graph.change(shared, graph.change(graph.add(token, normed))) if block.feed_gated else shared
        out = graph.change(out, shared)
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

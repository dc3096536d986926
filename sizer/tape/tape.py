"""Tapes: every allocation and release of one traced piece of work, its streams, and notes on blocks that a trace can request.

CUDA's allocator has separate free blocks for each stream: a block allocated for one stream is never given to another
(c10/cuda/CUDACachingAllocator.cpp, BlockComparatorSize). A block that other streams also use (`Tensor.record_stream`) is free
once these have done their work up to its release. Timing decides whether they have when the next block is requested. A replay
assumes that they have, which gives the least reserved memory. They have at the latest when the host waits for them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

import numpy as np

from sizer.tape.communication import Collective
from sizer.tape.size_queries import Answer, SizeOracle, SizeQuery

FROZEN = "frozen parameter"  # a separate category if only a part of a model is trained
KV_CACHE = "kv cache"  # cached keys and values of a generation's tokens
# Recordings know a category by its place here.
CATEGORIES = (
    "parameter",
    "buffer",
    "gradient",
    "optimizer state",
    "activation",
    "temporary",
    "input",
    "workspace",
    FROZEN,
    KV_CACHE,
)
PHASES = ("load", "forward", "backward", "optimizer", "step2", "evaluate", "prefill", "decode", "rollout", "reference")
AFTER = "after"  # after a pipeline's call
# A pipeline's phases are the names of its parts, by diffusers, in the order of their use.
PIPELINE_PHASES = (
    "text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder", "prior", "vae_encode", "controlnet",
    "transformer", "transformer_2", "unet", "decoder", "vqvae", "vae", AFTER,
)  # fmt: skip
EMPTY_CACHE = "torch.cuda.empty_cache"  # the op of the blocks that represent its calls
PRIVATE = 128  # streams from this number on are private pools: their cached memory goes back to the driver once they are deleted
RESIZE = "UntypedStorage.resize_"  # the op of the blocks that it allocates: FSDP2 gathers parameters into such storages


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A step of a tape that is repeated `count` times: the events from `begin` to `end` of its order.

    The step before it in the tape is equal except for its sizes. The sizes grow each time by the difference between these two
    (sizer.tape.loops). Later events of the tape follow the last repetition, and name its blocks by the step's own numbers.
    """

    begin: int
    end: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """Allocations and releases (bytes as requested, not rounded) of one traced piece of work at one batch size.

    Args:
        order: array('q') in time order; i >= 0 allocates block i, a negative value ~i (that is -i-1) releases block i. Every
            block is allocated exactly once and released at most once, later.
        sizes: array('q'), bytes requested by block i.
        categories: Index into CATEGORIES per block.
        ops, modules: array('l'), index into op_names ("aten.convolution.default", "Module.to") and module_names (dotted path,
            "" for the root) per block.
        marks: (position in `order` of the phase's end, phase name), ascending; the phases are slices of `order`.
        stand_ins: Assumptions for unknown values; every report lists them as uncounted.
        size_queries: Queries to a library for the size of some blocks; until they are resolved, `sizes` holds a model.
        resolved: The blocks with a library's answer as size.
        second_forward: Position in `order` of the end of the second step's forward pass; None if there is none.
        loops: Repeated steps, ascending; the other columns hold each of them once (`sizer.tape.loops.written`: all of them).
        streams: By block the number of the stream for which it was allocated, 0 for the default one; empty if all are of that.
            From PRIVATE on it is a private pool: of CUDA graphs, or a `torch.cuda.MemPool`. A tape of several streams has no
            loops.
        awaited: Blocks that other streams also use (`Tensor.record_stream`): after its release, each is free once that work is
            done.
        settled: (position in `order` of the next event, block): the host has waited there for the streams of a released block.
        collectives: Collectives of this rank, if any, by phase.
        outputs: By forward pass of training, the blocks of the model's output and of the loss, ascending. A loop may keep them
            (sizer.tape.loop_choices); the tape is that of a loop that frees them.
        graphs: By forward pass, the blocks that only its graph keeps after the backward pass; the graph lives as long as the
            outputs.
        half_outputs: Those of `outputs` that hold 16-bit floats.
        host_bytes: The most host memory of parameters, gradients and optimizer state that are offloaded.
        copied: Bytes of the host's weights that a pipeline's call copies to the device once, and at each denoising step.
        by_address: True if the CUDA allocator orders free blocks of equal size by address (`sizer.base.versions.by_address`).

    A kernel's inner workspace is an ordinary block of category "workspace" around its op. A call of `torch.cuda.empty_cache()`
    is a block of 0 bytes, released at once, with the op EMPTY_CACHE; no loop has one. On a stream from PRIVATE on the pool is
    deleted there: it releases its cached memory, then and with each later call.
    """

    batch: int
    order: array[int]
    sizes: array[int]
    categories: bytes
    ops: array[int]
    modules: array[int]
    op_names: tuple[str, ...]
    module_names: tuple[str, ...]
    marks: tuple[tuple[int, str], ...]
    stand_ins: tuple[str, ...] = ()
    size_queries: tuple[SizeQuery, ...] = ()
    resolved: frozenset[int] = frozenset()
    second_forward: int | None = None
    loops: tuple[Loop, ...] = ()
    streams: bytes = b""
    awaited: frozenset[int] = frozenset()
    settled: tuple[tuple[int, int], ...] = ()
    collectives: tuple[Collective, ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    graphs: tuple[tuple[int, ...], ...] = ()
    half_outputs: frozenset[int] = frozenset()
    host_bytes: int = 0
    copied: tuple[int, int] = (0, 0)
    by_address: bool = False

    def resolve(self, oracle: SizeOracle | None) -> Tape:
        """Return the tape with the sizes (bytes) of the oracle; modelled sizes stay if it is None, or has no answer."""
        return resolve_all([self], oracle)[0]

    def with_sizes(self, size: Answer, *, answered: Collection[str]) -> Tape:
        """Return the tape with given sizes, as `TapeFamily.with_sizes`."""
        sizes = self.sizes[:]
        for query in self.size_queries:
            if (found := size(query.kind, query.words, query.numbers)) is not None:
                for block in query.blocks:
                    sizes[block] = found
        left = tuple(query for query in self.size_queries if query.kind not in answered)
        return replace(self, sizes=sizes, size_queries=left)

    def with_dtype(self, dtype: str, *, instead_of: str) -> Tape:
        """Return the tape with size queries of another dtype."""
        return replace(
            self, size_queries=tuple(query.with_dtype(dtype, instead_of=instead_of) for query in self.size_queries)
        )

    def empties(self) -> frozenset[int]:
        """Return the blocks that represent calls of `torch.cuda.empty_cache()`."""
        if EMPTY_CACHE not in self.op_names:
            return frozenset()
        op = self.op_names.index(EMPTY_CACHE)
        return frozenset(block for block, made_by in enumerate(self.ops) if made_by == op)

    def describe(self, block: int) -> str:
        """Return the op and module that allocated a block, as text for messages."""
        module = self.module_names[self.modules[block]]
        return f"{self.op_names[self.ops[block]]} in {module or 'the root module'} (block {block})"

    def validate(self) -> Tape:
        """Return this tape itself after a check of the class docstring.

        Raises ValueError for the first violation; the tracer's tests call it.
        """
        count = len(self.sizes)
        columns = {"categories": len(self.categories), "ops": len(self.ops), "modules": len(self.modules)}
        columns |= {"streams": len(self.streams)} if self.streams else {}
        for name, length in columns.items():
            if length != count:
                raise ValueError(f"tape column {name} has {length} rows and sizes has {count}: give one per block")
        _check_range("sizes", self.sizes, None)
        _check_range("categories", self.categories, len(CATEGORIES))
        _check_range("ops", self.ops, len(self.op_names))
        _check_range("modules", self.modules, len(self.module_names))
        _check_order(self)
        _check_marks(self)
        if self.streams and self.loops:
            raise ValueError("the tape has several streams and loops; loops go with one stream: write them out")
        return self


def resolve_all(tapes: Sequence[Tape], oracle: SizeOracle | None) -> list[Tape]:
    """Return `Tape.resolve` of several tapes. The oracle is called once for all of them: it may answer similar queries faster."""
    if oracle is None:
        return [*tapes]
    asked = [(query.kind, query.words, query.numbers) for tape in tapes for query in tape.size_queries]
    answers = iter(oracle(asked) if asked else ())
    return [_resolved(tape, [*islice(answers, len(tape.size_queries))]) for tape in tapes]


def _resolved(tape: Tape, answers: Sequence[int | None]) -> Tape:
    if not answers:
        return tape
    sizes, resolved = tape.sizes[:], set(tape.resolved)
    for query, size in zip(tape.size_queries, answers, strict=True):
        if size is not None:
            resolved.update(query.blocks)
            for block in query.blocks:
                sizes[block] = size
    return replace(tape, sizes=sizes, resolved=frozenset(resolved))


def blocks_alive(events: Iterable[int]) -> dict[int, None]:
    """Return the blocks that events allocate and do not release, oldest first."""
    alive: dict[int, None] = {}
    for event in events:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(~event, None)
    return alive


def _check_range(name: str, column: Sequence[int], stop: int | None) -> None:
    if len(column) and (min(column) < 0 or (stop is not None and max(column) >= stop)):
        allowed = "0 or more" if stop is None else f"0 to {stop - 1}"
        raise ValueError(f"tape column {name} has values {min(column)} to {max(column)}; allowed are {allowed}")


def _check_order(tape: Tape) -> None:
    state = bytearray(len(tape.sizes))
    for position, event in enumerate(tape.order):
        block, before = (event, 0) if event >= 0 else (~event, 1)
        if block >= len(state):
            raise ValueError(f"event {position} names block {block}; the tape has {len(state)}: give each block a size")
        if state[block] != before:
            verb = "allocated twice" if before == 0 else "released while not alive"
            raise ValueError(f"event {position}: block {block} is {verb}; one allocation, then at most one release")
        state[block] = before + 1
    if not all(state):
        raise ValueError(f"block {state.index(0)} is never allocated; every block has one allocation in `order`")


def _check_marks(tape: Tape) -> None:
    positions = [position for position, _ in tape.marks]
    unknown = [name for _, name in tape.marks if name not in PHASES and name not in PIPELINE_PHASES]
    if unknown:
        raise ValueError(f"phase {unknown[0]!r} is unknown; allowed are {', '.join(PHASES)}")
    if len({name for _, name in tape.marks}) != len(tape.marks):
        raise ValueError(f"marks name a phase twice: {[name for _, name in tape.marks]}; each phase ends once")
    if positions != sorted(positions) or (positions and not 0 <= positions[0] <= positions[-1] <= len(tape.order)):
        raise ValueError(f"marks end at {positions}; they must ascend within 0 to {len(tape.order)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """The shape and the dtype ("bfloat16") of the tensor that a block was first seen to hold."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseOfStep:
    """A phase ("forward") of one of the two steps, 1 or 2; step 0 is the work before them."""

    step: int
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNotes:
    """By number of a tape's block: its tensor, which a kernel's workspace lacks, and its parameter's name.

    Gradients and optimizer state have the name of their parameter. `ends` are the positions in the tape's order at which phases
    end, ascending.
    """

    tensors: dict[int, Tensor] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    ends: list[tuple[int, PhaseOfStep]] = field(default_factory=list)

    def phase_at(self, event: int) -> PhaseOfStep:
        """Return the phase of the event at this index of the order; events after the last end belong to the last phase."""
        place = bisect_right(self.ends, event, key=lambda end: end[0])
        return self.ends[min(place, len(self.ends) - 1)][1]


def by_stream(tape: Tape, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the events from `begin` to `end` of a tape's order in runs of one stream: (begin, end, stream)."""
    if not tape.streams or begin == end:
        yield begin, end, 0
        return
    events = np.asarray(tape.order[begin:end], np.int64)
    streams = np.frombuffer(tape.streams, np.uint8)[np.where(events >= 0, events, ~events)]
    bounds = [0, *(np.flatnonzero(np.diff(streams)) + 1).tolist(), end - begin]
    for first, last in pairwise(bounds):
        yield begin + first, begin + last, int(streams[first])


def stream_of(tape: Tape, block: int) -> int:
    """Return the number of the stream for which a block was allocated."""
    return tape.streams[block] if tape.streams else 0


def streams_behind(tape: Tape) -> Tape:
    """Return the tape in which streams finish as late as possible: the most that may be reserved. Unchanged if no block waits.

    A block then waits until the host waits for its streams, or cached memory is released, which waits for all of them.
    """
    if not tape.awaited:
        return tape
    empties, order = tape.empties(), array("q")
    settled = defaultdict(list)
    for position, block in tape.settled:
        settled[position].append(block)
    waiting: dict[int, None] = {}
    done: set[int] = set()
    for position, event in enumerate(tape.order):
        for block in settled.get(position, ()):
            done.add(block)
            if block in waiting:
                del waiting[block]
                order.append(~block)
        if event < 0 and ~event in tape.awaited and ~event not in done:
            waiting[~event] = None
            continue
        if event in empties:
            order.extend(~block for block in waiting)
            waiting.clear()
        order.append(event)
    order.extend(~block for block in waiting)
    return replace(tape, order=order)

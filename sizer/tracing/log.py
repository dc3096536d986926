"""Log of a trace: blocks in the order of their allocation and release.

It also tracks which work of streams is certainly done: a stream runs its own work in order, waits for others if told to, and
the host waits for some of it.

CUDA's allocator records an event on each stream that uses a block (`Tensor.record_stream`) when the block is released, and
reuses the block once all of them have happened (c10/cuda/CUDACachingAllocator.cpp, insert_events and process_events). This is
certain only if the host has waited for them: `Event.synchronize()`, `Stream.synchronize()`, `torch.cuda.synchronize()`, or a
value that is read.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace

from sizer.tape.communication import Collective
from sizer.tape.size_queries import gather
from sizer.tape.tape import CATEGORIES, EMPTY_CACHE, PRIVATE, Tape, blocks_alive

OF_POOL = 2**20  # the number of a stream in a pool is the pool's number times this, plus its own

OWN = "\0"  # stands for the path of the module whose call is a stretch of the log

Mark = dict[int, int]  # by stream, the number of its recorded events that have happened when this one has


class StreamOrder:
    """Events for which the streams of a trace wait, and the released blocks that wait for these streams.

    Streams are identified by their numbers.
    """

    def __init__(self) -> None:
        self._after: dict[int, Mark] = {}  # by stream, events that have happened once its work so far is done
        self._done: Mark = {}
        self._waiting: dict[int, Mark] = {}  # by block

    def __copy__(self) -> StreamOrder:
        made = StreamOrder()
        vars(made).update(deepcopy(vars(self)))
        return made

    def record(self, stream: int) -> Mark:
        """Return a new event on a stream."""
        after = self._after.setdefault(stream, {})
        after[stream] = after.get(stream, 0) + 1
        return dict(after)

    def wait(self, stream: int, mark: Mark) -> None:
        """Make a stream wait for an event."""
        _merge(self._after.setdefault(stream, {}), mark)

    def release(self, block: int, streams: Iterable[int]) -> None:
        """Make a released block wait for the streams' work so far."""
        self._waiting[block] = {stream: self.record(stream)[stream] for stream in streams}

    def synchronize(self, mark: Mark) -> Iterator[int]:
        """Make the host wait for an event; yield the blocks that need not wait any longer."""
        _merge(self._done, mark)
        for block, needed in list(self._waiting.items()):
            if all(self._done.get(stream, 0) >= number for stream, number in needed.items()):
                del self._waiting[block]
                yield block

    def all_streams(self) -> tuple[int, ...]:
        """Return the streams with events."""
        return tuple(self._after)


def _apart(name: str, path: str) -> str:
    """Return the path of a module, with OWN in the place of another path at its beginning."""
    return f"{OWN}{name[len(path) :]}" if path and (name == path or name.startswith(f"{path}.")) else name


def _merge(mark: Mark, other: Mark) -> None:
    for stream, number in other.items():
        mark[stream] = max(mark.get(stream, 0), number)


# ----------------------------------------------------------------------------------------------------------------- log


CATEGORY = {name: index for index, name in enumerate(CATEGORIES)}


class DeferredSize(int):
    """Modelled bytes of a block, with the size query (sizer.tape.size_queries) that an oracle resolves to the true size."""

    kind: str
    words: tuple[str, ...]
    numbers: tuple[int, ...]

    def __new__(cls, modelled: int, kind: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> DeferredSize:
        made = super().__new__(cls, modelled)
        made.kind, made.words, made.numbers = kind, words, numbers
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Additions of one call to a log. Its blocks are numbered from 0 on, followed by earlier blocks that were passed to the call.

    `asked` has the size queries of some blocks.
    """

    order: list[int]
    sizes: list[int]
    categories: list[int]
    ops: list[int]
    modules: list[str]
    asked: list[tuple[int, tuple[str, tuple[str, ...], tuple[int, ...]]]]


class BlockLog:
    """Collects allocations (bytes as requested) and releases; `tape()` freezes them. `by_address`: see Tape.

    Categories may be set later. Whether a block is an activation or a temporary is known when the forward pass has ended,
    whether it is a gradient when the backward pass has.
    """

    def __init__(self, *, by_address: bool = False) -> None:
        self.by_address = by_address
        self.order: list[int] = []
        self.sizes: list[int] = []
        self.categories: list[int] = []
        self.ops: list[int] = []
        self.modules: list[int] = []
        self.streams: list[int] = []
        self.stream = 0  # the current stream
        self.private_streams: dict[int, int] = {}  # streams that represent a private pool, and its number
        self.deleted_pools: set[int] = set()
        self.pools: list[int] = []  # of torch.cuda.MemPool that code allocates from, the innermost last; 0 for none
        self.awaited: dict[int, frozenset[int]] = {}  # by block, the other streams that use it
        # Positions in the order from which a released block certainly no longer waits for them.
        self.settled: list[tuple[int, int]] = []
        self.stream_order = StreamOrder()
        self.marks: list[tuple[int, str]] = []
        self.second_forward: int | None = None  # position in the order of its end
        self.outputs: list[tuple[int, ...]] = []  # by forward pass, blocks of the model's output and the loss
        self.graphs: list[tuple[int, ...]] = []  # by forward pass, blocks that only its graph keeps after the backward pass
        self._output: set[int] = set()  # of the current pass
        self._graphs_end = 0  # position in the order at which its graph is dropped
        self._loss: int | None = None  # dropped with the graph: a share of the loss if passes are accumulated
        self.half_outputs: set[int] = set()
        self.telling = True  # whether communication now is a part of every step
        self.again = False  # whether it is repeated in a step of more passes
        self._collective_bytes: Counter[tuple[int, str, str, bool]] = Counter()  # bytes by phase, kind and group
        self._calls: Counter[tuple[int, str, str, bool]] = Counter()
        self._asked: dict[int, tuple[str, tuple[str, ...], tuple[int, ...]]] = {}
        self._op_names: dict[str, int] = {}
        self._module_names: dict[str, int] = {"": 0}

    def allocate(self, size: int, op: str, module: str, category: str = "temporary") -> int:
        """Return the number of a new block of `size` bytes."""
        block = len(self.sizes)
        if isinstance(size, DeferredSize):
            self.defer(block, size)
        self.sizes.append(size)
        self.categories.append(CATEGORY[category])
        self.ops.append(self._op_names.setdefault(op, len(self._op_names)))
        self.modules.append(self._module_names.setdefault(module, len(self._module_names)))
        self.streams.append(self._stream_in_pool() if self.pools else self.stream)
        self.order.append(block)
        return block

    def _stream_in_pool(self) -> int:
        """Return the number of the current stream in the pool from which code allocates; autograd's thread uses no such pool.

        Source: use_mem_pool, torch/cuda/memory.py (2.15).
        """
        import torch  # not needed by replays of stored tapes

        if not self.pools[-1] or torch._C._current_graph_task_id() != -1:
            return self.stream
        stream = self.pools[-1] * OF_POOL + self.stream
        self.private_streams[stream] = self.pools[-1]
        return stream

    def stream_of(self, block: int) -> int:
        """Return the number of the stream for which a block was allocated, without its pool."""
        return self.streams[block] % OF_POOL

    def allocate_again(self, block: int) -> int:
        """Return the number of a new block like another one."""
        made = self.allocate(self.sizes[block], "", "")
        for column in (self.categories, self.ops, self.modules):
            column[made] = column[block]
        return made

    def defer(self, block: int, size: DeferredSize) -> None:
        """Make a block's bytes a size query, which replaces an earlier one."""
        self._asked.pop(block, None)
        self._asked[block] = (size.kind, size.words, size.numbers)

    def position(self) -> tuple[int, int, tuple[int, ...]]:
        """Return the number of events and of blocks until now, and what else a `Stretch` must leave as it is."""
        others = len(self.marks), len(self.settled), len(self.awaited), self.stream, len(self.pools)
        return len(self.order), len(self.sizes), others

    def stretch(self, since: tuple[int, int, tuple[int, ...]], path: str, passed: Sequence[int | None]) -> Stretch | None:
        """Return what was logged since a position by a call of the module with this path, to which blocks were `passed`.

        None if it cannot be repeated: it releases other earlier blocks, marks a phase, or uses several streams.
        """
        events, first, others = since
        added, asked = self.order[events:], list[tuple[int, tuple[str, tuple[str, ...], tuple[int, ...]]]]()
        earlier = {~event for event in added if 0 <= ~event < first}
        if self.position()[2] != others or any(self.streams[first:]) or not earlier <= {*passed}:
            return None
        blocks = len(self.sizes) - first
        numbers = {block: blocks + passed.index(block) for block in earlier}
        names = tuple(self._module_names)
        for block in reversed(self._asked):
            if block < first:
                break
            asked.append((block - first, self._asked[block]))
        return Stretch(
            order=[event - first if event >= 0 else ~numbers.get(~event, ~event - first) for event in added],
            sizes=self.sizes[first:],
            categories=self.categories[first:],
            ops=self.ops[first:],
            modules=[_apart(names[number], path) for number in self.modules[first:]],
            asked=asked[::-1],
        )

    def repeat(self, stretch: Stretch, path: str, passed: Sequence[int | None]) -> int:
        """Log a stretch again, as a call of the module with this path. Return the number of its first block."""
        first, names = len(self.sizes), self._module_names
        modules = {
            name: names.setdefault(name.replace(OWN, path, 1) if name.startswith(OWN) else name, len(names))
            for name in dict.fromkeys(stretch.modules)
        }
        blocks = [*range(first, first + len(stretch.sizes)), *passed]
        self.order += [blocks[event] if event >= 0 else ~blocks[~event] for event in stretch.order]
        self.sizes += stretch.sizes
        self.categories += stretch.categories
        self.ops += stretch.ops
        self.modules += [modules[name] for name in stretch.modules]
        self.streams += [0] * len(stretch.sizes)
        for block, asked in stretch.asked:
            self._asked[first + block] = asked
        return first

    def release(self, block: int) -> None:
        """Note that the block is free from here on."""
        self.order.append(~block)
        if block in self.awaited:
            self.stream_order.release(block, self.awaited[block])

    def empty_cache(self, module: str, *, pool: int | None = None) -> None:
        """Note that the allocator releases cached memory outside of the pools in use; with `pool`, this pool's cached memory."""
        pools = self.deleted_pools if pool is None else {pool}
        numbers = sorted(number for number, of_pool in self.private_streams.items() if of_pool in pools)
        for number in ([0] if pool is None else []) + numbers:
            block = self.allocate(0, EMPTY_CACHE, module, "workspace")
            self.streams[block] = number
            self.release(block)

    def synchronize(self, mark: Mark) -> None:
        """Note that the host waits here for an event."""
        self.settled += ((len(self.order), block) for block in self.stream_order.synchronize(mark))

    def tell(self, kind: str, group: str, size: int) -> None:
        """Note a collective of `size` bytes."""
        if self.telling:
            key = len(self.marks), kind, group, self.again
            self._collective_bytes[key] += size
            self._calls[key] += 1

    def copy(self) -> BlockLog:
        """Return a log that begins with the contents of this one."""
        made = BlockLog()
        made.begin_as(self)
        return made

    def begin_as(self, other: BlockLog) -> None:
        """Replace the contents by those of another log."""
        for name, value in vars(other).items():
            setattr(self, name, copy(value))

    def mark(self, phase: str) -> None:
        """Note that the phase ends here."""
        self.marks.append((len(self.order), phase))

    def classify(self, block: int, category: str) -> None:
        """Set the final category of a block."""
        self.categories[block] = CATEGORY[category]

    def note_output(self, block: int, *, half: bool) -> None:
        """Note that the current forward pass returns the block, which holds 16-bit floats if `half`."""
        self._output.add(block)
        if half:
            self.half_outputs.add(block)

    def begin_graphs_end(self, loss: int | None) -> None:
        """Note that the backward pass has ended, and that its graph is dropped next, unless a loop keeps the outputs."""
        self._graphs_end, self._loss = len(self.order), loss

    def end_outputs(self) -> None:
        """End a pass: note its outputs, and the blocks that only its graph has kept until now."""
        self.outputs.append(tuple(sorted(self._output)))
        dropped = (~event for event in self.order[self._graphs_end :] if event < 0)
        self.graphs.append(tuple(sorted(block for block in dropped if block != self._loss)))
        self._output.clear()

    def category(self, block: int) -> str:
        """Return the current category of a block."""
        return CATEGORIES[self.categories[block]]

    def alive(self, start: int = 0) -> list[int]:
        """Return blocks allocated since position `start` of the order that have not been released, oldest first."""
        return list(blocks_alive(self.order[start:]))

    def keep_activations(self, start: int) -> None:
        """Classify blocks as activations that were allocated since a position, are alive and have no other category."""
        for block in self.alive(start):
            if self.category(block) == "temporary":
                self.classify(block, "activation")

    def tape(self, *, batch: int, stand_ins: tuple[str, ...], host_bytes: int = 0) -> Tape:
        """Return the frozen tape up to the last mark: later releases belong to the end of the trace, not to the work."""
        return Tape(
            batch=batch,
            order=array("q", self.order[: self.marks[-1][0]]),
            sizes=array("q", self.sizes),
            categories=bytes(self.categories),
            ops=array("l", self.ops),
            modules=array("l", self.modules),
            op_names=tuple(self._op_names),
            module_names=tuple(self._module_names),
            marks=tuple(self.marks),
            stand_ins=stand_ins,
            size_queries=gather(self._asked),
            second_forward=self.second_forward,
            streams=self._streams(),
            awaited=frozenset(self.awaited),
            settled=tuple((position, block) for position, block in self.settled if position <= self.marks[-1][0]),
            collectives=tuple(self._collectives()),
            outputs=tuple(self.outputs),
            graphs=tuple(self.graphs),
            half_outputs=frozenset(self.half_outputs),
            host_bytes=host_bytes,
            by_address=self.by_address,
        )

    def tape_so_far(self) -> Tape:
        """Return the tape of the whole log until now, as one phase."""
        marks, self.marks = self.marks, [(len(self.order), "load")]
        try:
            return replace(self.tape(batch=1, stand_ins=()), second_forward=None)
        finally:
            self.marks = marks

    def _collectives(self) -> Iterator[Collective]:
        for key, size in self._collective_bytes.items():
            number, kind, group, again = key
            if number < len(self.marks):
                phase, calls = self.marks[number][1], self._calls[key]
                yield Collective(phase=phase, kind=kind, group=group, again=again, calls=calls, bytes=size)

    def _streams(self) -> bytes:
        """Return the streams by block, numbered in the order of their first use; empty if all are the default stream."""
        numbers = {
            stream: number + PRIVATE * (stream in self.private_streams)
            for number, stream in enumerate(dict.fromkeys([0, *self.streams]))
        }
        return bytes(numbers[stream] for stream in self.streams) if len(numbers) > 1 else b""

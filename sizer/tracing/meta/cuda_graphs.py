"""CUDA graphs and memory pools without a device.

Memory that is allocated while a graph is recorded comes from a private pool; a replay allocates nothing. Code allocates from
its own pool within `torch.cuda.use_mem_pool`. A pool is a stream of its own; its cached memory is not released
(sizer.tape.tape, PRIVATE) until the pool is deleted.

*Known limitation*: work that a recording forks to other streams uses their own memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sizer.base.errors import TraceError
from sizer.tracing.log import BlockLog

Pool = tuple[int, int]

_META = torch.device("meta")
_FIRST = 1_000  # numbers of the streams that represent pools
# Bytes of a graph's tensors for random numbers, from the first operator on that draws some (CUDAGeneratorImpl.cpp, 2.15).
_SEED_AND_OFFSET = (8, 8)


class Recording(Protocol):
    """Parts of a trace's recorder that graphs use."""

    log: BlockLog

    def empty_cache(self) -> None:
        """Log that the allocator releases its cached memory."""


def stream_of_pool(pool: Pool) -> Any:
    """Return the stream that represents a pool."""
    return torch.cuda.Stream(stream_id=_FIRST + pool[1])


class _Draws(TorchDispatchMode):
    """Calls `begin` at the first operator that draws random numbers: a graph then keeps a seed and an offset."""

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__()
        self._begin: Callable[[], None] | None = begin

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self._begin is not None and _draws(func, args, kwargs or {}):
            self._begin()
            self._begin = None
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return True if a call of an operator draws random numbers; attention without dropout and its backward pass do not."""
    if torch.Tag.nondeterministic_seeded not in func.tags or "backward" in func.name():
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    share = args[place] if place < len(args) else kwargs.get("dropout_p", func._schema.arguments[place].default_value)
    return share > 0


@contextmanager
def graphs_seen(recorder: Recording) -> Iterator[None]:
    """Make CUDA graphs recordable and replayable within the context. Enter it within contexts for streams and `empty_cache`."""
    counted = count(1)
    uses: Counter[int] = Counter()  # by pool

    def new_pool() -> Pool:
        return 0, next(counted)

    def release(pool: Pool) -> bool:
        """Return True if nothing uses a pool any longer: emptying the cache then releases its cached memory (releasePool)."""
        uses[pool[1]] -= 1
        if not uses[pool[1]]:
            recorder.log.deleted_pools.add(pool[1])
        return not uses[pool[1]]

    class Graph:
        """Replacement of torch.cuda.CUDAGraph."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._pool: Pool | None = None
            self._recording = ExitStack()
            self._random_state: list[Tensor] = []

        def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global", **settings: Any) -> None:
            """Begin to record the work of the current stream."""
            self._pool = pool or new_pool()
            stream = stream_of_pool(self._pool)
            recorder.log.private_streams[stream.stream_id] = self._pool[1]
            recorder.log.deleted_pools.discard(self._pool[1])
            uses[self._pool[1]] += 1
            recorder.log.pools.append(0)  # the innermost pool is that of the graph
            self._recording.callback(recorder.log.pools.pop)
            self._recording.enter_context(torch.cuda.stream(stream))
            self._recording.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True))
            self._recording.enter_context(_Draws(self._keep_seed))

        def capture_end(self) -> None:
            """End the recording."""
            self._recording.close()

        def pool(self) -> Pool:
            """Return the number of the pool."""
            if self._pool is None:
                raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
            return self._pool

        def nothing(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing: a replay allocates no memory."""

        replay = instantiate = enable_debug_mode = debug_dump = register_generator_state = nothing

        def reset(self) -> None:
            """Drop the recording."""
            self._random_state = []
            if self._pool is not None:
                release(self._pool)
                self._pool = None

        __del__ = reset

        def _keep_seed(self) -> None:
            with torch.cuda.stream(torch.cuda.default_stream()):
                self._random_state = [torch.empty(size, dtype=torch.uint8, device=_META) for size in _SEED_AND_OFFSET]

    @contextmanager
    def graph(
        cuda_graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global", **settings: Any
    ) -> Iterator[None]:
        torch.cuda.synchronize()
        recorder.empty_cache()
        with torch.cuda.stream(stream):
            cuda_graph.capture_begin(pool.pool() if isinstance(pool, Graph) else pool)
            try:
                yield
            finally:
                cuda_graph.capture_end()

    class MemPool:
        """Replacement of torch.cuda.MemPool.

        Its destructor releases its cached memory (c10/cuda/CUDACachingAllocator.cpp, 2.15).
        """

        def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
            if use_on_oom or no_split:
                raise TraceError(
                    "this kind of memory pool is not traced",
                    given="use_on_oom" if use_on_oom else "no_split",
                    allowed="torch.cuda.MemPool with the allocator's default settings",
                    todo="leave the option out",
                )
            self.allocator, self.id = allocator, new_pool()
            uses[self.id[1]] += 1

        def use_count(self) -> int:
            """Return the number of users: this object, contexts and graphs."""
            return uses[self.id[1]]

        def snapshot(self, include_traces: bool = True) -> list[Any]:
            """Return no segments: a trace has no addresses."""
            return []

        def __del__(self) -> None:
            if hasattr(self, "id") and release(self.id):
                recorder.log.empty_cache("", pool=self.id[1])

    @contextmanager
    def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
        """Replace torch.cuda.use_mem_pool."""
        recorder.log.pools.append(pool.id[1])
        uses[pool.id[1]] += 1
        try:
            yield
        finally:
            recorder.log.pools.pop()
            release(pool.id)

    names = {"CUDAGraph": Graph, "graph": graph, "graph_pool_handle": new_pool, "MemPool": MemPool, "use_mem_pool": use_mem_pool}
    with ExitStack() as stack:
        for module in (torch.cuda, torch.cuda.graphs, torch.cuda.memory):
            for name in names.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, names[name]))
        yield

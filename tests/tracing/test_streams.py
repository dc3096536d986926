"""Streams, events and storages that change their size in a step of one's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import sizer
from sizer.report.bounds import STREAMS
from sizer.tape.tape import Tape
from sizer.tracing.device import Device
from sizer.tracing.meta.stream_calls import PER_PRIORITY
from sizer.tracing.recorder import Recorder
from sizer.tracing.trace import recording

MIB = 2**20


def tape_of(code: Callable[[], object], kind: str = "cuda") -> Tape:
    """The tape of code that runs as a trace runs it."""
    recorder = Recorder(Device(kind, (8, 0) if kind == "cuda" else None))
    with recording(recorder):
        kept = code()
        recorder.log.mark("forward")
    del kept
    return recorder.log.tape(batch=1, stand_ins=tuple(recorder.notes)).validate()


def empty() -> torch.Tensor:
    return torch.empty(MIB, dtype=torch.uint8, device="meta")


def test_blocks_know_their_streams() -> None:
    def code() -> list[torch.Tensor]:
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        made = [empty()]
        with torch.cuda.stream(side):
            made.append(empty())
            with torch.cuda.stream(other):
                made.append(empty())
            made.append(empty())
            with torch.cuda.stream(None):
                made.append(empty())
        with torch.cuda.stream(torch.cuda.default_stream()):
            made.append(empty())
        torch.cuda.set_stream(other)
        assert torch.cuda.current_stream() == other
        return [*made, empty()]

    assert tape_of(code).streams == bytes([0, 1, 2, 1, 1, 0, 2])
    assert tape_of(code, "cpu").streams == b""


def test_streams_are_taken_from_a_pool_in_turn() -> None:
    def code() -> list[torch.Tensor]:
        made = []
        for priority in (0, -1):
            streams = [torch.cuda.Stream(priority=priority) for _ in range(PER_PRIORITY + 1)]
            assert streams[0] == streams[-1] != streams[1]
            with streams[0]:
                made.append(empty())
            with streams[-1]:
                made.append(empty())
        return made

    assert tape_of(code).streams == bytes([1, 1, 2, 2])


def test_events_have_happened() -> None:
    def code() -> None:
        event, stream = torch.cuda.Event(enable_timing=True), torch.cuda.Stream()
        event.record(stream)
        stream.wait_event(event)
        stream.wait_stream(torch.cuda.current_stream())
        event.synchronize()
        assert event.query() and stream.query()
        assert event.elapsed_time(stream.record_event()) == 1.0

    tape_of(code)


def test_a_block_that_another_stream_uses_waits_for_it() -> None:
    def code() -> list[torch.Tensor]:
        own, lent = empty(), empty()
        lent.record_stream(torch.cuda.Stream())
        own.record_stream(torch.cuda.current_stream())
        return [own, lent]

    assert tape_of(code).awaited == {1}


def prefetching() -> Callable[[], None]:
    side = torch.cuda.Stream()

    def step() -> None:
        for _ in range(3):
            with torch.no_grad(), torch.cuda.stream(side):
                batch = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
            torch.cuda.current_stream().wait_stream(side)
            batch.record_stream(torch.cuda.current_stream())
            del batch

    return step


def test_what_waits_for_other_streams_is_a_part_of_the_range() -> None:
    estimate = sizer.size_step(prefetching).estimates[0]
    (found,) = (margin for margin in estimate.margins if margin.name == STREAMS)
    # each step's three batches use one block where the stream is done, six where it never is
    assert (estimate.peak_reserved_bytes, found.less_bytes, found.more_bytes) == (64 * MIB, 0, 5 * 64 * MIB)


def lent_and_waited_for(wait: Callable[[torch.cuda.Stream], object]) -> Callable[[], list[torch.Tensor]]:
    """Code that lends a block of its own to a second stream, releases it, allocates another, then has the host wait."""

    def code() -> list[torch.Tensor]:
        side = torch.cuda.Stream()
        lent = empty()
        lent.record_stream(side)
        del lent
        early = torch.cuda.Event()
        early.record(torch.cuda.Stream())
        made = [empty()]
        early.synchronize()  # on a stream that waits for nothing
        wait(side)
        return [*made, empty()]

    return code


def through_another(side: torch.cuda.Stream) -> None:
    other = torch.cuda.Stream()
    other.wait_stream(side)
    other.record_event().synchronize()


@pytest.mark.parametrize(
    "wait",
    [
        lambda side: side.synchronize(),
        lambda side: side.record_event().synchronize(),
        lambda side: torch.cuda.synchronize(),
        lambda side: (torch.cuda.current_stream().wait_stream(side), torch.zeros(1, device="meta").item()),
        through_another,
    ],
    ids=["stream", "event", "device", "value", "through another"],
)
def test_a_block_waits_no_longer_where_the_host_has_waited(wait: Callable) -> None:
    tape = tape_of(lent_and_waited_for(wait))
    assert tape.awaited == {0}
    assert [block for _, block in tape.settled] == [0]
    assert list(tape.order[: tape.settled[0][0]])[:3] == [0, ~0, 1], "after the second block was allocated"
    assert tape_of(lent_and_waited_for(lambda side: None)).settled == ()
    assert tape_of(lent_and_waited_for(lambda side: torch.zeros(1, device="meta").item())).settled == ()


def test_the_backward_pass_runs_on_the_streams_of_the_forward_pass() -> None:
    def code() -> list[torch.Tensor]:
        side = torch.cuda.Stream()
        weight = torch.empty(256, 256, device="meta", requires_grad=True)
        with torch.cuda.stream(side):
            hidden = weight * 2
        out = hidden * 3
        grad = torch.empty(256, 256, device="meta")
        del hidden
        out.backward(grad)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        return [weight, weight.grad, grad, empty()]

    tape = tape_of(code)
    products = [tape.streams[block] for block, op in enumerate(tape.ops) if "mul" in tape.op_names[op]]
    assert products == [1, 0, 0, 1], "forward on the second stream and the first, backward on the first and the second"
    assert len(tape.awaited) == 1, "the second stream uses what the first one has made of the gradient"
    assert tape.streams[-1] == 0


def test_a_stream_that_a_hook_enters_works_until_it_is_left() -> None:
    def code() -> list[torch.Tensor]:
        side, made = torch.cuda.Stream(), []

        def hook(grad: torch.Tensor) -> None:
            with torch.cuda.stream(side):
                made.extend((empty(), empty()))
            made.append(empty())

        out = torch.empty(8, device="meta", requires_grad=True) * 2
        out.register_hook(hook)
        out.backward(torch.empty(8, device="meta"))
        return made

    tape = tape_of(code)
    assert [tape.streams[block] for block, size in enumerate(tape.sizes) if size == MIB] == [1, 1, 0]


def test_a_second_stream_has_a_workspace_of_cublas_of_its_own() -> None:
    def products() -> list[torch.Tensor]:
        left = torch.empty(512, 512, device="meta")
        with torch.cuda.stream(torch.cuda.Stream()):
            other = left @ left
        return [left @ left, left @ left, other]

    tape = tape_of(products)
    work = [tape.streams[block] for block, category in enumerate(tape.categories) if category == 7]
    assert sorted(set(work)) == [0, 1]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_storage_that_is_resized_has_another_block(kind: str) -> None:
    def code() -> torch.Tensor:
        tensor = empty()
        storage = tensor.untyped_storage()
        storage.resize_(MIB)  # nothing changes
        storage.resize_(0)
        storage.resize_(0)
        storage.resize_(2 * MIB)
        storage.resize_(3 * MIB)  # a new block, a copy, then the old one goes
        return tensor

    tape = tape_of(code, kind)
    assert list(tape.order) == [0, ~0, 1, 2, ~1]
    assert list(tape.sizes) == [MIB, 2 * MIB, 3 * MIB]


def test_a_storage_without_bytes_is_not_released_again() -> None:
    def code() -> torch.Tensor:
        emptied = empty()
        emptied.untyped_storage().resize_(0)
        del emptied
        return empty()

    assert list(tape_of(code).order) == [0, ~0, 1]


def test_a_pool_of_ones_own_keeps_what_it_caches_until_it_is_deleted() -> None:
    found: list[int] = []

    def setup() -> Callable[[], None]:
        kept = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")]

        def step() -> None:
            pool, inner = torch.cuda.MemPool(), torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                kept.append(torch.empty(5 * MIB, dtype=torch.uint8, device="cuda"))
                with torch.cuda.use_mem_pool(inner):  # the innermost counts
                    kept.append(torch.empty(3 * MIB, dtype=torch.uint8, device="cuda"))
                weight = torch.ones(512, 512, device="cuda", requires_grad=True)
                (weight * weight).sum().backward()  # autograd's thread does not use the pool
            found.append(pool.use_count())
            del kept[1:], weight
            torch.cuda.empty_cache()
            torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")

        return step

    report = sizer.size_step(setup, gpu="a100-80gb", steps=1)
    # by PyTorch's own allocator over the null driver: 30 and twice 20 MiB, and 2 segments of 2 MiB for what is of at most 1 MiB;
    # the pools are deleted as the step ends, behind the last block's 20 MiB
    assert report.estimates[0].peak_reserved_bytes == 94 * MIB and found == [1]

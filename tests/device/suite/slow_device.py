"""A scripted CUDA device: its allocator is the slow second reading of PyTorch's rules, its addresses come in any order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sizer.device.record.measurement import COUNTED, DeviceFacts, Measurement, PhaseReading, TensorBytes
from sizer.device.record.recording import Measured, Segment
from sizer.tape.tape import Tape
from tests.allocator.caching_allocator import Block, SlowCache
from tests.device.scripted_devices import ScriptedCuda, counters

GIB = 2**30
QUERY = "arch=torchvision:resnet18&dtype=float32&batch=1"


class ScatteredCache(SlowCache):
    """The slow allocator on a driver whose segments do not come at ascending addresses."""

    def __init__(self, places: Sequence[int], capacity: int | None):
        super().__init__(capacity)
        self.places = [place * GIB for place in places]
        self.position = 0
        self.segments: list[Segment] = []

    def from_device(self, size: int, small: bool) -> Block | None:
        block = super().from_device(size, small)
        if block is None:
            return None
        block.address = self.places.pop(0)
        self.segments.append(
            Segment(position=self.position, action="alloc", address=block.address, bytes=block.size, stream=0)
        )
        return block

    def release_cached(self) -> None:
        self.segments += [
            Segment(position=self.position, action="free", address=block.address, bytes=block.size, stream=0)
            for block in self.blocks
            if self.is_free(block) and block.previous is None and block.next is None
        ]
        super().release_cached()


def scattered(seed: int) -> list[int]:
    """Addresses of segments (GiB) in a random order."""
    return random.Random(seed).sample(range(1, 2000), 1999)


def run(tape: Tape, places: Sequence[int], *, query: str = QUERY, capacity: int | None = None) -> Measured:
    """What the device's counters read after each phase of the tape, with the tape as its recording.

    `places` are the addresses (GiB) of the segments, in the order in which the driver gives them; it has `capacity` bytes.
    """
    cache, live, readings = ScatteredCache(places, capacity), {}, []
    ends = dict(tape.marks)
    allocated = peak = 0
    for position, event in enumerate(tape.order):
        cache.position = position
        if event < 0:
            if (block := live.pop(~event, None)) is not None:
                allocated -= block.size
                cache.free(block)
        elif tape.sizes[event]:
            live[event] = cache.malloc(tape.sizes[event])
            allocated += live[event].size
            peak = max(peak, allocated)
        if position + 1 in ends:
            readings.append(
                PhaseReading(
                    phase=ends[position + 1],
                    allocated_bytes=allocated,
                    peak_allocated_bytes=peak,
                    reserved_bytes=cache.reserved,
                    peak_reserved_bytes=cache.reserved,
                )
            )
            peak = allocated
    measurement = Measurement(
        query=query,
        dtype="float32",
        batch=tape.batch,
        device=DeviceFacts(device="cuda:0", name="Scripted", total_bytes=80 * GIB, capability=(8, 0)),
        versions={"torch": "2.11.0"},
        measured_at="2026-01-01T00:00:00Z",
        source=COUNTED,
        phases=tuple(readings),
        tensors=TensorBytes(),
        retries=cache.retries,
    )
    return Measured(measurement=measurement, recording=tape, segments=tuple(cache.segments))


class SlowCuda(ScriptedCuda):
    """The same allocator behind what `CudaReader` asks of PyTorch: counters, and the history as device_traces has it."""

    def __init__(self, places: Sequence[int]):
        super().__init__()
        self.cache, self.live = ScatteredCache(places, None), {}
        self.allocated = self.peak = 0

    def play(self, tape: Tape, begin: int, end: int) -> None:
        """Does the events of a tape from one position to another."""
        for event in tape.order[begin:end]:
            if event < 0:
                self._free(~event)
            elif size := tape.sizes[event]:
                self._allocate(event, size)

    def _allocate(self, number: int, size: int) -> None:
        known = len(self.cache.segments)
        block = self.live[number] = self.cache.malloc(size)
        for segment in self.cache.segments[known:]:
            self._note("segment_alloc", segment.address, segment.bytes)
        self._note("alloc", block.address, size)
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)

    def _free(self, number: int) -> None:
        if (block := self.live.pop(number, None)) is not None:
            for action in ("free_requested", "free_completed"):
                self._note(action, block.address, block.size)
            self.allocated -= block.size
            self.cache.free(block)

    def _note(self, action: str, address: int, size: int) -> None:
        self.entries.append(
            {"action": action, "addr": address, "size": size, "stream": 0, "time_us": len(self.entries)}
        )

    def reset_peaks(self) -> None:
        self.peak = self.allocated

    def stats(self) -> dict[str, int]:
        return counters(self.allocated, self.peak, self.cache.reserved, self.cache.reserved)

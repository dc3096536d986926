"""A recorded trace fed to Sizer's allocators: every figure that the device read and the replay does not reproduce."""

from __future__ import annotations

from itertools import accumulate

from sizer.allocator.allocator import Replay, replay_events
from sizer.allocator.best_fit import ABOVE, BELOW, LIMIT
from sizer.allocator.cuda import MIN_BLOCK
from sizer.allocator.cuda_cache import CudaCache
from sizer.allocator.loop_replay import place
from sizer.allocator.timeline import read_timeline
from sizer.base.versions import by_address, parse_version
from sizer.device.record.measurement import Measurement, PhaseReading
from sizer.device.record.recording import CaseRecord, Segment
from sizer.query.text import parse_query
from sizer.tape.tape import Tape

FIGURES = ("allocated_bytes", "peak_allocated_bytes", "reserved_bytes")


class UnlikeDeviceError(Exception):
    """The replay asked the driver for another segment than the device did."""


class RecordedCache(CudaCache):
    """The CUDA allocator on a driver that gives the segments that were recorded, at their addresses, and is full when it was.

    Addresses are ranks with gaps between: their order decides between free blocks of one size, and segments never merge. Where that
    is the age of segments (`by_address` is False), they have ranks by it.
    """

    def __init__(self, segments: tuple[Segment, ...], *, by_address: bool):
        super().__init__()
        self._driver.state[LIMIT] = -1  # compiled code makes no segment, and asks for each
        self._left = list(segments)
        ordered = sorted(range(len(segments)), key=lambda index: segments[index].address if by_address else index)
        starts = accumulate((segments[index].bytes + MIN_BLOCK for index in ordered), initial=MIN_BLOCK)
        self._starts = dict(zip(ordered, starts, strict=False))
        self._count = len(segments)

    @property
    def _event(self) -> int:
        """The position in the tape's order of the event at work."""
        return self.started + self.position

    def _new_segment(self, size: int) -> tuple[int, int] | None:
        self._give_back()
        if not self._left:
            raise UnlikeDeviceError(f"event {self._event}: a segment of {size} bytes that the device did not need")
        given = self._left[0]
        if (given.position, given.bytes) != (self._event, size):
            raise UnlikeDeviceError(
                f"event {self._event}: a segment of {size} bytes where the device got its next of {given.bytes} "
                f"at event {given.position}"
            )
        start = self._starts[self._count - len(self._left)]
        self._driver.state[ABOVE], self._driver.state[BELOW] = start, start + size + MIN_BLOCK
        del self._left[0]
        return super()._new_segment(size)

    def _give_back(self) -> None:
        """Where the device gave segments back just now, all that are free go, as many bytes as there."""
        freed = 0
        while self._left and self._left[0].action == "free" and self._left[0].position == self._event:
            freed += self._left.pop(0).bytes
        if freed:
            before = self.reserved
            self.release_cached()
            self.retries += 1
            if before - self.reserved != freed:
                raise UnlikeDeviceError(
                    f"event {self._event}: {before - self.reserved} bytes given back where the device gave back {freed}"
                )

    def finish(self) -> None:
        """Raises UnlikeDeviceError where the device got segments that nobody asked for here."""
        if rest := [segment for segment in self._left if segment.action == "alloc"]:
            raise UnlikeDeviceError(f"event {rest[0].position}: the device got {rest[0].bytes} bytes more")


def disagreements(case: CaseRecord) -> list[str]:
    """One text for each figure of each phase (bytes) that a case's recording, replayed, does not give; empty: all are exact.

    Raises ValueError for a recording of several streams, for which the replay is not made.
    """
    measured = case.measured
    tape = measured.recording
    if tape is None:
        return [f"{case.name}: there is no recording"]
    try:
        if parse_query(measured.measurement.query).expandable_segments:  # they grow: no recorded sizes to follow
            replayed = replay_events(tape, "cuda", expandable_segments=True)
        else:
            replayed = _place(tape, measured.measurement, measured.segments)
    except UnlikeDeviceError as error:
        return [f"{case.name}: {error}"]
    uses = {use.phase: use for use in read_timeline(tape, replayed).phases}
    found = []
    for reading in measured.measurement.phases:
        if reading.phase not in uses:
            found.append(f"{case.name}: the recording has no phase {reading.phase}")
            continue
        found += [f"{case.name}: {text}" for text in _unlike(reading, uses[reading.phase])]
    return found


def _unlike(reading: PhaseReading, use: object) -> list[str]:
    pairs = ((name, getattr(reading, name), getattr(use, name)) for name in FIGURES)
    return [
        f"{reading.phase}: {name} is {replayed} in the replay and was {read} on the device"
        for name, read, replayed in pairs
        if read is not None and read != replayed
    ]


def _place(tape: Tape, measurement: Measurement, segments: tuple[Segment, ...]) -> Replay:
    if measurement.device.kind != "cuda" or not segments:
        return replay_events(tape, measurement.device.kind)
    if any(segment.stream for segment in segments):
        raise ValueError("the recording has several streams; the replay knows one")
    version = parse_version(measurement.versions["torch"].partition("+")[0])
    cache = RecordedCache(segments, by_address=by_address(version))
    replayed = place(tape, cache)
    cache.finish()
    return replayed

"""From a device's allocations and releases, by address and in order, to a tape. No torch here.

`read_trace` reads the CUDA caching allocator's history (`torch.cuda.memory._snapshot()["device_traces"]`) as such events.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sizer.device.record.recording import Segment
from sizer.tape.tape import CATEGORIES, Tape

_TEMPORARY, _ACTIVATION = CATEGORIES.index("temporary"), CATEGORIES.index("activation")

LiveTensors = Mapping[int, tuple[str, str]]
"""Known tensors by address: (category of `sizer.tape.tape`, dotted path if the events name no module)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorEvent:
    """An allocation of `bytes` bytes at an address; with negative bytes its release."""

    address: int
    bytes: int
    op: str = ""
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEvent:
    """A segment of `bytes` bytes that the allocator got from the driver; with negative bytes its release."""

    address: int
    bytes: int
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnd:
    """End of a phase, as a position in the list of events, and the tensors that were alive then, with their places."""

    position: int
    phase: str
    live: LiveTensors = field(default_factory=dict)


def make_tape(events: Iterable[AllocatorEvent], ends: Iterable[PhaseEnd], *, batch: int) -> Tape:
    """Return the tape of some events. Releases of blocks from before the first event, and allocations of 0 bytes, are left out.

    Unknown blocks that are alive when the forward pass ends are activations; all other unknown blocks are temporary.
    """
    return make_recording(events, ends, batch=batch)[0]


def make_recording(
    events: Iterable[AllocatorEvent | SegmentEvent], ends: Iterable[PhaseEnd], *, batch: int
) -> tuple[Tape, tuple[Segment, ...]]:
    """Return the tape of `make_tape`, and the segments, each placed among its events."""
    builder = _TapeBuilder()
    waiting = sorted(ends, key=lambda end: end.position)
    for position, event in enumerate(events):
        while waiting and waiting[0].position <= position:
            builder.end(waiting.pop(0))
        if isinstance(event, SegmentEvent):
            builder.segments.append((len(builder.order), event))
        else:
            builder.add(event)
    for end in waiting:
        builder.end(end)
    return builder.tape(batch), _segments(builder.segments)


def _segments(found: list[tuple[int, SegmentEvent]]) -> tuple[Segment, ...]:
    """Return the segments with addresses relative to the lowest one, and streams numbered in the order of first use."""
    origin = min((event.address for _, event in found), default=0)
    streams: dict[int, int] = {}
    return tuple(
        Segment(
            position=position,
            action="alloc" if event.bytes > 0 else "free",
            address=event.address - origin,
            bytes=abs(event.bytes),
            stream=streams.setdefault(event.stream, len(streams)),
        )
        for position, event in found
    )


class _TapeBuilder:
    """Builds a tape event by event."""

    def __init__(self) -> None:
        self.order, self.sizes = array("q"), array("q")
        self.categories = bytearray()
        self.ops, self.modules = array("l"), array("l")
        self.op_names: dict[str, int] = {}
        self.module_names: dict[str, int] = {}
        self.marks: list[tuple[int, str]] = []
        self.alive: dict[int, int] = {}
        self.segments: list[tuple[int, SegmentEvent]] = []

    def add(self, event: AllocatorEvent) -> None:
        if event.bytes > 0:
            if event.address in self.alive:  # its release was not seen
                self._release(event.address)
            self.alive[event.address] = len(self.sizes)
            self.order.append(len(self.sizes))
            self.sizes.append(event.bytes)
            self.categories.append(_TEMPORARY)
            self.ops.append(self.op_names.setdefault(event.op, len(self.op_names)))
            self.modules.append(self.module_names.setdefault(event.module, len(self.module_names)))
        elif event.bytes < 0 and event.address in self.alive:
            self._release(event.address)

    def _release(self, address: int) -> None:
        self.order.append(~self.alive.pop(address))

    def end(self, end: PhaseEnd) -> None:
        for address, (category, path) in end.live.items():
            block = self.alive.get(address)
            if block is not None and self.categories[block] == _TEMPORARY:
                self.categories[block] = CATEGORIES.index(category)
                if path and self.modules[block] == self.module_names.get("", -1):
                    self.modules[block] = self.module_names.setdefault(path, len(self.module_names))
        if end.phase == "forward":
            for block in self.alive.values():
                if self.categories[block] == _TEMPORARY:
                    self.categories[block] = _ACTIVATION
        self.marks.append((len(self.order), end.phase))

    def tape(self, batch: int) -> Tape:
        return Tape(
            batch=batch,
            order=self.order,
            sizes=self.sizes,
            categories=bytes(self.categories),
            ops=self.ops,
            modules=self.modules,
            op_names=tuple(self.op_names),
            module_names=tuple(self.module_names),
            marks=tuple(self.marks),
        )


# ------------------------------------------------------------------------------------------------------- CUDA's history


# TraceEntry::Action in c10/cuda/CUDACachingAllocator.h, with the names of torch/csrc/cuda/Module.cpp. A freed block is
# "free_requested" at once, when it leaves the counter of allocated bytes, and "free_completed" when every stream that used it has
# passed.
_SIGNS = {"alloc": 1, "free_requested": -1}
_SEGMENT_SIGNS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}

Event = AllocatorEvent | SegmentEvent


def read_trace(
    entries: list[dict[str, Any]], ends: Iterable[PhaseEnd], profiled: Iterable[AllocatorEvent]
) -> tuple[list[Event], list[PhaseEnd]]:
    """Return the events (bytes as requested) of a history, and the ends of phases among them; `ends` count its entries.

    `profiled` are the allocations recorded by torch.profiler, in order. The profiler knows operator and module, the history
    knows the requested bytes. The n-th allocation at an address is the same in both.
    """
    names: dict[int, list[AllocatorEvent]] = defaultdict(list)
    for event in profiled:
        if event.bytes > 0:
            names[event.address].append(event)
    seen: dict[int, int] = defaultdict(int)
    events: list[Event] = []
    places = [0]
    for entry in entries:
        action, address, size = entry["action"], entry.get("addr", 0), entry.get("size", 0)
        if sign := _SIGNS.get(action):
            known = names.get(address, ())
            asked = known[seen[address]] if action == "alloc" and seen[address] < len(known) else None
            seen[address] += action == "alloc"
            op, module = (asked.op, asked.module) if asked else ("", "")
            events.append(AllocatorEvent(address=address, bytes=sign * size, op=op, module=module))
        elif sign := _SEGMENT_SIGNS.get(action):
            events.append(SegmentEvent(address=address, bytes=sign * size, stream=entry.get("stream", 0)))
        places.append(len(events))
    return events, [replace(end, position=places[min(end.position, len(entries))]) for end in ends]

"""The CUDA caching allocator's history, as `torch.cuda.memory._snapshot()["device_traces"]` gives it, as events. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sizer.device.readers.events import AllocatorEvent, PhaseEnd, SegmentEvent

# TraceEntry::Action in c10/cuda/CUDACachingAllocator.h, by the names that torch/csrc/cuda/Module.cpp gives them. A block that is
# freed is "free_requested" at once, when it leaves the counter of allocated bytes, and "free_completed" when every stream that
# used it has passed.
_SIGNS = {"alloc": 1, "free_requested": -1}
_SEGMENT_SIGNS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}

Event = AllocatorEvent | SegmentEvent


def read_trace(
    entries: list[dict[str, Any]], ends: Iterable[PhaseEnd], profiled: Iterable[AllocatorEvent]
) -> tuple[list[Event], list[PhaseEnd]]:
    """The events (bytes as requested) of a history, and where the phases end among them; `ends` count its entries.

    `profiled` are the allocations as torch.profiler saw them, in order: it knows operator and module, where the history
    knows what was requested. The n-th allocation at an address is the same in both.
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

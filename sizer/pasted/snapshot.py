"""A memory snapshot of PyTorch as a curve: allocated and reserved bytes over its events. No torch.

Format: torch/cuda/memory.py (_snapshot), read in PyTorch 2.15. `device_traces` holds the last events of each device, `segments`
the state at the end. Levels are counted back from the end, because a trace may have lost its beginning.

*Known limitation*: events state the requested bytes. Sizes are rounded to 512 bytes here, as the allocator rounds most of them.
A large block that was not split is counted without its remainder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sizer.base.errors import ConfigError

BLOCK_BYTES = 512
MOST_POINTS = 4_000  # of a curve: more are drawn within one pixel
_ALLOCATED = {"alloc": 1, "free_completed": -1}
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReport:
    """One device of a snapshot: bytes after some of its events, in their order, and the most of each.

    `positions` number the events. `largest` are the largest live blocks at the end: (bytes, the line of Python that made it).
    `out_of_memory` is how many requests failed.
    """

    device: int
    events: int
    positions: tuple[int, ...]
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    largest: tuple[tuple[int, str], ...] = ()
    out_of_memory: int = 0


def read_snapshot(value: Any) -> SnapshotReport:
    """Return the device of a snapshot that has the most events. Raises ConfigError for another value."""
    try:
        traces = value["device_traces"]
        device = max(range(len(traces)), key=lambda number: len(traces[number]))
        segments = [one for one in value["segments"] if one.get("device", 0) == device]
        return _report(device, traces[device], segments)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            "this pickle is not a memory snapshot",
            given=f"{type(error).__name__}: {error}"[:120],
            allowed="what torch.cuda.memory._dump_snapshot writes",
            todo="call torch.cuda.memory._record_memory_history() first, then dump",
        ) from None


def _report(device: int, trace: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]]) -> SnapshotReport:
    blocks = [block for segment in segments for block in segment["blocks"]]
    live = [block for block in blocks if str(block["state"]).startswith("active")]
    allocated = sum(_rounded(block.get("requested_size", block["size"])) for block in live)
    reserved = sum(int(one["total_size"]) for one in segments)
    levels = [(allocated, reserved)]
    for event in reversed(trace):
        size, action = event["size"], event["action"]
        allocated -= _ALLOCATED.get(action, 0) * _rounded(size)
        reserved -= _RESERVED.get(action, 0) * int(size)
        levels.append((max(allocated, 0), max(reserved, 0)))
    levels.reverse()
    kept = _thinned(levels)
    return SnapshotReport(
        device=device,
        events=len(trace),
        positions=tuple(kept),
        allocated_bytes=tuple(levels[place][0] for place in kept),
        reserved_bytes=tuple(levels[place][1] for place in kept),
        peak_allocated_bytes=max(level for level, _ in levels),
        peak_reserved_bytes=max(level for _, level in levels),
        largest=tuple(sorted(((int(block["size"]), _line(block)) for block in live), reverse=True)[:20]),
        out_of_memory=sum(event["action"] == "oom" for event in trace),
    )


def _rounded(size: Any) -> int:
    """Return a size as the allocator rounds it (kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp)."""
    return -(-int(size) // BLOCK_BYTES) * BLOCK_BYTES


def _thinned(levels: Sequence[tuple[int, int]]) -> list[int]:
    """Return the places of a curve that are kept: of each stretch the highest, and both ends."""
    if len(levels) <= MOST_POINTS:
        return list(range(len(levels)))
    step = -(-len(levels) // MOST_POINTS)
    tops = (
        max(range(first, min(first + step, len(levels))), key=lambda place: levels[place][0])
        for first in range(0, len(levels), step)
    )
    return sorted({0, *tops, len(levels) - 1})


def _line(block: Mapping[str, Any]) -> str:
    """Return the innermost line of Python that made a block ("train.py:12 step"); empty if it was not recorded."""
    for frame in block.get("frames") or ():
        name = str(frame.get("filename", ""))
        if name.endswith(".py"):
            return f"{name.rpartition('/')[2]}:{frame.get('line', 0)} {frame.get('name', '')}"[:120]
    return ""

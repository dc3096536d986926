"""A replay as PyTorch's own memory snapshot, as `torch.cuda.memory._dump_snapshot` would write it on the device.

Format: torch/cuda/memory.py (_snapshot) and torch/cuda/_memory_viz.py, read in PyTorch 2.15. Its viewer,
torch/utils/viz/MemoryViz.js, reads pickles of protocol 2 to 4 with dicts, lists, texts and numbers. Sizes of blocks are the
bytes taken, sizes of events the requested bytes, as in c10/cuda/CUDACachingAllocator.cpp.

*Known limitation*: no "category" in the events: the viewer fails on snapshots with categories but without "unknown".
"""

from __future__ import annotations

import pickle
from itertools import pairwise

from sizer.allocator.addresses import ExpandableSegments, Segments, find_addresses
from sizer.catalogue.gpus import Gpu
from sizer.tape.tape import CATEGORIES, Tape, stream_of

PROTOCOL = 4  # the highest that the viewer reads

Frames = list[dict[str, str | int]]


def write_snapshot(tape: Tape, gpu: Gpu, *, expandable_segments: bool = False) -> bytes:
    """Return the pickled snapshot at the allocated peak of a tape's work, with all events up to it.

    Raises ValueError for a device without CUDA's allocator.
    """
    return pickle.dumps(make_snapshot(tape, gpu, expandable_segments=expandable_segments), protocol=PROTOCOL)


def make_snapshot(tape: Tape, gpu: Gpu, *, expandable_segments: bool = False) -> dict:
    """Return the snapshot that `write_snapshot` pickles. Raises ValueError for a device without CUDA's allocator."""
    if gpu.backend != "cuda":
        raise ValueError(f"backend was {gpu.backend!r}; PyTorch has memory snapshots only for CUDA's allocator")
    placed = find_addresses(tape, gpu, expandable_segments=expandable_segments)
    position, _ = placed.peak(tape)
    segments = ExpandableSegments() if expandable_segments else Segments()
    frames, given_back, empties = _Frames(tape), set(placed.given_back), tape.empties()
    events: list[dict] = []
    blocks: dict[int, int] = {}  # by address the block that is there
    for at, event in enumerate(tape.order[:position]):
        block = event if event >= 0 else ~event
        size, requested, stream = placed.block_bytes[block], tape.sizes[block], stream_of(tape, block)
        where = frames.of(block)
        if at in given_back:
            for change in segments.release_free(stream if block in empties else 0):
                events.append(_event(change.action, change.address, change.bytes, len(events), where, stream))
        if not size:
            continue
        address = segments.address_of(placed.addresses[block], size, stream)
        if event < 0:
            segments.release(address)
            del blocks[address]
            for action in ("free_requested", "free_completed"):
                events.append(_event(action, address, requested, len(events), where, stream))
            continue
        for change in segments.allocate(address, size, stream):
            events.append(_event(change.action, change.address, change.bytes, len(events), where, stream))
        blocks[address] = block
        events.append(_event("alloc", address, requested, len(events), where, stream))
    return {
        "segments": _segments(segments, blocks, tape, frames),
        "device_traces": [events],
        "allocator_settings": {"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable_segments}"},
        "external_annotations": [],
    }


def _event(action: str, address: int, size: int, number: int, frames: Frames, stream: int) -> dict:
    """Return an entry of `device_traces`; a tape has no clock, its events are a microsecond apart."""
    return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": number, "frames": frames}


def _segments(
    segments: Segments | ExpandableSegments, blocks: dict[int, int], tape: Tape, frames: _Frames
) -> list[dict]:
    """Return the segments with all their blocks, used and free."""
    rows, live = [], sorted(segments.live.items())
    for start, total in sorted(segments.sizes.items()):
        inside = [(address, size) for address, size in live if start <= address < start + total]
        used = sum(size for _, size in inside)
        rows.append(
            {
                "device": 0,
                "address": start,
                "total_size": total,
                "allocated_size": used,
                "active_size": used,
                "requested_size": sum(tape.sizes[blocks[address]] for address, _ in inside),
                "stream": segments.stream_at(start),
                "segment_type": "small" if segments.is_small(start) else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": isinstance(segments, ExpandableSegments),
                "frames": [],
                "blocks": _blocks(start, total, inside, blocks, tape, frames),
            }
        )
    return rows


def _blocks(
    start: int, total: int, inside: list[tuple[int, int]], blocks: dict[int, int], tape: Tape, frames: _Frames
) -> list[dict]:
    """Return the blocks of one segment without gaps, by address: blocks in use, and free ones between them."""
    rows = []
    for (before, length), (address, size) in pairwise([(start, 0), *inside, (start + total, 0)]):
        if address > before + length:
            free = address - before - length
            rows.append(
                {"address": before + length, "size": free, "requested_size": 0, "state": "inactive", "frames": []}
            )
        if size:
            block = blocks[address]
            rows.append(
                {
                    "address": address,
                    "size": size,
                    "requested_size": tape.sizes[block],
                    "state": "active_allocated",
                    "frames": frames.of(block),
                }
            )
    return rows


class _Frames:
    """Stack traces of the blocks: the operator, its module, the modules around it. Equal traces share a list."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._known: dict[tuple[int, int, int], Frames] = {}

    def of(self, block: int) -> Frames:
        """Return the frames of the block, the innermost first."""
        tape = self._tape
        key = (tape.ops[block], tape.modules[block], tape.categories[block])
        if key not in self._known:
            module, category = tape.module_names[key[1]], CATEGORIES[key[2]]
            names = [f"{tape.op_names[key[0]]} ({category})"]
            parts = module.split(".") if module else []
            names += (".".join(parts[:count]) for count in range(len(parts), 0, -1))
            self._known[key] = [{"filename": "sizer", "line": 0, "name": name} for name in (*names, "the model")]
        return self._known[key]

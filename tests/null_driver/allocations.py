"""Asks PyTorch's caching allocator for memory and gives it back, as told on the command line; prints its counters.

    python -m tests.null_driver.allocations EVENTS

EVENTS is JSON: a number of bytes allocates the next block, [bytes, s] does so on stream s; {"release": n} releases block n,
{"block": n, "stream": s} says that the stream uses it, too (`Tensor.record_stream`); null empties the cache. Runs over the null
driver, whose events are done at once, or, with NULL_EVENTS_PENDING=1, when they are waited for.
"""

from __future__ import annotations

import json
import os
import sys

import torch

STREAMS = 4
COUNTERS = ("allocated_bytes.all.current", "reserved_bytes.all.current", "requested_bytes.all.current")


def follow(events: list) -> dict:
    """The counters after every event; where memory ran out, at which."""
    blocks: list[torch.Tensor | None] = []
    rows: list[list[int]] = []
    failed_at = None
    torch.cuda.init()
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
    for position, event in enumerate(events):
        if event is None:
            torch.cuda.empty_cache()
        elif isinstance(event, dict) and "release" in event:
            blocks[event["release"]] = None
        elif isinstance(event, dict):
            blocks[event["block"]].record_stream(streams[event["stream"]])
        else:
            size, stream = event if isinstance(event, list) else (event, 0)
            try:
                with torch.cuda.stream(streams[stream]):
                    blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                failed_at = position
                break
        found = torch.cuda.memory_stats()
        rows.append([found[name] for name in COUNTERS])
    found = torch.cuda.memory_stats()
    return {"rows": rows, "failed_at": failed_at, "retries": found["num_alloc_retries"]}


if __name__ == "__main__":
    print(json.dumps(follow(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)

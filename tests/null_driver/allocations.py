"""Asks PyTorch's caching allocator for memory and gives it back, as told on the command line; prints its counters.

    python -m tests.null_driver.allocations EVENTS

EVENTS is JSON: a number of bytes allocates the next block, [n] releases block n, null empties the cache. Runs over the null driver.
"""

from __future__ import annotations

import json
import os
import sys

import torch

COUNTERS = ("allocated_bytes.all.current", "reserved_bytes.all.current", "requested_bytes.all.current")


def follow(events: list) -> dict:
    """The counters after every event; where memory ran out, at which."""
    blocks: list[int | None] = []
    rows: list[list[int]] = []
    failed_at = None
    torch.cuda.init()
    for position, event in enumerate(events):
        if isinstance(event, list):
            torch.cuda.caching_allocator_delete(blocks[event[0]])
        elif event is None:
            torch.cuda.empty_cache()
        else:
            try:
                blocks.append(torch.cuda.caching_allocator_alloc(event, 0))
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

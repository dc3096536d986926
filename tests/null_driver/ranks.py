"""Two steps of one rank of a world over the null driver: PyTorch's own counters, with its fake process group.

    python -m tests.null_driver.ranks NAMES

NAMES is a JSON list of cases (tests/distributed/cases.py); prints for each the bytes after setup and after each step, as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from sizer.tracing.trace import repeatable
from tests.distributed.cases import CASES, Case
from tests.null_driver.values import KnownValues


def counters(case: Case) -> list[list[int]]:
    """Allocated and reserved bytes, and the most of both since the last time: after setup, after the first and the second step."""
    torch.cuda.init()
    os.environ |= {
        "RANK": str(case.rank),
        "WORLD_SIZE": str(case.world),
        "LOCAL_RANK": "0",
        "HF_DEACTIVATE_ASYNC_LOAD": "1",
    }
    dist.init_process_group("fake", rank=case.rank, world_size=case.world, store=FakeStore(), pg_options=answers())
    found = []
    with repeatable(), KnownValues():
        torch.cuda.reset_peak_memory_stats()
        step = case.setup("cuda")
        found.append(_counters())
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            step()
            found.append(_counters())
    return found


def answers() -> object | None:
    """Options with which collectives have results, as if all ranks were as this one, None where there are none (PyTorch 2.11)."""
    options = FakeProcessGroup.Options()
    if not hasattr(options, "simulate_uniform_ranks"):
        return None
    options.simulate_uniform_ranks = True
    return options


def _counters() -> list[int]:
    cuda = torch.cuda
    return [cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved(), cuda.max_memory_reserved()]


if __name__ == "__main__":
    names = json.loads(sys.argv[1])
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # a fresh allocator for each
        rows = pool.map(counters, [CASES[name] for name in names], chunksize=1)
    print(json.dumps(dict(zip(names, rows, strict=True))), flush=True)
    os._exit(0)  # nothing to take down: the device is none

"""Two steps of every rank of a world of real processes on this computer, by gloo.

    python -m tests.distributed.gloo WORLD QUERIES

QUERIES is a JSON list; prints for each rank a list of what was measured for each query (`Measured.to_dict`) as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from sizer.device.readers.cpu_reader import CpuReader
from sizer.device.record.measurement import DeviceFacts
from sizer.device.trial.rank import join
from sizer.device.trial.trial import measure_request
from sizer.query.text import parse_query

CPU = DeviceFacts(device="cpu", name="this computer", total_bytes=None)
SECONDS = 120.0


def measure_all(rank: int, world: int, meeting: str, queries: list[str]) -> list[dict]:
    """What was measured of each query on one rank."""
    join(torch.device("cpu"), rank=rank, world=world, meeting=Path(meeting), seconds=SECONDS)
    requests = (replace(parse_query(query), rank=rank) for query in queries)
    return [measure_request(request, CpuReader(CPU), timing=False).to_dict() for request in requests]


def main() -> None:
    """Fork the ranks: what they import was imported once, and no thread was started yet."""
    world, queries = int(sys.argv[1]), json.loads(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(world) as pool:
        meeting = str(Path(folder, "meeting"))
        jobs = [pool.apply_async(measure_all, (rank, world, meeting, queries)) for rank in range(world)]
        print(json.dumps([job.get(SECONDS) for job in jobs]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

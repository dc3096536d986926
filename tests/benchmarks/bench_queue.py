"""How long a small question takes beside long ones of other visitors, and beside many tabs of another.

    python -m tests.benchmarks.bench_queue

Two places, as on two cores. The small question is ResNet-18's whole grid, which nobody has asked before; the long ones are Mask
R-CNN's, of which each batch size is traced by itself. Nothing is kept from an earlier run.
"""

from __future__ import annotations

import time

from sizer.errors import JobError
from sizer.service.client import JobClient
from sizer.service.fair_queue import Visitor
from sizer.service.job import Job
from sizer.service.settings import Settings

SMALL = "arch=torchvision:resnet18"
LONG = "arch=torchvision:maskrcnn_resnet50_fpn"
GPUS = ("t4", "rtx-3090", "rtx-4090", "l40s", "a100-80gb", "h100-80gb")
ALONE, GRIDS, TABS = "alone", "six Mask R-CNN grids of six visitors", "66 tabs of one visitor, a Mask R-CNN each"
BEFORE_SECONDS = 15.0  # that the others have worked when the small question comes


def measure(name: str) -> str:
    """The seconds of the small question, its wait included, in one of the three situations, as a line."""
    client = JobClient(Settings(tapes="", max_jobs=2))
    client.submit_models().result()
    others = [] if name == ALONE else _grids(client) if name == GRIDS else _tabs(client)
    time.sleep(BEFORE_SECONDS if others else 0)
    began = time.monotonic()
    client.on_behalf_of(Visitor(address="10.9.9.9", session="small")).submit(SMALL).result()
    took = time.monotonic() - began
    still = sum(not job.done for job in others)
    client.close()
    return f"{name}: {took:.1f} s; of {len(others)} other jobs {still} were still there"


def _grids(client: JobClient) -> list[Job]:
    return [
        client.on_behalf_of(Visitor(address=f"10.0.0.{number}", session="grid")).submit(f"{LONG}&gpu={gpu}")
        for number, gpu in enumerate(GPUS)
    ]


def _tabs(client: JobClient) -> list[Job]:
    """The jobs of those tabs that the queue takes."""
    jobs = []
    for tab in range(66):
        try:
            jobs.append(
                client.on_behalf_of(Visitor(address="10.0.0.1", session=str(tab))).submit(f"{LONG}&batch={tab + 1}")
            )
        except JobError:
            continue
    return jobs


if __name__ == "__main__":
    for situation in (ALONE, GRIDS, TABS):
        print(measure(situation), flush=True)

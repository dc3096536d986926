"""How long a small question takes beside long ones of other visitors, and beside many tabs of another.

    python -m tests.benchmarks.bench_queue [--record]

Two places, as on two cores. The small question is ResNet-18's whole grid, which nobody has asked before; the long ones are Mask
R-CNN's, of which each batch size is traced by itself. Nothing is kept from an earlier run.
"""

from __future__ import annotations

import argparse
import time

from sizer.base.errors import JobError
from sizer.service.client import JobClient
from sizer.service.fair_queue import Visitor
from sizer.service.job import Job
from sizer.service.settings import Settings
from tests.benchmarks.service_figures import add_record, record

SMALL = "arch=torchvision:resnet18"
LONG = "arch=torchvision:maskrcnn_resnet50_fpn"
GPUS = ("t4", "rtx-3090", "rtx-4090", "l40s", "a100-80gb", "h100-80gb")
ALONE, GRIDS, TABS = "alone", "six Mask R-CNN grids of six visitors", "66 tabs of one visitor, a Mask R-CNN each"
BEFORE_SECONDS = 15.0  # that the others have worked when the small question comes


def measure(name: str) -> float:
    """The seconds of the small question, its wait included, in one of the three situations; they are printed, too."""
    client = JobClient(Settings(tapes="", max_jobs=2))
    client.submit_models().result()
    others = [] if name == ALONE else _grids(client) if name == GRIDS else _tabs(client)
    time.sleep(BEFORE_SECONDS if others else 0)
    began = time.monotonic()
    client.on_behalf_of(Visitor(address="10.9.9.9", session="small")).submit(SMALL).result()
    took = time.monotonic() - began
    still = sum(not job.done for job in others)
    client.close()
    print(f"{name}: {took:.1f} s; of {len(others)} other jobs {still} were still there", flush=True)
    return took


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


def main() -> None:
    """Print a line for each situation."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_queue")
    add_record(parser)
    recorded = parser.parse_args().record
    took = [measure(situation) for situation in (ALONE, GRIDS, TABS)]
    if recorded:
        what = f"ResNet-18's whole grid {ALONE}, beside {GRIDS}, beside {TABS}"
        record("bench_queue", {what: f"{', '.join(f'{seconds:.1f}' for seconds in took)} s"})


if __name__ == "__main__":
    main()

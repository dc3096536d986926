"""Choose how a script runs: over the null driver, or under the tracer. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from sizer.catalogue.gpus import Gpu
from sizer.errors import DeviceError
from sizer.running.command_line import Command
from sizer.running.driver.build import find_obstacle
from sizer.running.launch import hardware_of, run_child
from sizer.running.outcome import Outcome, read_outcome

AUTO, DRIVER = "auto", "driver"
ROUTES = (AUTO, DRIVER)
_LOCAL = 8  # ranks of one host, if no launcher says so


def run_script(
    command: Command,
    *,
    gpu: Gpu,
    route: str = AUTO,
    strict: bool = False,
    steps: int = 3,
    seconds: int = 0,
    world: int = 1,
    rank: int = 0,
    skip_draws: bool = False,
    snapshot: Path | None = None,
) -> Outcome:
    """Run a script on a device that is not there, and return what it needs.

    Args:
        command: The script.
        gpu: The device.
        route: One of ROUTES.
        strict: Let PyTorch raise its OutOfMemoryError at the device's memory.
        steps: Optimizer steps to do; 0 for all.
        seconds: Limit of time; 0 for none.
        world: Number of ranks.
        rank: The rank to run.
        skip_draws: Leave large weights on the host without initial values.
        snapshot: File for PyTorch's snapshot.

    Raises:
        DeviceError: This machine cannot run the script.
    """
    obstacle = find_obstacle()
    if obstacle is not None:
        raise DeviceError("this machine cannot run the null driver", todo=obstacle)
    _, note = hardware_of(gpu)
    local = command.local or min(world, _LOCAL)
    settings = {
        "steps": steps,
        "seconds": seconds,
        "world": world,
        "rank": rank,
        "local": local,
        "skip_draws": skip_draws,
        "snapshot": "" if snapshot is None else os.path.abspath(snapshot),
    }
    found, interrupted = run_child(command, settings, gpu=gpu, devices=local, strict=strict)
    if interrupted:
        found["status"] = "interrupted"
    conf = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    others = [part for part in conf.split(",") if part.strip() and not part.strip().startswith("expandable_segments")]
    notes = [note] if note else []
    if others:
        notes.append(
            f"the allocator's setting {','.join(others)} is in the recorded run, but a replay does not know it"
        )
    return read_outcome(
        found,
        gpu=gpu,
        route=DRIVER,
        reason="PyTorch's own CUDA code runs over the null driver",
        notes=tuple(notes),
        expandable="expandable_segments:True" in conf,
    )

"""Choose how a script runs: over the null driver, or under the tracer. No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sizer.base.errors import DeviceError, RequestError
from sizer.catalogue.gpus import Gpu
from sizer.running.command_line import Command
from sizer.running.driver.build import find_obstacle, installed_kernels, kernels_for
from sizer.running.run_outcome import Outcome, read_outcome
from sizer.running.starting import hardware_of, run_child, run_traced

AUTO, DRIVER, META, BOTH = "auto", "driver", "meta", "both"
ROUTES = (AUTO, DRIVER, META, BOTH)
_LOCAL = 8  # ranks of one host, unless a launcher sets it


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
    messages: Path | None = None,
) -> Outcome:
    """Run a script on a device that this machine does not have, and return its memory figures.

    A rank that receives objects from other ranks, such as a pipeline stage, runs after these ranks.

    Args:
        command: The script.
        gpu: The device.
        route: One of ROUTES.
        strict: Let PyTorch raise its OutOfMemoryError at the device's memory.
        steps: Optimizer steps to run; 0 for all.
        seconds: Time limit; 0 for none.
        world: Number of ranks.
        rank: The rank to run.
        skip_draws: Leave large weights on the host without initial values.
        snapshot: File for PyTorch's snapshot.
        messages: Folder for objects that ranks send each other; None for one of this run.

    Raises:
        DeviceError: This machine cannot run the script.
        RequestError: The device cannot run scripts, or does not have that many ranks.
    """
    if messages is None:
        with tempfile.TemporaryDirectory(prefix="sizer-ranks-") as folder:
            kept: dict[str, Any] = {"strict": strict, "steps": steps, "seconds": seconds}
            kept |= {"skip_draws": skip_draws, "snapshot": snapshot}
            return run_script(command, gpu=gpu, route=route, world=world, rank=rank, messages=Path(folder), **kept)
    if world > 1 and gpu.backend == "mps":
        raise RequestError("--world", given=f"{world} with --gpu {gpu.key}", allowed="1: a Mac has one GPU", todo="leave it out")
    local = command.local or min(world, _LOCAL)
    settings = {
        "steps": steps,
        "seconds": seconds,
        "world": world,
        "rank": rank,
        "local": local,
        "skip_draws": skip_draws,
        "messages": str(messages),
        "snapshot": "" if snapshot is None else os.path.abspath(snapshot),
    }
    conf = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    expandable = "expandable_segments:True" in conf
    reason = _meta_reason(gpu, route)
    if reason is not None:
        for name, given in (
            ("--strict", strict),
            ("--snapshot", snapshot),
            ("--skip-draws", skip_draws),
            ("--seconds", seconds),
        ):
            if given:
                raise DeviceError(f"{name} needs the route driver", given="route meta", todo=reason)
        return _trace(command, settings, gpu=gpu, reason=reason, expandable=expandable)
    _, note = hardware_of(gpu)
    found, interrupted = _after_others(
        lambda asked: run_child(command, asked, gpu=gpu, devices=local, strict=strict), settings
    )
    if interrupted:
        found["status"] = "interrupted"
    others = [part for part in conf.split(",") if part.strip() and not part.strip().startswith("expandable_segments")]
    notes = [note] if note else []
    if others:
        notes.append(
            f"the allocator's setting {','.join(others)} is in the recorded run, but a replay does not know it"
        )
    why = "PyTorch's own CUDA code runs over the null driver"
    outcome = read_outcome(found, gpu=gpu, route=DRIVER, reason=why, notes=tuple(notes), expandable=expandable)
    if route != BOTH:
        return outcome
    other = _trace(command, settings, gpu=gpu, reason="to compare", expandable=expandable)
    return replace(outcome, route=BOTH, route_reason=_compare(outcome, other))


def _after_others(run: Callable[[dict[str, Any]], Any], settings: dict[str, Any]) -> Any:
    """Run a rank after the ranks from which it receives objects. Raises DeviceError if ranks wait for each other."""
    waiting: list[int] = [settings["rank"]]
    done: set[int] = set()
    while True:
        result = run(settings | {"rank": waiting[-1]})
        needed = result[0].get("needs")
        if needed is None:
            done.add(waiting.pop())
            if not waiting:
                return result
        elif needed in done or needed in waiting:
            raise DeviceError(f"rank {waiting[-1]} waits for an object that rank {needed} has not sent", todo="run another rank")
        else:
            waiting.append(needed)


def _meta_reason(gpu: Gpu, route: str) -> str | None:
    """Return why the route meta is used, or None for the driver. Raises DeviceError if the requested route is not possible."""
    if gpu.backend == "cpu":
        raise RequestError("--gpu", given=gpu.key, allowed="a GPU", todo="run the script itself: it needs no other device")
    if route == META:
        return "asked for"
    obstacle = find_obstacle() if gpu.backend == "cuda" else f"{gpu.key} is not a CUDA device"
    if obstacle is None:
        try:
            kernels_for(gpu.capability or (0, 0), installed_kernels())
        except ValueError as error:
            obstacle = str(error)
    if obstacle is not None and route != AUTO:
        raise DeviceError(f"this machine cannot run the route {route}", todo=obstacle)
    return obstacle


def _trace(command: Command, settings: dict[str, Any], *, gpu: Gpu, reason: str, expandable: bool) -> Outcome:
    found, tape, interrupted = _after_others(lambda asked: run_traced(command, asked, gpu=gpu), settings)
    if interrupted:
        found["status"] = "interrupted"
    notes = (
        (*tape.stand_ins, "route meta: libraries that ask for the kind of a device may take another way")
        if tape
        else ()
    )
    return read_outcome(found, gpu=gpu, route=META, reason=reason, notes=notes, expandable=expandable, traced=tape)


def _compare(driver: Outcome, meta: Outcome) -> str:
    """Describe how the routes differ, in words."""
    ended = meta.script_status in ("stopped", "completed", driver.script_status)
    if driver.estimate is None or meta.estimate is None or not ended:
        first = (meta.script_message or meta.script_status).partition("\n")[0]
        return f"the figures are from route driver; route meta has none: {first}"
    pairs = [(driver.estimate.peak_allocated_bytes, meta.estimate.peak_allocated_bytes, "allocated")]
    pairs.append((driver.estimate.peak_reserved_bytes, meta.estimate.peak_reserved_bytes, "reserved"))
    said = (f"{name} {ours:,} and {theirs:,} bytes" for ours, theirs, name in pairs)
    equal = all(ours == theirs for ours, theirs, _ in pairs)
    return f"the figures are from route driver; driver and meta {'agree' if equal else 'differ'}: {', '.join(said)}"

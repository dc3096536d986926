"""Start a script with the null driver in a child process, and read its results. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sizer.base.errors import DeviceError
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.hardware import HARDWARE, Hardware
from sizer.running.command_line import Command
from sizer.running.driver.build import built_driver, driver_environment
from sizer.running.run_settings import NO_KERNELS, ROOT, Settings, start_code
from sizer.tape.tape import Tape

_SITE = Path(__file__).parent / "site"
_COPIED_BYTES = 16 * 2**20  # size of the largest copy that is computed
_WAIT_SECONDS = 2.0  # for a child that also got Ctrl-C from the terminal
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def hardware_of(gpu: Gpu) -> tuple[Hardware, str]:
    """Return the hardware to describe for a GPU, and a note if it is that of a similar one. Raises DeviceError if there is none."""
    if gpu.key in HARDWARE:
        return HARDWARE[gpu.key], ""
    alike = [row for row in HARDWARE.values() if row.capability == gpu.capability] if gpu.backend == "cuda" else []
    if not alike:
        raise DeviceError("gpu", given=gpu.key, allowed="an NVIDIA GPU of the catalogue", todo="see `sizer gpus`")
    nearest = min(alike, key=lambda row: abs(row.gpu.total_bytes - gpu.total_bytes))
    note = f"multiprocessors and caches are taken from {nearest.gpu.name}, with the same compute capability"
    return replace(nearest, gpu=replace(nearest.gpu, total_bytes=gpu.total_bytes)), note


def run_child(
    command: Command, settings: Mapping[str, Any], *, gpu: Gpu, devices: int, strict: bool
) -> tuple[dict[str, Any], bool]:
    """Run a program with the null driver of a GPU. Return the child's results, and True if Ctrl-C ended it.

    Args:
        command: The program.
        settings: Fields of `Settings`, except those of the program.
        gpu: The device.
        devices: Number of devices of the host.
        strict: Refuse allocations beyond the device's memory.

    Raises:
        DeviceError: This machine cannot run it, with the reason.
    """
    with tempfile.TemporaryDirectory(prefix="sizer-run-") as folder:
        out = Path(folder) / "found.json"
        environment = child_environment(gpu, devices=devices, strict=strict, launched=dict(command.environment))
        arguments = _arguments("script_child", command, settings, gpu, out)
        with _descendants_ended():
            status, interrupted = _wait(subprocess.Popen(arguments, env=environment))
        if not out.exists():
            return {
                "status": "interrupted" if interrupted else "crashed",
                "message": _ended(status),
                "devices": [],
            }, interrupted
        found = json.loads(out.read_text())
    if status == NO_KERNELS or "cannot" in found:
        raise DeviceError("the null driver cannot run this GPU", given=gpu.key, todo=found["cannot"])
    return found, interrupted


def run_traced(command: Command, settings: Mapping[str, Any], *, gpu: Gpu) -> tuple[dict[str, Any], Tape | None, bool]:
    """Run a program under the tracer. Return the child's results, the tape or None, and True if Ctrl-C ended it.

    The arguments are those of `run_child`.
    """
    with tempfile.TemporaryDirectory(prefix="sizer-run-") as folder:
        out = Path(folder) / "found.json"
        environment = os.environ | dict(command.environment)
        process = subprocess.Popen(_arguments("tracing_child", command, settings, gpu, out), env=environment)
        with _descendants_ended():
            status, interrupted = _wait(process)
        if not out.exists():
            return (
                {"status": "interrupted" if interrupted else "crashed", "message": _ended(status), "devices": []},
                None,
                interrupted,
            )
        found = json.loads(out.read_text())
        written = Path(f"{out}.tape")
        # The file is that of this user's own process, in a folder that only this user can write.
        return found, pickle.loads(written.read_bytes()) if written.exists() else None, interrupted


def _arguments(module: str, command: Command, settings: Mapping[str, Any], gpu: Gpu, out: Path) -> list[str]:
    """Return the command that starts a child."""
    rank = [f"{command.rank_option}={settings['rank'] % settings['local']}"] if command.rank_option else []
    child_settings = Settings(
        kind=command.kind,
        target=command.target,
        arguments=(*rank, *command.arguments),
        out=str(out),
        capability=gpu.capability or (0, 0),
        gpu=gpu.key,
        **settings,
    )
    return [sys.executable, "-c", start_code(module), child_settings.to_json()]


def child_environment(
    gpu: Gpu, *, devices: int, strict: bool, launched: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Return the environment of a process with the null driver of a GPU; `launched` are the variables that a launcher sets.

    The other arguments are those of `run_child`.
    """
    hardware, _ = hardware_of(gpu)
    environment = os.environ | launched
    if not strict:  # expandable segments reserve addresses by the memory of the device: they are replayed
        for name in _ALLOCATOR:
            if name in environment:
                parts = [
                    part for part in environment[name].split(",") if not part.strip().startswith("expandable_segments")
                ]
                environment[name] = ",".join(parts)
    driver = driver_environment(built_driver(), hardware)
    driver["LD_PRELOAD"] = " ".join(filter(None, (driver["LD_PRELOAD"], environment.get("LD_PRELOAD"))))
    paths = (driver["LD_LIBRARY_PATH"], environment.get("LD_LIBRARY_PATH"))
    driver["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    return (
        environment
        | driver
        | {
            "NULL_DEVICES": str(devices),
            "NULL_CONTEXT_BYTES": str(gpu.context_bytes),
            "NULL_COPIED_BYTES": str(_COPIED_BYTES),
            "NULL_UNBOUNDED": str(int(not strict)),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_SITE), environment.get("PYTHONPATH")))),
            "SIZER_DRY_RUN_ROOT": str(ROOT),
        }
    )


def _wait(process: subprocess.Popen) -> tuple[int, bool]:
    """Wait for a child. Ctrl-C reaches it from the terminal; if it came to this process alone, pass it on."""
    interrupted = False
    while True:
        try:
            if not interrupted:
                return process.wait(), False
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_WAIT_SECONDS), True
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(5 * _WAIT_SECONDS), True
            process.kill()
        except KeyboardInterrupt:
            if interrupted:
                process.kill()
            interrupted = True


@contextlib.contextmanager
def _descendants_ended() -> Iterator[None]:
    """Kill all processes that were started within the context and still run at its end, orphans included."""
    if sys.platform != "linux":
        yield
        return
    pr_set_child_subreaper = 36
    before = _children_of(os.getpid())
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
    try:
        yield
    finally:
        while left := _children_of(os.getpid()) - before:
            for child in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            for child in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, 0)
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 0, 0, 0, 0)


def _children_of(parent: int) -> set[int]:
    """Return the living children of a process."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
                words = file.read().rpartition(")")[2].split()
                if int(words[1]) == parent:
                    found.add(int(entry))
    return found


def _ended(status: int) -> str:
    if status < 0:
        return f"the process was ended by signal {signal.Signals(-status).name}"
    return f"the process ended with status {status} before its report"

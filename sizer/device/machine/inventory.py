"""The devices that PyTorch can use here, the driver's facts on each, and why other devices are missing.

`find_inventory` starts a separate process, so that its caller imports no torch; this module, run as a program, is that process.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sizer.base.codec import DecodeError, Document
from sizer.base.errors import DeviceError, JobError, quote
from sizer.device.machine.computer import Host, Machine, find_accelerators, without_kernels
from sizer.device.record.measurement import DeviceFacts
from sizer.processes.process import print_value, run_program

SECONDS = 120.0
PLANNING = "planning only: no memory, no results"

# check_available: without it a build for CUDA answers "cuda" on a machine that has no GPU. Tried on torch 2.11 and 2.15.
PORTABLE = 'device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")'


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory(Document):
    """The devices of one machine; `missing` has one sentence for each kind that is absent or cannot be used.

    `line` is Python code that sets `device` on this machine; `versions` are those of Python and torch.
    """

    devices: tuple[DeviceFacts, ...]
    missing: tuple[str, ...]
    line: str
    versions: dict[str, str]

    def find(self, name: str) -> DeviceFacts:
        """Return the device of this name that can compute; "cuda" and "xpu" are the first of their kind.

        Raises DeviceError with the available devices, and why others are missing.
        """
        there = [facts for facts in self.devices if facts.kind != "meta"]
        for facts in there:
            if facts.device in (name, f"{name}:0"):
                return facts
        raise DeviceError(
            "this device is not here",
            given=quote(name),
            allowed=", ".join(facts.device for facts in there),
            todo=" ".join(self.missing) or None,
        )


# ------------------------------------------------------------------------------------------- from a process without torch


def find_inventory() -> Inventory:
    """Return the inventory of this machine, made by a separate process that imports torch and ends.

    Raises JobError if torch does not work.
    """
    try:
        return Inventory.from_dict(
            run_program("sizer.device.machine.inventory", seconds=SECONDS, what="the devices could not be listed")
        )
    except DecodeError as error:
        raise JobError(f"the devices could not be listed ({quote(str(error), 200)})") from None


def find_devices() -> list[DeviceFacts]:
    """Return the devices of `find_inventory`. Raises JobError if torch does not work."""
    return list(find_inventory().devices)


# ----------------------------------------------------------------------------------------------- in the process with torch


def take_inventory(machine: Machine | None = None) -> Inventory:
    """Return CPU, each CUDA (or ROCm) device, MPS, each XPU, and meta, memory in bytes; missing devices, and the safe line.

    Imports torch. No context is made on a CUDA device if NVIDIA's management library reports the free memory.
    """
    machine = machine or _this_machine()
    torch, host = machine.torch, machine.host
    cpu = DeviceFacts(
        device="cpu", name=host.processor_name(), total_bytes=host.total_bytes(), free_bytes=host.free_bytes()
    )
    accelerators, missing = find_accelerators(machine)
    unusable = dict(without_kernels(torch, accelerators))
    if not accelerators and not missing:
        missing = [
            f"This build of PyTorch ({torch.__version__}) only supports the CPU; an accelerator needs another build: see "
            "https://pytorch.org/get-started/locally/."
        ]
    return Inventory(
        devices=(cpu, *accelerators, DeviceFacts(device="meta", name=PLANNING, total_bytes=None)),
        missing=(*missing, *unusable.values()),
        line=safe_device_line(accelerators, unusable),
        versions={"python": ".".join(map(str, sys.version_info[:3])), "torch": str(torch.__version__)},
    )


def safe_device_line(devices: Iterable[DeviceFacts], unusable: Collection[str] = ()) -> str:
    """Return a line of Python that sets `device`, works on a machine with these devices, and names the result in a comment.

    The line also works on other machines, unless an accelerator here is `unusable`: then it names a device that works.
    """
    accelerators = [facts.device for facts in devices if facts.kind not in ("cpu", "meta")]
    usable = [device for device in accelerators if device not in unusable]
    if unusable:
        return (
            f'device = torch.device("{usable[0] if usable else "cpu"}")  # not {", ".join(unusable)}: no kernels for it'
        )
    here = accelerators[0] if accelerators else "cpu"
    if len(accelerators) > 1:
        here += f", the first of {len(accelerators)}"
    return f"{PORTABLE}  # here: {here}"


def _this_machine() -> Machine:
    import torch

    return Machine(torch=torch, host=Host())


if __name__ == "__main__":
    print_value(lambda: take_inventory().to_dict())

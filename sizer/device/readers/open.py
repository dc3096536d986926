"""Opens the reader of a device by its name. Importing this imports no torch; `open_reader` does."""

from __future__ import annotations

from sizer.base.errors import DeviceError, quote
from sizer.device.readers.reader import Reader


def open_reader(device: str) -> Reader:
    """Return the reader of a device by PyTorch's name: "cpu", "cuda:0" (or "cuda"), "mps".

    Raises DeviceError with the available devices, or with the reason why PyTorch cannot use this one.
    """
    from sizer.device.machine.inventory import take_inventory

    facts = take_inventory().find(device)
    if facts.kind == "cpu":
        from sizer.device.readers.cpu_reader import CpuReader

        return CpuReader(facts)
    if facts.kind == "cuda":
        from sizer.device.readers.cuda_reader import CudaReader, CudaRuntime

        return CudaReader(facts, CudaRuntime(facts.device))
    if facts.kind == "mps":
        from sizer.device.readers.mps_reader import MpsReader, MpsRuntime

        return MpsReader(facts, MpsRuntime())
    raise DeviceError("nothing is measured on this kind of device yet", given=quote(device), allowed="cpu, cuda, mps")

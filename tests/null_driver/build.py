"""The environment of the null driver (sizer/running/driver) for these tests.

    python -m tests.null_driver.build GPU

prints the environment in which PyTorch finds it; GPU is a key of the catalogue.
"""

from __future__ import annotations

import sys

import torch

from sizer.catalogue.hardware import HARDWARE, Hardware
from sizer.running.driver.build import built_driver, driver_environment, kernels_for


def null_environment(device: Hardware) -> dict[str, str]:
    """The environment in which `import torch` finds the null driver of a device, compiled if it is not there yet.

    Raises DeviceError if the compiler refuses, ValueError if this PyTorch has no kernels for the device.
    """
    compiled = kernels_for(device.capability, torch._C._cuda_getArchFlags())
    return driver_environment(built_driver(), device, compiled=compiled)


if __name__ == "__main__":
    print(" ".join(f"{name}={value!r}" for name, value in null_environment(HARDWARE[sys.argv[1]]).items()))

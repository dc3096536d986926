"""The installed cuDNN with described devices: its heuristics answer without a GPU or a driver.

Since version 9.8 the library accepts a device as JSON instead of a handle ("deviceless ahead-of-time compilation"). It returns
the engines in its order and the workspace of each (`sizer.tracing.cuda.cudnn_graph`). Libraries that it would load on a machine
with a driver are replaced by `sizer.tracing.cuda.deviceless`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.cuda import deviceless

OLDEST = 90800
_NAME = "libcudnn.so.9"

_DEVICE, _DEVICE_JSON, _CHAR = 38, 2702, 24  # cudnnBackendDescriptorType_t, cudnnBackendAttributeName_t and ..Type_t


def library() -> ctypes.CDLL | None:
    """Return the cuDNN installed with PyTorch; None if there is none, or if it does not accept described devices."""
    return found[0] if (found := _found()) else None


@functools.cache
def _found() -> tuple[ctypes.CDLL, Path, int] | None:
    """Return the library, its folder and its version."""
    for folder in _folders():
        try:
            found = ctypes.CDLL(str(folder / _NAME))
            version = _version(found)
        except (OSError, AttributeError):  # missing, or not version 9
            continue
        return (found, folder, version) if version >= OLDEST else None
    return None


def interposer() -> deviceless.Interposer | str:
    """Return the replacement of cuBLASLt and the driver for cuDNN, or in words why it is missing."""
    found = _found()
    return "no cuDNN is installed" if found is None else deviceless.install(found[1])


def version() -> int | None:
    """Return the version of the library, 92600 for 9.26.0; None if there is none."""
    return found[2] if (found := _found()) else None


def version_text() -> str:
    """Return the version in words: "9.26.0"."""
    number = version() or 0
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _version(found: ctypes.CDLL) -> int:
    found.cudnnGetVersion.restype = ctypes.c_size_t
    return found.cudnnGetVersion()


def _folders() -> Iterator[Path]:
    """Yield the folders in which PyTorch's packages put the library: NVIDIA's package, else the folder of PyTorch's libraries."""
    for package, inside in (("nvidia.cudnn", "lib"), ("torch", "lib")):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield Path(folder) / inside


@functools.cache
def device(gpu: str) -> int | None:
    """Return the descriptor of a device of the catalogue, which is never destroyed.

    None if cuDNN is missing or does not know the device.
    """
    found, descriptor = library(), ctypes.c_void_p()
    if found is None or found.cudnnBackendCreateDescriptor(_DEVICE, ctypes.byref(descriptor)):
        return None
    text = json.dumps(HARDWARE[gpu].as_cudnn()).encode()
    words, count = ctypes.create_string_buffer(text), ctypes.c_int64(len(text) + 1)
    if found.cudnnBackendSetAttribute(descriptor, _DEVICE_JSON, _CHAR, count, words):
        return None
    return None if found.cudnnBackendFinalize(descriptor) else descriptor.value


def described(gpu: str) -> AbstractContextManager[None]:
    """Return a context within which cuDNN finds cuBLASLt and a driver as on a device of the catalogue, if possible.

    Source: `deviceless`.
    """
    interposed = interposer()
    return nullcontext() if isinstance(interposed, str) else interposed.described(HARDWARE[gpu].capability)

"""The installed cuDNN and the devices that are described to it: its own heuristics answer without a GPU or a driver.

Since version 9.8 the library takes a device as JSON where it would take a handle ("deviceless ahead-of-time compilation"),
and answers with the engines in its order and the workspace of each (`sizer.tracing.cuda.cudnn_graph`). What it would look for
on a machine with a driver it finds in `sizer.tracing.cuda.deviceless`.
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
    """The cuDNN that is installed with PyTorch; None where there is none, or none that takes described devices."""
    return found[0] if (found := _found()) else None


@functools.cache
def _found() -> tuple[ctypes.CDLL, Path, int] | None:
    """The library, its folder and its version."""
    for folder in _folders():
        try:
            found = ctypes.CDLL(str(folder / _NAME))
            version = _version(found)
        except (OSError, AttributeError):  # not there, or not one of version 9
            continue
        return (found, folder, version) if version >= OLDEST else None
    return None


def interposer() -> deviceless.Interposer | str:
    """Return what stands for cuBLASLt and the driver where cuDNN looks for them, or why nothing does, in words."""
    found = _found()
    return "no cuDNN is installed" if found is None else deviceless.install(found[1])


def version() -> int | None:
    """The version of the library that answers, 92600 for 9.26.0; None where none does."""
    return found[2] if (found := _found()) else None


def version_text() -> str:
    """The same in words: "9.26.0"."""
    number = version() or 0
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _version(found: ctypes.CDLL) -> int:
    found.cudnnGetVersion.restype = ctypes.c_size_t
    return found.cudnnGetVersion()


def _folders() -> Iterator[Path]:
    """Return where PyTorch's packages put the library: NVIDIA's own package, else beside PyTorch's libraries."""
    for package, inside in (("nvidia.cudnn", "lib"), ("torch", "lib")):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield Path(folder) / inside


@functools.cache
def device(gpu: str) -> int | None:
    """The descriptor of a device of the catalogue, kept for good; None where cuDNN is not there or does not know the device."""
    found, descriptor = library(), ctypes.c_void_p()
    if found is None or found.cudnnBackendCreateDescriptor(_DEVICE, ctypes.byref(descriptor)):
        return None
    text = json.dumps(HARDWARE[gpu].as_cudnn()).encode()
    words, count = ctypes.create_string_buffer(text), ctypes.c_int64(len(text) + 1)
    if found.cudnnBackendSetAttribute(descriptor, _DEVICE_JSON, _CHAR, count, words):
        return None
    return None if found.cudnnBackendFinalize(descriptor) else descriptor.value


def described(gpu: str) -> AbstractContextManager[None]:
    """A context within which cuDNN finds cuBLASLt and a driver as on a device of the catalogue (`deviceless`), where it can."""
    interposed = interposer()
    return nullcontext() if isinstance(interposed, str) else interposed.described(HARDWARE[gpu].capability)

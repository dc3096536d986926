"""Provide the null driver for the installed PyTorch, and describe a device for it. No torch.

The shipped one is unpacked if it fits (`prebuilt`), and otherwise compiled (`compiling`), once per PyTorch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sizer.base.errors import DeviceError
from sizer.catalogue.hardware import Hardware
from sizer.running.driver import prebuilt
from sizer.running.driver.compiling import LIBRARIES, RUNTIME, PyTorch, build, sources_digest


def find_pytorch() -> PyTorch:
    """Return the PyTorch of this interpreter. Raises DeviceError if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise DeviceError("PyTorch is not installed", todo="install a CUDA build of PyTorch")
    return PyTorch(version=importlib.metadata.version("torch"), folder=Path(spec.origin).parent)


def find_obstacle() -> str | None:
    """Return the reason why this machine cannot run the null driver, or None if it can."""
    if sys.platform != "linux":
        return f"the null driver runs on Linux, and this system is {platform.system()}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the null driver was tried on x86-64 only, and this machine is {platform.machine()}"
    pytorch = find_pytorch()
    if not (pytorch.folder / "lib" / "libtorch_cuda.so").exists():
        return f"PyTorch {pytorch.version} is not a CUDA build"
    if _is_built(folder_of(pytorch)) or prebuilt.covers(pytorch):
        return None
    missing = [folder for folder in pytorch.headers if not folder.is_dir()]
    if missing:
        return f"PyTorch {pytorch.version} has no CUDA 13 headers at {missing[0]}"
    tools = [tool for tool in ("gcc", "nm") if shutil.which(tool) is None]
    return f"{' and '.join(tools)} cannot be found: install gcc and binutils" if tools else None


def installed_kernels() -> str:
    """Return the kernels of the installed PyTorch, such as "sm_80 sm_90", as `torch._C._cuda_getArchFlags()` does.

    A separate process imports PyTorch once; the answer is stored in the driver's folder.
    """
    kept = built_driver() / "kernels"
    if not kept.exists():
        code = "import torch; print(torch._C._cuda_getArchFlags())"
        flags = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        partial = kept.with_name(f"kernels.{os.getpid()}")
        partial.write_text(flags.strip())
        partial.replace(kept)
    return kept.read_text()


def driver_environment(folder: Path, hardware: Hardware, *, compiled: int | None = None) -> dict[str, str]:
    """Return the environment in which `import torch` finds the null driver in a folder, with a device of this hardware.

    `compiled` is the same as in `describe`.
    """
    return {
        "LD_PRELOAD": str(folder / RUNTIME),
        "LD_LIBRARY_PATH": str(folder),
        "NULL_DEVICE": describe(hardware, compiled=compiled),
    }


def describe(hardware: Hardware, *, compiled: int | None = None) -> str:
    """Return the line that device.h reads.

    `compiled` names the kernels of PyTorch that the device runs (75 for sm_75). Without it, `null_compiled` says so later: only
    PyTorch knows its kernels, and the caller may not import it.
    """
    major, minor = hardware.capability
    numbers = (
        major,
        minor,
        compiled or 10 * major + minor,
        hardware.processors,
        hardware.threads,
        hardware.blocks,
        hardware.shared_kib,
        hardware.reserved_kib,
        hardware.l2_kib,
        hardware.gpu.total_bytes,
    )
    return "\t".join((" ".join(map(str, numbers)), hardware.name, json.dumps(hardware.as_cudnn())))


def built_driver(pytorch: PyTorch | None = None) -> Path:
    """Return the folder with the null driver of a PyTorch, the installed one by default. It is made if it does not exist.

    Raises DeviceError if the compiler fails.
    """
    pytorch = pytorch or find_pytorch()
    folder = folder_of(pytorch)
    if _is_built(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent):
        if not _is_built(folder):
            with tempfile.TemporaryDirectory(dir=folder.parent) as place:
                work = Path(place) / "driver"
                work.mkdir()
                if prebuilt.covers(pytorch):
                    prebuilt.unpack(work)
                else:
                    _compile(work, pytorch)
                shutil.rmtree(folder, ignore_errors=True)
                work.rename(folder)
    return folder


def _compile(folder: Path, pytorch: PyTorch) -> None:
    try:
        build(folder, pytorch)
    except subprocess.CalledProcessError as error:
        raise DeviceError(
            "the null driver cannot be compiled",
            given=f"PyTorch {pytorch.version}",
            todo=f"{error.cmd[0]} says: {' '.join(error.stderr.split())[-300:]}",
        ) from None


def folder_of(pytorch: PyTorch) -> Path:
    """Return the folder of a PyTorch's null driver: one per version and per state of the sources."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "sizer" / "null-driver" / f"torch-{pytorch.version}-{sources_digest()}"


def _is_built(folder: Path) -> bool:
    return (folder / LIBRARIES[-1]).exists()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that only one process compiles at a time."""
    import fcntl  # not on Windows

    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ------------------------------------------------------------------------------------------------------------- kernels


def kernels_for(capability: tuple[int, int], flags: str) -> int:
    """Return the kernels that a device runs (75 for sm_75): the highest capability of its generation that is not above its own.

    Args:
        capability: The compute capability of the device.
        flags: The value of `torch._C._cuda_getArchFlags()`, such as "sm_80 sm_90".

    Raises:
        ValueError: This PyTorch has no kernels for the device.
    """
    major, minor = capability
    built = [int(name.removeprefix("sm_")) for name in flags.split() if name.removeprefix("sm_").isdigit()]
    fitting = [arch for arch in built if arch // 10 == major and arch % 10 <= minor]
    if not fitting:
        known = ", ".join(f"{arch // 10}.{arch % 10}" for arch in built)
        raise ValueError(
            f"this PyTorch has kernels for capability {known} and none for {major}.{minor}: take another GPU"
        )
    return max(fitting)

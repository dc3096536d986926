"""Build the null driver for the installed PyTorch, and describe a device for it. No torch.

The libraries are runtime.c and nccl.c with a function that returns success for everything else that PyTorch calls, and nvml.c. The
build needs gcc, nm and NVIDIA's headers, which the CUDA builds of PyTorch bring along. It takes a few seconds once per PyTorch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sizer.base.errors import DeviceError
from sizer.catalogue.hardware import Hardware
from sizer.running.driver.libraries import null_libraries

SOURCES = Path(__file__).parent
_FILES = ("runtime.c", "nccl.c", "nvml.c", "device.h", "libraries.py")
_CALLERS = (
    "libc10_cuda.so",
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libtorch_python.so",
    "libcaffe2_nvrtc.so",
)
_RUNTIME = "libcudart.so.13"

# Answered are the runtime, the driver (not its private interfaces), cuBLAS, NCCL, and the functions of cuDNN that run on a handle.
_ANSWERED = re.compile(
    r"(__)?cuda[A-Z]|cublas|nccl[A-Z]|cu(?!File|GetProcAddress|GetExportTable)[A-Z]"
    r"|cudnn(BatchNormalization|RNN|CTCLoss|SpatialTf|Set(Restore)?DropoutDescriptor)"
)
_DECLARED = re.compile(r"^CUresult CUDAAPI\s+(cu[A-Z]\w+)\(", re.MULTILINE)

# Plain C sees the attributes of NVIDIA's compiler as nothing.
_HOST_DEFINES = """
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define __host__
#define __device__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __location__(a)
#define __annotate__(a)
#define __align__(a) __attribute__((aligned(a)))
#define __builtin_align__(a) __align__(a)
"""

# Headers that plain C cannot read, or that no package brings along: of CCCL nothing is used.
_SHIMS = {
    "crt/host_defines.h": _HOST_DEFINES,
    "nv/target": "",
    "cuda_runtime.h": "#include <cuda_runtime_api.h>\n",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
    "cuda_fp8.h": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PyTorch:
    """The installed PyTorch, found without importing it: its version and its folder."""

    version: str
    folder: Path

    @property
    def packages(self) -> Path:
        """The folder of the packages that came with it."""
        return self.folder.parent

    @property
    def headers(self) -> tuple[Path, ...]:
        """The folders of NVIDIA's headers."""
        nvidia = self.packages / "nvidia"
        return nvidia / "cu13" / "include", nvidia / "cudnn" / "include", nvidia / "nccl" / "include"


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
        return f"PyTorch {pytorch.version} is no CUDA build"
    missing = [folder for folder in pytorch.headers if not folder.is_dir()]
    if missing:
        return f"PyTorch {pytorch.version} has no CUDA 13 headers at {missing[0]}"
    if _is_built(folder_of(pytorch)):
        return None
    tools = [tool for tool in ("gcc", "nm") if shutil.which(tool) is None]
    return f"{' and '.join(tools)} cannot be found: install gcc and binutils" if tools else None


def installed_kernels() -> str:
    """Return the kernels of the installed PyTorch, such as "sm_80 sm_90", as `torch._C._cuda_getArchFlags()` does.

    A process of its own imports PyTorch once; the answer is kept with the driver.
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

    `compiled` is as in `describe`.
    """
    return {
        "LD_PRELOAD": str(folder / _RUNTIME),
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
    """Return the folder with the null driver of a PyTorch, the installed one by default. Compile it if it is not there yet.

    Raises DeviceError if the compiler refuses.
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
                try:
                    build(work, pytorch)
                except subprocess.CalledProcessError as error:
                    raise DeviceError(
                        "the null driver cannot be compiled",
                        given=f"PyTorch {pytorch.version}",
                        todo=f"{error.cmd[0]} says: {' '.join(error.stderr.split())[-300:]}",
                    ) from None
                shutil.rmtree(folder, ignore_errors=True)
                work.rename(folder)
    return folder


def folder_of(pytorch: PyTorch) -> Path:
    """Return the folder of a PyTorch's null driver: one per version and per state of the sources."""
    sources = hashlib.blake2b(digest_size=6)
    for name in (*_FILES, Path(__file__).name):
        sources.update((SOURCES / name).read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "sizer" / "null-driver" / f"torch-{pytorch.version}-{sources.hexdigest()}"


def build(folder: Path, pytorch: PyTorch) -> None:
    """Compile the libraries into a folder. Raises subprocess.CalledProcessError if gcc or nm refuses."""
    for name, text in _SHIMS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    includes = [f"-I{place}" for place in (folder, SOURCES, *pytorch.headers)]
    objects = [folder / f"{name}.o" for name in ("runtime", "nccl")]
    for compiled in objects:
        _gcc("-c", "-O2", *includes, SOURCES / f"{compiled.stem}.c", "-o", compiled)
    generated, runtime = folder / "libraries.c", folder / _RUNTIME
    generated.write_text(null_libraries(_called(pytorch), pytorch.headers[0]))
    objects.append(folder / "libraries.o")
    _gcc("-c", "-O2", *includes, generated, "-o", objects[-1])
    stubs = folder / "stubs.c"
    stubs.write_text(_stubs(set().union(*(_symbols("--defined-only", one) for one in objects)), pytorch))
    _gcc("-shared", stubs, *objects, f"-Wl,-soname,{_RUNTIME}", "-lpthread", "-ldl", "-o", runtime)
    _gcc("-shared", "-Wl,--no-as-needed,-soname,libcuda.so.1", runtime, "-o", folder / "libcuda.so.1")
    _gcc("-shared", SOURCES / "nvml.c", runtime, "-Wl,-soname,libnvidia-ml.so.1", "-o", folder / "libnvidia-ml.so.1")


def _is_built(folder: Path) -> bool:
    return (folder / "libnvidia-ml.so.1").exists()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that two processes do not compile at once."""
    import fcntl  # not on Windows

    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stubs(defined: set[str], pytorch: PyTorch) -> str:
    """C functions that return success for what is called and not defined, and the table of the driver's functions by name."""
    headers = pytorch.headers[0]
    called = _called(pytorch)
    called |= _symbols("--defined-only", headers.parent / "lib" / _RUNTIME, "-D")
    declared = set(_DECLARED.findall((headers / "cuda.h").read_text()))
    called |= declared | {re.sub(r"_v\d+$", "", name) for name in declared}
    missing = sorted(name for name in called - defined if _ANSWERED.match(name))
    drivers = sorted(name for name in (*defined, *missing) if re.match(r"cu[A-Z]", name))
    lines = (
        *(f"int {name}(void) {{ return 0; }}" for name in missing),
        *(f"extern int {name}();" for name in drivers if name in defined),
        "struct entry { const char *name; void *function; };",
        "const struct entry null_entries[] = {",
        *(f'    {{"{name}", (void *){name}}},' for name in drivers),
        "    {0, 0}};\n",
    )
    return "\n".join(lines)


def _called(pytorch: PyTorch) -> set[str]:
    """The functions that PyTorch's own libraries call."""
    libraries = pytorch.folder / "lib"
    return set().union(*(_symbols("--undefined-only", libraries / name, "-D") for name in _CALLERS))


def _symbols(which: str, library: Path, *options: str) -> set[str]:
    listed = _run("nm", which, *options, library).splitlines()
    return {line.split()[-1].partition("@")[0] for line in listed if line}


def _gcc(*arguments: str | Path) -> None:
    _run("gcc", "-fPIC", "-w", *arguments)


def _run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


# ------------------------------------------------------------------------------------------------------------- kernels


def kernels_for(capability: tuple[int, int], flags: str) -> int:
    """Return the kernels that a device runs (75 for sm_75): of its generation's, those for the highest capability not above it.

    Args:
        capability: The compute capability of the device.
        flags: What `torch._C._cuda_getArchFlags()` returns, such as "sm_80 sm_90".

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

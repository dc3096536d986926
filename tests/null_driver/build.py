"""Builds the null driver: runtime.c, and a function that returns success for everything else that PyTorch calls.

    python -m tests.null_driver.build FOLDER GPU

prints the environment in which PyTorch finds it; GPU is a key of the catalogue.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch

from sizer.catalogue.hardware import HARDWARE, Hardware

SOURCE = Path(__file__).with_name("runtime.c")
_PACKAGES = Path(torch.__file__).parent.parent
_HEADERS = _PACKAGES / "nvidia" / "cu13" / "include"
_CUDNN_HEADERS = _PACKAGES / "nvidia" / "cudnn" / "include"
_CALLERS = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so", "libcaffe2_nvrtc.so")

# What is answered: the runtime, the driver (not its private interfaces), cuBLAS, and what runs on a handle of cuDNN.
_ANSWERED = re.compile(
    r"(__)?cuda[A-Z]|cublas|cu(?!File|GetProcAddress|GetExportTable)[A-Z]"
    r"|cudnn(BatchNormalization|RNN|CTCLoss|SpatialTf|Set(Restore)?DropoutDescriptor)"
)
_DECLARED = re.compile(r"^CUresult CUDAAPI\s+(cu[A-Z]\w+)\(", re.MULTILINE)

# What NVIDIA's headers take from their compiler's own package, as plain C sees it.
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

# The management library, which expandable segments ask for NVLink and fabric: it knows the device and supports nothing (3).
_NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **out) { *out = 0; return 0; }
int nvmlDeviceGetHandleByUUID(const char *id, void **out) { *out = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void) { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void) { return 3; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void) { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(void) { return 3; }
"""


def build(folder: Path, device: Hardware, *, management: bool = False) -> dict[str, str]:
    """The environment in which `import torch` finds the null driver of a device, built into a folder.

    Needs gcc, binutils and a CUDA build of PyTorch with NVIDIA's headers beside it. `management` adds the management library,
    without which expandable segments do not start. Raises subprocess.CalledProcessError where the compiler refuses, ValueError
    where this PyTorch has no kernels for the device.
    """
    (folder / "device.h").write_text(_device_header(device))
    (folder / "crt").mkdir(exist_ok=True)
    (folder / "crt" / "host_defines.h").write_text(_HOST_DEFINES)
    (folder / "nv").mkdir(exist_ok=True)
    (folder / "nv" / "target").write_text(
        ""
    )  # of CCCL, which older builds bring no headers of; plain C uses none of it
    compiled, runtime = folder / "runtime.o", folder / "libcudart.so.13"
    includes = [f"-I{place}" for place in (folder, _HEADERS, _CUDNN_HEADERS)]
    _compile("-c", "-O2", *includes, SOURCE, "-o", compiled)
    stubs = folder / "stubs.c"
    stubs.write_text(_stubs(_symbols("--defined-only", compiled)))
    _compile("-shared", stubs, compiled, "-Wl,-soname,libcudart.so.13", "-lpthread", "-o", runtime)
    _compile("-shared", "-Wl,--no-as-needed,-soname,libcuda.so.1", runtime, "-o", folder / "libcuda.so.1")
    if management:
        (folder / "nvml.c").write_text(_NVML)
        _compile("-shared", folder / "nvml.c", "-Wl,-soname,libnvidia-ml.so.1", "-o", folder / "libnvidia-ml.so.1")
    return {"LD_PRELOAD": str(runtime), "LD_LIBRARY_PATH": str(folder)}


def _device_header(device: Hardware) -> str:
    """The C header that runtime.c is compiled with."""
    numbers = {
        "major": device.capability[0],
        "minor": device.capability[1],
        "compiled": _compiled_for(device.capability),
        "processors": device.processors,
        "threads": device.threads,
        "blocks": device.blocks,
        "shared_kib": device.shared_kib,
        "reserved_kib": device.reserved_kib,
        "l2_kib": device.l2_kib,
    }
    values = [*map(str, numbers.values()), f"(size_t){device.gpu.total_bytes}", json.dumps(device.name)]
    values.append(json.dumps(json.dumps(device.as_cudnn())))
    return (
        f"static const struct {{ int {', '.join(numbers)}; size_t total; const char *name, *json; }}"
        f" device = {{{', '.join(values)}}};\n"
    )


def _compiled_for(capability: tuple[int, int]) -> int:
    """The kernels of this PyTorch that the device runs: of its generation's, those for the highest capability not above it."""
    built = [int(name.removeprefix("sm_")) for name in torch._C._cuda_getArchFlags().split() if name.startswith("sm_")]
    fitting = [arch for arch in built if arch // 10 == capability[0] and arch % 10 <= capability[1]]
    if not fitting:
        raise ValueError(
            f"this PyTorch has no kernels for capability {capability}; it has {built}: take another device"
        )
    return max(fitting)


def _stubs(defined: set[str]) -> str:
    """C functions that return success for what is called and not defined, and the table of the driver's functions by name."""
    called = set().union(*(_symbols("--undefined-only", _PACKAGES / "torch" / "lib" / name, "-D") for name in _CALLERS))
    called |= _symbols("--defined-only", _PACKAGES / "nvidia" / "cu13" / "lib" / "libcudart.so.13", "-D")
    declared = set(_DECLARED.findall((_HEADERS / "cuda.h").read_text()))
    called |= declared | {re.sub(r"_v\d+$", "", name) for name in declared}
    missing = sorted(name for name in called - defined if _ANSWERED.match(name))
    drivers = sorted(name for name in (*defined, *missing) if re.match(r"cu[A-Z]", name))
    return "\n".join(
        (
            *(f"int {name}(void) {{ return 0; }}" for name in missing),
            *(f"extern int {name}();" for name in drivers if name in defined),
            "struct entry { const char *name; void *function; };",
            "const struct entry null_entries[] = {",
            *(f'    {{"{name}", (void *){name}}},' for name in drivers),
            "    {0, 0}};\n",
        )
    )


def _symbols(which: str, library: Path, *options: str) -> set[str]:
    listed = _run("nm", which, *options, library).splitlines()
    return {line.split()[-1].partition("@")[0] for line in listed if line}


def _compile(*arguments: str | Path) -> None:
    _run("gcc", "-fPIC", "-w", *arguments)


def _run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    place = Path(sys.argv[1]).resolve()
    place.mkdir(exist_ok=True)
    print(" ".join(f"{name}={value}" for name, value in build(place, HARDWARE[sys.argv[2]]).items()))

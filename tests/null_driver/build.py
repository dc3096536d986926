"""Builds the null driver: runtime.c, and a function that returns success for everything else that PyTorch calls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("runtime.c")
_LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so", "libcaffe2_nvrtc.so")
_ANSWERED = re.compile(r"(__)?cuda[A-Z]|cublas|cu(?!File|GetProcAddress|GetExportTable)[A-Z]|cudnn(BatchNormalization|RNN|CTCLoss|Set(Restore)?DropoutDescriptor)")
_DECLARED = re.compile(r"^CUresult CUDAAPI\s+(cu[A-Z]\w+)\(", re.MULTILINE)


# What NVIDIA's headers take from their compiler's own package, as plain C sees it.
_HOST_DEFINES = "".join(
    f"#define {name}\n" for name in
    ("CUDARTAPI", "CUDARTAPI_CDECL", "CUDART_CB", "__host__", "__device__", "__cudart_builtin__", "__device_builtin__",
     "__device_builtin_surface_type__", "__device_builtin_texture_type__", "__location__(a)")
) + "#define __align__(a) __attribute__((aligned(a)))\n#define __builtin_align__(a) __align__(a)\n#define __annotate__(a)\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a device tells of itself: sizes in the units of its data sheet; clocks in kHz, which cuDNN's heuristics may use."""

    name: str
    capability: tuple[int, int]
    total_mib: int
    processors: int
    threads: int  # per multiprocessor
    shared_kib: int  # per multiprocessor
    l2_kib: int
    clock_khz: int
    memory_khz: int

    def as_header(self) -> str:
        """The C header that runtime.c is compiled with."""
        numbers = [*self.capability, self.processors, self.threads, self.shared_kib, self.l2_kib]
        text = json.dumps(json.dumps(self.as_cudnn()))
        return (
            "static const struct { int major, minor, processors, threads, shared_kib, l2_kib; size_t total; const char *name, *json; }"
            f" device = {{{', '.join(map(str, numbers))}, (size_t){self.total_mib} << 20, {json.dumps(self.name)}, {text}}};\n"
        )

    def as_cudnn(self) -> dict[str, object]:
        """The JSON of cuDNN's device property descriptor (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION)."""
        major, minor = self.capability
        return {
            "cudaDeviceId": 0, "deviceName": self.name, "deviceVer": major * 100 + minor * 10, "driverVer": 13000,
            "multiProcessorCount": self.processors, "smCountOrigin": 0, "totalGlobalMem": self.total_mib << 20,
            "maxGridSize": [2**31 - 1, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": self.threads, "maxCtasPerSM": 32 if self.threads > 1536 else 24, "warpSize": 32,
            "regsPerBlock": 65536, "maxRegistersPerSM": 65536, "maxSharedMemoryPerBlock": 48 * 1024,
            "maxSharedMemoryPerBlockOptin": (self.shared_kib - 1) * 1024, "reservedSharedMemoryPerBlock": 1024,
            "oversizedSharedMemoryPerBlock": 0, "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1,
            "smClockRateKHz": self.clock_khz, "memClockRateKHz": self.memory_khz, "l2CacheSize": self.l2_kib * 1024,
        }  # fmt: skip


def _device(*row: object) -> Device:
    names = ("name", "capability", "total_mib", "processors", "threads", "shared_kib", "l2_kib", "clock_khz", "memory_khz")
    return Device(**dict(zip(names, row, strict=True)))


# NVIDIA's data sheets and architecture white papers; totals as in the catalogue of sizer.memory.gpus.
DEVICES = {
    "t4": _device("Tesla T4", (7, 5), 14910, 40, 1024, 64, 4096, 1590000, 5001000),
    "v100-16gb": _device("Tesla V100-SXM2-16GB", (7, 0), 16130, 80, 2048, 96, 6144, 1530000, 877000),
    "a100-80gb": _device("NVIDIA A100-SXM4-80GB", (8, 0), 81038, 108, 2048, 164, 40960, 1410000, 1593000),
    "rtx-3090": _device("NVIDIA GeForce RTX 3090", (8, 6), 24136, 82, 1536, 100, 6144, 1695000, 9751000),
    "rtx-4090": _device("NVIDIA GeForce RTX 4090", (8, 9), 24095, 128, 1536, 100, 73728, 2520000, 10501000),
    "h100-80gb": _device("NVIDIA H100 80GB HBM3", (9, 0), 81082, 132, 2048, 228, 51200, 1980000, 2619000),
    "b200": _device("NVIDIA B200", (10, 0), 182631, 148, 2048, 228, 129536, 1965000, 3996000),
}


def build(folder: Path, device: Device) -> dict[str, str]:
    """The environment in which `import torch` finds the null driver, built into a folder.

    Needs a C compiler, binutils and a CUDA build of PyTorch with NVIDIA's headers beside it. Raises
    subprocess.CalledProcessError where the compiler refuses.
    """
    packages = Path(torch.__file__).parent.parent
    headers = packages / "nvidia" / "cu13" / "include"
    (folder / "device.h").write_text(device.as_header())
    (folder / "crt").mkdir(exist_ok=True)
    (folder / "crt" / "host_defines.h").write_text(_HOST_DEFINES)
    objects, runtime = folder / "runtime.o", folder / "libcudart.so.13"
    _run("gcc", "-c", "-O1", "-fPIC", "-w", f"-I{folder}", f"-I{headers}", f"-I{packages / 'nvidia' / 'cudnn' / 'include'}", str(SOURCE), "-o", str(objects))
    defined = _symbols("--defined-only", objects)
    called = set().union(*(_symbols("--undefined-only", packages / "torch" / "lib" / name, "-D") for name in _LIBRARIES))
    runtimes = _symbols("--defined-only", packages / "nvidia" / "cu13" / "lib" / "libcudart.so.13", "-D")
    drivers = set(_DECLARED.findall((headers / "cuda.h").read_text()))
    drivers |= {re.sub(r"_v\d+$", "", name) for name in drivers}
    missing = sorted(name for name in called | runtimes | drivers if _ANSWERED.match(name) and name not in defined)
    drivers = sorted(name for name in (*defined, *missing) if re.match(r"cu[A-Z]", name))
    stubs = folder / "stubs.c"
    stubs.write_text(
        "".join(f"int {name}(void) {{ return 0; }}\n" for name in missing)
        + "".join(f"extern int {name}();\n" for name in drivers if name in defined)
        + "struct entry { const char *name; void *function; };\nconst struct entry null_entries[] = {\n"
        + "".join(f'    {{"{name}", (void *){name}}},\n' for name in drivers)
        + "    {0, 0}};\n"
    )
    _run("gcc", "-shared", "-fPIC", "-O1", "-w", str(stubs), str(objects), "-Wl,-soname,libcudart.so.13", "-lpthread", "-o", str(runtime))
    _run("gcc", "-shared", "-Wl,--no-as-needed,-soname,libcuda.so.1", str(runtime), "-o", str(folder / "libcuda.so.1"))
    return {"LD_PRELOAD": str(runtime), "LD_LIBRARY_PATH": str(folder)}


def _symbols(which: str, library: Path, *options: str) -> set[str]:
    lines = _run("nm", which, *options, str(library)).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line}


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(exist_ok=True)
    print(build(folder, DEVICES[sys.argv[2]]))

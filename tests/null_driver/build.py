"""Builds the null driver: runtime.c, and a function that returns success for everything else that PyTorch calls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch

from sizer.memory.hardware import HARDWARE, Hardware

SOURCE = Path(__file__).with_name("runtime.c")
_LIBRARIES = (
    "libc10_cuda.so",
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libtorch_python.so",
    "libcaffe2_nvrtc.so",
)
_ANSWERED = re.compile(
    r"(__)?cuda[A-Z]|cublas|cu(?!File|GetProcAddress|GetExportTable)[A-Z]"
    r"|cudnn(BatchNormalization|RNN|CTCLoss|Set(Restore)?DropoutDescriptor)"
)
_DECLARED = re.compile(r"^CUresult CUDAAPI\s+(cu[A-Z]\w+)\(", re.MULTILINE)


# What NVIDIA's headers take from their compiler's own package, as plain C sees it.
_HOST_DEFINES = (
    "".join(
        f"#define {name}\n"
        for name in (
            "CUDARTAPI",
            "CUDARTAPI_CDECL",
            "CUDART_CB",
            "__host__",
            "__device__",
            "__cudart_builtin__",
            "__device_builtin__",
            "__device_builtin_surface_type__",
            "__device_builtin_texture_type__",
            "__location__(a)",
        )
    )
    + "#define __align__(a) __attribute__((aligned(a)))\n#define __builtin_align__(a) __align__(a)\n#define __annotate__(a)\n"
)


def header(device: Hardware) -> str:
    """The C header that runtime.c is compiled with."""
    numbers = [
        *device.capability, device.processors, device.threads, device.blocks, device.shared_kib, device.reserved_kib, device.l2_kib,
    ]  # fmt: skip
    text = json.dumps(json.dumps(device.as_cudnn()))
    return (
        "static const struct { int major, minor, processors, threads, blocks, shared_kib, reserved_kib, l2_kib; size_t total;"
        f" const char *name, *json; }} device = {{{', '.join(map(str, numbers))}, (size_t){device.gpu.total_bytes},"
        f" {json.dumps(device.name)}, {text}}};\n"
    )


def build(folder: Path, device: Hardware) -> dict[str, str]:
    """The environment in which `import torch` finds the null driver, built into a folder.

    Needs a C compiler, binutils and a CUDA build of PyTorch with NVIDIA's headers beside it. Raises
    subprocess.CalledProcessError where the compiler refuses.
    """
    packages = Path(torch.__file__).parent.parent
    headers = packages / "nvidia" / "cu13" / "include"
    (folder / "device.h").write_text(header(device))
    (folder / "crt").mkdir(exist_ok=True)
    (folder / "crt" / "host_defines.h").write_text(_HOST_DEFINES)
    objects, runtime = folder / "runtime.o", folder / "libcudart.so.13"
    _run(
        "gcc",
        "-c",
        "-O1",
        "-fPIC",
        "-w",
        f"-I{folder}",
        f"-I{headers}",
        f"-I{packages / 'nvidia' / 'cudnn' / 'include'}",
        str(SOURCE),
        "-o",
        str(objects),
    )
    defined = _symbols("--defined-only", objects)
    called = set().union(
        *(_symbols("--undefined-only", packages / "torch" / "lib" / name, "-D") for name in _LIBRARIES)
    )
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
    _run(
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        str(stubs),
        str(objects),
        "-Wl,-soname,libcudart.so.13",
        "-lpthread",
        "-o",
        str(runtime),
    )
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
    print(build(folder, HARDWARE[sys.argv[2]]))

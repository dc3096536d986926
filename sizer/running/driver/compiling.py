"""Compile the null driver with gcc, nm and NVIDIA's headers, which the CUDA builds of PyTorch bring along. No torch.

The libraries are runtime.c and nccl.c with a function that returns success for everything else that PyTorch calls, and nvml.c.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sizer.running.driver.libraries import null_libraries

SOURCES = Path(__file__).parent
_FILES = ("runtime.c", "nccl.c", "nvml.c", "device.h", "libraries.py", Path(__file__).name)
RUNTIME, DRIVER, NVML = LIBRARIES = ("libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1")
_CALLERS = (
    "libc10_cuda.so",
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libtorch_python.so",
    "libcaffe2_nvrtc.so",
)

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


def sources_digest() -> str:
    """Return the digest of all that the libraries are made from but PyTorch."""
    sources = hashlib.blake2b(digest_size=6)
    for name in _FILES:
        sources.update((SOURCES / name).read_bytes())
    return sources.hexdigest()


def build(folder: Path, *pytorches: PyTorch) -> None:
    """Compile the libraries into a folder, for all of some PyTorches. The headers are those of the first.

    Raises subprocess.CalledProcessError if gcc or nm refuses.
    """
    headers = pytorches[0].headers
    called = set().union(*map(called_by, pytorches))
    for name, text in _SHIMS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    includes = [f"-I{place}" for place in (folder, SOURCES, *headers)]
    objects = [folder / f"{name}.o" for name in ("runtime", "nccl")]
    for compiled in objects:
        _gcc("-c", "-O2", *includes, SOURCES / f"{compiled.stem}.c", "-o", compiled)
    generated, runtime = folder / "libraries.c", folder / RUNTIME
    generated.write_text(null_libraries(called, headers[0]))
    objects.append(folder / "libraries.o")
    _gcc("-c", "-O2", *includes, generated, "-o", objects[-1])
    stubs = folder / "stubs.c"
    stubs.write_text(_stubs(set().union(*(symbols_of("--defined-only", one) for one in objects)), called, headers[0]))
    _gcc("-shared", stubs, *objects, f"-Wl,-soname,{RUNTIME}", "-lpthread", "-ldl", "-o", runtime)
    _gcc("-shared", f"-Wl,--no-as-needed,-soname,{DRIVER}", runtime, "-o", folder / DRIVER)
    _gcc("-shared", SOURCES / "nvml.c", runtime, f"-Wl,-soname,{NVML}", "-o", folder / NVML)


def _stubs(defined: set[str], called: set[str], headers: Path) -> str:
    """C functions that return success for what is called and not defined, and the table of the driver's functions by name."""
    called = called | symbols_of("--defined-only", headers.parent / "lib" / RUNTIME, "-D")
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


def called_by(pytorch: PyTorch) -> set[str]:
    """Return the functions that PyTorch's own libraries call."""
    libraries = pytorch.folder / "lib"
    return set().union(*(symbols_of("--undefined-only", libraries / name, "-D") for name in _CALLERS))


def symbols_of(which: str, library: Path, *options: str) -> set[str]:
    """Return the symbols of a library that nm lists with an option, without their versions."""
    listed = _run("nm", which, *options, library).splitlines()
    return {line.split()[-1].partition("@")[0] for line in listed if line}


def _gcc(*arguments: str | Path) -> None:
    _run("gcc", "-fPIC", "-w", *arguments)


def _run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout

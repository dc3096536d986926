"""Inductor's wrapper code, kept in memory and run on meta tensors, and kernels that compute nothing."""

from __future__ import annotations

import io
from types import ModuleType
from typing import Any

import torch

_META = torch.device("meta")
# What the wrapper says of the device (torch/_inductor/codegen/wrapper.py, codegen_device), and what its kernels import.
_DEVICE, _IMPORTS = "device(type='cuda', index=0)", "\nimport triton\nimport triton.language as tl\n"


class Kernel:
    """Stand in for a compiled Triton kernel: it computes nothing and allocates nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch nothing."""

    __call__ = run


def triton_kernel(compiler: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Kernel:
    """Stand in for AsyncCompile.triton."""
    return Kernel(kernel_name)


def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Stand in for `empty_strided_cuda`, which allocates all buffers of Inductor's wrapper."""
    return torch.empty_strided(size, stride, dtype=dtype, device=_META)


class Sources:
    """Stand in for PyCodeCache: modules by the hash of their source, in memory. `wrappers` is the code that was run, in order."""

    def __init__(self) -> None:
        self.wrappers: list[str] = []
        self._texts: dict[str, str] = {}

    def write(self, source: str, extra: str = "") -> tuple[str, str]:
        """Return the key and the path of a source; nothing is written."""
        from torch._inductor.codecache import get_hash

        key = get_hash(source, extra)
        self._texts[f"{key}.py"] = source
        return key, f"{key}.py"

    def load(self, source: str, extra: str = "", **options: Any) -> ModuleType:
        """Return the module of a source."""
        return self.load_by_key_path(*self.write(source, extra))

    def load_by_key_path(
        self, key: str, path: str, linemap: Any = None, attrs: Any = None, **options: Any
    ) -> ModuleType:
        """Return the module of a source that was written, with further attributes."""
        source, module = self._texts[path], ModuleType(f"inductor.{key}")
        module.__file__, module.__dict__["key"] = path, key
        if "def call(" in source:
            self.wrappers.append(source)
        elif "@triton.jit" in source:  # a template's kernel, which Inductor names and does not call
            return module
        code = source.replace(_DEVICE, "device(type='meta')").replace(_IMPORTS, "\n")
        exec(compile(code, path, "exec", dont_inherit=True), module.__dict__)
        vars(module).update(attrs or {})
        return module

    def open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Open a source that was written, else a file."""
        return io.StringIO(self._texts[path]) if path in self._texts else open(path, *args, **kwargs)

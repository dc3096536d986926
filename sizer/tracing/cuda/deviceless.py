"""Replacements for the driver and cuBLASLt that cuDNN loads, while it is queried for a described device.

cuDNN loads two libraries at run time. cuBLASLt multiplies matrices for some of its engines. The driver is needed for engines
that are compiled at run time. Without a driver both fail, and these engines silently leave its list; on a real device they
often come first. So cuDNN's imports of `dlopen` and `dlsym` are replaced (interposed) by functions of this module:

* `cublasLtCreate` and `cublasLtMatmulAlgoGetHeuristic` are answered here. cuBLASLt's own functions describe the product
  (layouts, preferences); they need no device.
* a driver that cannot be loaded is replaced by one without any function: enough for cuDNN to name the engines that it would
  compile and their workspaces. Nothing is compiled.

This holds only within `Interposer.described`: all other calls of the process, including the work of a real device, reach the
real functions.

Imported functions of a loaded shared library are replaced for that library only. A library calls its imports through a table of
addresses (the procedure linkage table, ELF gABI chapter 5). Writing another address there changes the calls of that library
only. It needs neither a compiler nor a file, and lasts for the process. This requires Linux on 64 bits with the GNU C library,
which uses `struct link_map` as handles of libraries (link.h).

The answers model cuBLASLt's algorithms of a matrix product (cublasLtMatmulAlgoGetHeuristic). cuDNN's engines for 1x1
convolutions and Winograd's transforms multiply through cuBLASLt. They are left out of its list if cuBLASLt offers no algorithm.
Without a driver cublasLtCreate fails, so the library itself cannot be queried; its documentation says which products it
supports. As of cuBLAS 12.6 to 13.4 (cublasLtMatmul, "supported data types"; enumerations of library_types.h and cublas_api.h).

*Known limitations*: the library itself chooses an algorithm's workspace. It is assumed to be none, as for algorithms that do
not split the inner dimension; other algorithms hold copies of the product, up to cuDNN's limit.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# cudaDataType_t, cublasComputeType_t
FLOAT32, FLOAT16, BFLOAT16 = 0, 2, 14
COMPUTE_16, COMPUTE_32, COMPUTE_32_TF32 = 64, 68, 77

# Types of the operands and of the result, and the lowest capability that computes their product in float32. cuDNN requests TF32
# depending on the first device of a process, whatever the operands' type. It also puts these engines first for half precision, so
# TF32 counts as a permission and refuses nothing.
_SUPPORTED = {
    (FLOAT32, FLOAT32): (5, 0),
    (FLOAT16, FLOAT16): (5, 0),
    (FLOAT16, FLOAT32): (5, 0),
    (BFLOAT16, BFLOAT16): (8, 0),
    (BFLOAT16, FLOAT32): (8, 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Types of a matrix product by their numbers: for computing, of its operands and of its result."""

    compute: int
    operand: int
    result: int


def workspace_bytes(product: Product, capability: tuple[int, int]) -> int | None:
    """Return the workspace of the first algorithm for a device of this capability; None if there is none."""
    if product.compute == COMPUTE_16:
        least = (5, 3) if product.operand == product.result == FLOAT16 else None
    elif product.compute in (COMPUTE_32, COMPUTE_32_TF32):
        least = _SUPPORTED.get((product.operand, product.result))
    else:
        least = None
    return None if least is None or capability < least else 0


# ------------------------------------------------------------------------------------------------------------- linkage


# elf.h: entries of the dynamic section
_END, _TABLE_BYTES, _STRINGS, _SYMBOLS, _TABLE, _RUN_PATH = 0, 2, 5, 6, 23, 29
_SYMBOL_BYTES = 24  # sizeof(Elf64_Sym), which begins with the offset of the name among the strings


class NoImportError(Exception):
    """The library does not import the function, or this platform has no such table."""


class _LinkMap(ctypes.Structure):
    _fields_ = (("address", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_void_p))


class _Dynamic(ctypes.Structure):
    _fields_ = (("tag", ctypes.c_int64), ("value", ctypes.c_uint64))


class _Relocation(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("info", ctypes.c_uint64), ("addend", ctypes.c_int64))


def replace_import(library: ctypes.CDLL, name: str, function: Any) -> None:
    """Make a library call `function` instead of its import `name`. Raises NoImportError.

    `function` has a ctypes prototype. The caller keeps it alive as long as the process lives.
    """
    found = list(_slots(library, name.encode()))
    if not found:
        raise NoImportError(f"{library._name} imports no {name}")
    for slot in found:
        slot.value = ctypes.cast(function, ctypes.c_void_p).value


def run_path(library: ctypes.CDLL) -> list[Path]:
    """Return the folders in which a library searches the libraries that it loads (DT_RUNPATH). Raises NoImportError."""
    link_map, entries = _read_words(library)
    if _RUN_PATH not in entries:
        return []
    text = ctypes.string_at(entries[_STRINGS] + entries[_RUN_PATH]).decode()
    origin = str(Path(link_map.name.decode()).parent)
    return [Path(folder.replace("$ORIGIN", origin)) for folder in text.split(":")]


def _slots(library: ctypes.CDLL, name: bytes) -> Iterator[ctypes.c_void_p]:
    """Yield the table's entries for a function."""
    link_map, entries = _read_words(library)
    count = entries.get(_TABLE_BYTES, 0) // ctypes.sizeof(_Relocation)
    for relocation in (_Relocation * count).from_address(entries[_TABLE]) if count else ():
        symbol = entries[_SYMBOLS] + _SYMBOL_BYTES * (relocation.info >> 32)
        if ctypes.string_at(entries[_STRINGS] + ctypes.c_uint32.from_address(symbol).value) == name:
            yield ctypes.c_void_p.from_address(link_map.address + relocation.offset)


def _read_words(library: ctypes.CDLL) -> tuple[_LinkMap, dict[int, int]]:
    """Return a loaded library's base address and its dynamic section's entries, which the GNU C library has made addresses."""
    if sys.platform != "linux" or sys.maxsize < 2**32 or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        raise NoImportError("only Linux on 64 bits with the GNU C library has the tables that are read here")
    link_map = _LinkMap.from_address(library._handle)
    entries: dict[int, int] = {}
    place = link_map.dynamic
    while (entry := _Dynamic.from_address(place)).tag != _END:
        entries[entry.tag] = entry.value
        place += ctypes.sizeof(_Dynamic)
    return link_map, entries


# ---------------------------------------------------------------------------------------------------------- deviceless


# Libraries of cuDNN that load cuBLASLt and the driver.
_ENGINES = ("libcudnn_engines_precompiled.so.9", "libcudnn_engines_runtime_compiled.so.9")
_GRAPH = "libcudnn_graph.so.9"
_DRIVER = "libcuda.so"
_LATEST_DRIVER = 13000

_SUCCESS, _NOT_SUPPORTED, _NO_DEVICE = 0, 15, 100  # cublasStatus_t, CUresult

# cublasLt.h: attributes of descriptions, cublasLtMatmulHeuristicResult_t
_LAYOUT_TYPE = _COMPUTE_TYPE = 0


class _Algorithm(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


_Open = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)
_Find = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_Create = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
_Heuristic = ctypes.CFUNCTYPE(
    ctypes.c_int, *[ctypes.c_void_p] * 7, ctypes.c_int, ctypes.POINTER(_Algorithm), ctypes.POINTER(ctypes.c_int)
)
_Version = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
_Refuse = ctypes.CFUNCTYPE(ctypes.c_int)


class _Thread(threading.local):
    """Capability of the device that a thread queries, None for the real device."""

    capability: tuple[int, int] | None = None


class Described:
    """Context within which its thread queries a described device."""

    def __init__(self, thread: _Thread, capability: tuple[int, int]) -> None:
        self._thread, self._capability = thread, capability

    def __enter__(self) -> None:
        self._before, self._thread.capability = self._thread.capability, self._capability

    def __exit__(self, *_: object) -> None:
        self._thread.capability = self._before


class Interposer:
    """Functions that cuDNN finds; they must stay alive as long as the process does."""

    def __init__(self, folder: Path) -> None:
        """Replace the loader's functions in cuDNN's libraries in `folder`. Raises NoImportError, OSError."""
        self._thread = _Thread()
        self._product_queries = 0
        process = ctypes.CDLL(None)
        self._real_open, self._real_find = process.dlopen, process.dlsym
        self._real_open.restype = self._real_find.restype = ctypes.c_void_p
        self._real_open.argtypes, self._real_find.argtypes = (
            (ctypes.c_char_p, ctypes.c_int),
            (ctypes.c_void_p, ctypes.c_char_p),
        )
        libraries = [ctypes.CDLL(str(folder / name)) for name in (_GRAPH, *_ENGINES)]
        self._folders = run_path(libraries[1])
        self._memory = ctypes.create_string_buffer(2**16)  # target of handles; cuDNN never reads it
        self._driver = ctypes.addressof(self._memory)
        self._multiply: Any = None
        self._real: dict[bytes, Any] = {}
        self._functions = {
            b"cublasLtCreate": _Create(self._create),
            b"cublasLtMatmulAlgoGetHeuristic": _Heuristic(self._offer),
        }
        self._drivers = {b"cuDriverGetVersion": _Version(self._driver_version)}
        self._refuse = _Refuse(lambda: _NO_DEVICE)
        self._open_here, self._find_here = _Open(self._open), _Find(self._find)
        for library in libraries:
            replace_import(library, "dlopen", self._open_here)
            replace_import(library, "dlsym", self._find_here)

    def described(self, capability: tuple[int, int]) -> Described:
        """Make this thread's calls within the context refer to a described device of this capability."""
        return Described(self._thread, capability)

    @property
    def product_queries(self) -> int:
        """Return the number of cuDNN's queries for algorithms of a product."""
        return self._product_queries

    def _is_described(self) -> bool:
        return self._thread.capability is not None

    def _open(self, name: bytes | None, flags: int) -> int | None:
        """Run the real dlopen, also with the folders of the caller's run path, which dlopen does not see from here."""
        found = self._real_open(name, flags)
        if found or not name or b"/" in name:
            return found
        if name.startswith(_DRIVER.encode()):
            return self._driver if self._is_described() else None
        paths = (str(folder / name.decode()).encode() for folder in self._folders)
        return next(filter(None, (self._real_open(path, flags) for path in paths)), None)

    def _find(self, library: int | None, name: bytes) -> int | None:
        """Return the replacement of a function, else the result of the real dlsym."""
        if library == self._driver:
            return ctypes.cast(self._drivers.get(name, self._refuse), ctypes.c_void_p).value
        found = self._real_find(library, name)
        if not found or name not in self._functions:
            return found
        kind = _Create if name == b"cublasLtCreate" else _Heuristic
        self._real[name] = kind(found)
        self._multiply = self._multiply or _described_products(library)
        return ctypes.cast(self._functions[name], ctypes.c_void_p).value

    def _driver_version(self, version: Any) -> int:
        version[0] = _LATEST_DRIVER
        return _SUCCESS

    def _create(self, handle: Any) -> int:
        """Return a handle from cublasLtCreate that only `_offer` can use."""
        if not self._is_described():
            return self._real[b"cublasLtCreate"](handle)
        handle[0] = ctypes.addressof(self._memory)
        return _SUCCESS

    def _offer(self, handle, operation, a, b, c, d, preference, count, algorithms, found) -> int:
        """Return one algorithm, or none, from cublasLtMatmulAlgoGetHeuristic."""
        if (capability := self._thread.capability) is None:
            real = self._real[b"cublasLtMatmulAlgoGetHeuristic"]
            return real(handle, operation, a, b, c, d, preference, count, algorithms, found)
        self._product_queries += 1
        layout = self._multiply.cublasLtMatrixLayoutGetAttribute
        product = Product(
            compute=_read(self._multiply.cublasLtMatmulDescGetAttribute, operation, _COMPUTE_TYPE),
            operand=_read(layout, a, _LAYOUT_TYPE),
            result=_read(layout, d, _LAYOUT_TYPE),
        )
        workspace = workspace_bytes(product, capability)
        found[0] = int(workspace is not None)
        if workspace is None:
            return _NOT_SUPPORTED
        algorithms[0] = _Algorithm(workspace=workspace)
        return _SUCCESS


def _described_products(library: int | None) -> ctypes.PyDLL:
    """Return cuBLASLt by its handle, for functions that read descriptions; they are too short to release the GIL."""
    found = ctypes.PyDLL(None, handle=library)
    for read in (found.cublasLtMatmulDescGetAttribute, found.cublasLtMatrixLayoutGetAttribute):
        read.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return found


def _read(function: Any, description: int, attribute: int) -> int:
    """Return a 32-bit attribute of a description of cuBLASLt; -1, an unsupported value, if it is missing."""
    value = ctypes.c_int32()
    return -1 if function(description, attribute, ctypes.byref(value), ctypes.sizeof(value), None) else value.value


@functools.cache  # cached for the process, as cuDNN keeps the functions that it found
def install(folder: Path) -> Interposer | str:
    """Return the interposer for the cuDNN in a folder, or in words why it cannot be installed."""
    try:
        return Interposer(folder)
    except (NoImportError, OSError) as error:
        return str(error)

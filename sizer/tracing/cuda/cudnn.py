"""cuDNN's own heuristics, asked for a described device: the graph API of the installed library, without a GPU or a driver.

Since version 9.8 the library takes a device as JSON where it would take a handle ("deviceless ahead-of-time compilation"),
and answers with the engines in its order and the workspace of each. Numbers are those of cudnn_graph.h. What it would look for
on a machine with a driver it finds in `sizer.tracing.cuda.deviceless`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from sizer.catalogue.hardware import Hardware
from sizer.tracing.cuda import deviceless

OLDEST = 90800
_NAME = "libcudnn.so.9"

# cudnnBackendDescriptorType_t
ENGINE, ENGINE_CONFIG, HEURISTICS, GRAPH, TENSOR, DEVICE = 2, 3, 4, 15, 17, 38
# cudnnBackendAttributeType_t
_DATA_TYPE, _INT64, _FLOAT, _HEURISTIC_MODE, _NUMERICAL_NOTE, _DESCRIPTOR, _CHAR = 1, 3, 4, 8, 11, 15, 24
# cudnnBackendAttributeName_t
_HEURISTICS_MODE, _HEURISTICS_GRAPH, _HEURISTICS_RESULTS, _HEURISTICS_DEVICE = 200, 201, 202, 204
_CONFIG_ENGINE, _CONFIG_WORKSPACE = 300, 303
_GRAPH_OPERATIONS, _DEVICE_JSON = 801, 2702
_TENSOR_ALIGNMENT, _TENSOR_TYPE, _TENSOR_SIZES, _TENSOR_STRIDES, _TENSOR_ID = 900, 901, 902, 903, 906
_ENGINE_INDEX, _ENGINE_NOTES = 1301, 1303

DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
INSTANT, FALLBACK = 0, 2  # cudnnBackendHeurMode_t
TENSOR_CORE, DOWN_CONVERT, NONDETERMINISTIC = 0, 1, 4  # cudnnBackendNumericalNote_t
_NOTES = 10
_ONE, _MOST_NOTES = ctypes.c_int64(1), ctypes.c_int64(_NOTES)


class RefusedError(Exception):
    """cuDNN does not support what it was asked for."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(f"cuDNN refuses {what}: status {status}")


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
    """What stands for cuBLASLt and the driver where cuDNN looks for them, or why nothing does, in words."""
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
    """Where PyTorch's packages put the library: NVIDIA's own package, else beside PyTorch's libraries."""
    for package, inside in (("nvidia.cudnn", "lib"), ("torch", "lib")):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield Path(folder) / inside


class Descriptors:
    """cuDNN's backend descriptors, destroyed at the end of the `with` block; RefusedError is raised where cuDNN refuses one.

    Within the block cuDNN finds cuBLASLt and a driver as on a device of the given compute capability (`deviceless`).
    """

    def __init__(self, found: ctypes.CDLL, capability: tuple[int, int]) -> None:
        # one question is some 30 calls, and a table of devices asks tens of thousands
        self._create, self._finalize = found.cudnnBackendCreateDescriptor, found.cudnnBackendFinalize
        self._destroy = found.cudnnBackendDestroyDescriptor
        self._set_attribute, self._get_attribute = found.cudnnBackendSetAttribute, found.cudnnBackendGetAttribute
        self._made: list[ctypes.c_void_p] = []
        interposed = interposer()
        self._described: AbstractContextManager[None] = (
            nullcontext() if isinstance(interposed, str) else interposed.described(capability)
        )

    def __enter__(self) -> Descriptors:
        self._described.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in reversed(self._made):
            self._destroy(descriptor)
        self._made.clear()
        self._described.__exit__(None, None, None)

    def create(self, kind: int) -> ctypes.c_void_p:
        """A new descriptor, to be set and then finalized."""
        descriptor = ctypes.c_void_p()
        if status := self._create(kind, ctypes.byref(descriptor)):
            raise RefusedError(f"a descriptor of kind {kind}", status)
        self._made.append(descriptor)
        return descriptor

    def destroy(self, descriptor: ctypes.c_void_p) -> None:
        """Destroy one of these descriptors before the others."""
        self._made.remove(descriptor)
        self._destroy(descriptor)

    def finalize(self, descriptor: ctypes.c_void_p) -> ctypes.c_void_p:
        """The descriptor itself, checked by cuDNN."""
        if status := self._finalize(descriptor):
            raise RefusedError("a descriptor", status)
        return descriptor

    def set_integers(self, descriptor: ctypes.c_void_p, name: int, *values: int) -> None:
        """Set int64 values."""
        self._set(descriptor, name, _INT64, (ctypes.c_int64 * len(values))(*values), ctypes.c_int64(len(values)))

    def set_enum(self, descriptor: ctypes.c_void_p, name: int, kind: int, value: int) -> None:
        """Set a value of an enumeration."""
        self._set(descriptor, name, kind, _enum(value))

    def set_float(self, descriptor: ctypes.c_void_p, name: int, value: float) -> None:
        """Set a float."""
        self._set(descriptor, name, _FLOAT, _float(value))

    def set_descriptor(self, descriptor: ctypes.c_void_p, name: int, part: ctypes.c_void_p) -> None:
        """Set a descriptor that this one is made of."""
        self._set(descriptor, name, _DESCRIPTOR, ctypes.byref(part))

    def _set(
        self, descriptor: ctypes.c_void_p, name: int, kind: int, values: Any, count: ctypes.c_int64 = _ONE
    ) -> None:
        if status := self._set_attribute(descriptor, name, kind, count, values):
            raise RefusedError(f"attribute {name}", status)

    def _get(self, descriptor: ctypes.c_void_p, name: int, kind: int, values: Any, count: ctypes.c_int64 = _ONE) -> int:
        """Reads at most `count` values; how many there were to read."""
        found = ctypes.c_int64()
        if status := self._get_attribute(descriptor, name, kind, count, ctypes.byref(found), values):
            raise RefusedError(f"attribute {name}", status)
        return found.value

    def device(self, hardware: Hardware) -> ctypes.c_void_p:
        """A described device."""
        descriptor, text = self.create(DEVICE), json.dumps(hardware.as_cudnn()).encode()
        self._set(descriptor, _DEVICE_JSON, _CHAR, ctypes.create_string_buffer(text), ctypes.c_int64(len(text) + 1))
        return self.finalize(descriptor)

    def tensor(
        self, name: str, dtype: str, sizes: Sequence[int], strides: Sequence[int], alignment: int
    ) -> ctypes.c_void_p:
        """A tensor by a name of one letter; the alignment of its address in bytes."""
        descriptor = self.create(TENSOR)
        self.set_enum(descriptor, _TENSOR_TYPE, _DATA_TYPE, DATA_TYPES[dtype])
        self.set_integers(descriptor, _TENSOR_SIZES, *sizes)
        self.set_integers(descriptor, _TENSOR_STRIDES, *strides)
        self.set_integers(descriptor, _TENSOR_ID, ord(name))
        self.set_integers(descriptor, _TENSOR_ALIGNMENT, alignment)
        return self.finalize(descriptor)

    def graph(self, operation: ctypes.c_void_p) -> ctypes.c_void_p:
        """A graph of one operation."""
        descriptor = self.create(GRAPH)
        self.set_descriptor(descriptor, _GRAPH_OPERATIONS, operation)
        return self.finalize(descriptor)

    def configs(self, graph: ctypes.c_void_p, device: ctypes.c_void_p, mode: int) -> Iterator[ctypes.c_void_p]:
        """Engine configurations for a graph in the order in which the heuristics prefer them.

        They are read a few at a time: cuDNN makes each when it is read, and the first one serves nearly always.
        """
        heuristics = self.create(HEURISTICS)
        self.set_descriptor(heuristics, _HEURISTICS_GRAPH, graph)
        self.set_enum(heuristics, _HEURISTICS_MODE, _HEURISTIC_MODE, mode)
        self.set_descriptor(heuristics, _HEURISTICS_DEVICE, device)
        self.finalize(heuristics)
        count, given = 1, 0
        while True:
            made = [self.create(ENGINE_CONFIG) for _ in range(count)]
            read = (ctypes.c_void_p * count)(*[one.value for one in made])
            found = min(count, self._get(heuristics, _HEURISTICS_RESULTS, _DESCRIPTOR, read, ctypes.c_int64(count)))
            yield from made[given:found]
            if found < count:
                return
            count, given = count * 8, found

    def engine(self, config: ctypes.c_void_p) -> ctypes.c_void_p:
        """The engine of a configuration."""
        engine = self.create(ENGINE)
        self._get(config, _CONFIG_ENGINE, _DESCRIPTOR, ctypes.byref(engine))
        return engine

    def notes(self, engine: ctypes.c_void_p) -> list[int]:
        """The numerical notes of an engine."""
        notes = (ctypes.c_int * _NOTES)()
        return notes[: self._get(engine, _ENGINE_NOTES, _NUMERICAL_NOTE, notes, _MOST_NOTES)]

    def number(self, engine: ctypes.c_void_p) -> int:
        """The number of an engine."""
        number = ctypes.c_int64()
        self._get(engine, _ENGINE_INDEX, _INT64, ctypes.byref(number))
        return number.value

    def workspace(self, config: ctypes.c_void_p) -> int:
        """Bytes that a configuration works in, the same as its plan's, which would be compiled first. Raises RefusedError."""
        size = ctypes.c_int64()
        self._get(config, _CONFIG_WORKSPACE, _INT64, ctypes.byref(size))
        return size.value


@functools.cache
def _enum(value: int) -> Any:
    return ctypes.byref(ctypes.c_int(value))


@functools.cache
def _float(value: float) -> Any:
    return ctypes.byref(ctypes.c_float(value))

"""Descriptors of cuDNN's graph API, created, set and read in compiled code.

A table of devices makes tens of thousands of queries of some 40 calls each. All functions use an array of int64 that `begin`
creates: the addresses of the library's functions, space for arguments and results, and the created descriptors, which `destroy`
destroys. A descriptor is its address; 0 if cuDNN refuses it. Numbers are those of cudnn_graph.h.

Compiled code calls a shared library's functions by their addresses. Without Numba they are called through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from sizer.allocator.numba_functions import COMPILED, compiled_within

# Every argument is passed as 64 bits. A function with fewer or narrower arguments reads the beginning, as arguments are passed in
# registers (the calling conventions of Linux and macOS on x86-64 and AArch64).
_ARGUMENTS = 6

if COMPILED:
    from numba.core import types
    from numba.core.cgutils import ir
    from numba.extending import intrinsic

    @intrinsic
    def call(typing_context, address, a, b, c, d, e, f):
        """Return the result (int32) of the function at an address, called with six integers."""
        signature = types.int32(*[types.int64] * (1 + _ARGUMENTS))

        def generate(context: Any, builder: Any, signature: Any, arguments: list) -> Any:
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * _ARGUMENTS)
            return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

        return signature, generate

else:

    def call(address: int, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
        """Return the result (int32) of the function at an address, called with six integers."""
        return _function(int(address))(*map(int, (a, b, c, d, e, f)))


@functools.cache
def _function(address: int) -> Callable[..., int]:
    return ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * _ARGUMENTS)(address)


# --------------------------------------------------------------------------------------------------------- cudnn graph


# cudnnBackendDescriptorType_t
CONVOLUTION, ENGINE, ENGINE_CONFIG, HEURISTICS, GRAPH, TENSOR = 1, 2, 3, 4, 15, 17
# cudnnBackendAttributeType_t
DATA_TYPE, INT64, FLOAT, CONVOLUTION_MODE, HEURISTICS_MODE, NUMERICAL_NOTE, DESCRIPTOR = 1, 3, 4, 7, 8, 11, 15
# cudnnBackendAttributeName_t
_COMPUTE_TYPE, _MODE, _DILATIONS, _STRIDES, _POST_PADDINGS, _PRE_PADDINGS, _DIMENSIONS = range(100, 107)
_HEURISTICS_MODE, _HEURISTICS_GRAPH, _HEURISTICS_RESULTS, _HEURISTICS_DEVICE = 200, 201, 202, 204
_CONFIG_ENGINE, _CONFIG_WORKSPACE = 300, 303
_GRAPH_OPERATIONS = 801
_TENSOR_ALIGNMENT, _TENSOR_TYPE, _TENSOR_SIZES, _TENSOR_STRIDES, _TENSOR_NAME = 900, 901, 902, 903, 906
_ENGINE_INDEX, _ENGINE_NOTES = 1301, 1303

Words = Any  # an array of int64 with integers as items: numpy's types have scalars of their own
DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}  # cudnnDataType_t
INSTANT, FALLBACK = 0, 2  # cudnnBackendHeurMode_t
TENSOR_CORE, DOWN_CONVERT, NONDETERMINISTIC = 0, 1, 4  # cudnnBackendNumericalNote_t
_CROSS_CORRELATION = 1  # cudnnConvolutionMode_t
_MOST_NOTES = 10
_MOST_CONFIGS = 512  # several times the number that heuristics list

# Positions in the array: functions, the number of descriptors, the address of the space, the space, the descriptors
_FUNCTIONS = ("CreateDescriptor", "Finalize", "DestroyDescriptor", "SetAttribute", "GetAttribute")
_CREATE, _FINALIZE, _DESTROY, _SET, _GET, _COUNT, _ADDRESS, _ROOM = range(8)
_MADE = 24
_SIZE = _MADE + 4 * _MOST_CONFIGS


def begin(library: ctypes.CDLL) -> Words:
    """Return the array through which one thread calls a library's functions."""
    cudnn: Words = np.zeros(_SIZE, np.int64)
    cudnn[: len(_FUNCTIONS)] = _addresses(library)
    cudnn[_ADDRESS] = cudnn.ctypes.data + _ROOM * cudnn.itemsize
    return cudnn if COMPILED else memoryview(cudnn)  # a memoryview's items are plain integers, which ctypes converts faster


@functools.cache
def _addresses(library: ctypes.CDLL) -> tuple[int | None, ...]:
    functions = (getattr(library, f"cudnnBackend{name}") for name in _FUNCTIONS)
    return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in functions)


@compiled_within
def create(cudnn: Words, kind: int) -> int:
    """Return a new descriptor, to be set and then finalized."""
    if call(cudnn[_CREATE], kind, cudnn[_ADDRESS], 0, 0, 0, 0) != 0:
        return 0
    cudnn[_MADE + cudnn[_COUNT]] = cudnn[_ROOM]
    cudnn[_COUNT] += 1
    return cudnn[_ROOM]


@compiled_within
def destroy(cudnn: Words, left: int) -> None:
    """Destroy the most recent descriptors until `left` of them remain."""
    while cudnn[_COUNT] > left:
        cudnn[_COUNT] -= 1
        call(cudnn[_DESTROY], cudnn[_MADE + cudnn[_COUNT]], 0, 0, 0, 0, 0)


@compiled_within
def finalize(cudnn: Words, descriptor: int) -> bool:
    """Return whether cuDNN accepts a descriptor with its attributes."""
    return call(cudnn[_FINALIZE], descriptor, 0, 0, 0, 0, 0) == 0


@compiled_within
def put(cudnn: Words, descriptor: int, name: int, kind: int, value: int) -> bool:
    """Return whether cuDNN accepts an attribute of one value: an integer, a descriptor, or a float by its bits."""
    cudnn[_ROOM] = value
    return call(cudnn[_SET], descriptor, name, kind, 1, cudnn[_ADDRESS], 0) == 0


@compiled_within
def put_all(cudnn: Words, descriptor: int, name: int, values: Words) -> bool:
    """Return whether cuDNN accepts an attribute of several int64."""
    for at in range(len(values)):
        cudnn[_ROOM + at] = values[at]
    return call(cudnn[_SET], descriptor, name, INT64, len(values), cudnn[_ADDRESS], 0) == 0


@compiled_within
def read(cudnn: Words, descriptor: int, name: int, kind: int, most: int) -> int:
    """Return the number of values read of an attribute, at most `most`; -1 if refused.

    The values are written after the first element of the array's space.
    """
    address = cudnn[_ADDRESS]
    if call(cudnn[_GET], descriptor, name, kind, most, address, address + cudnn.itemsize) != 0:
        return -1
    return cudnn[_ROOM]


@compiled_within
def tensor(cudnn: Words, name: int, dtype: int, sizes: Words, channels_last: bool, alignment: int) -> int:
    """Return a dense tensor [N, C, ..] with a name of one letter and its address aligned to `alignment` bytes."""
    made, rank = create(cudnn, TENSOR), len(sizes)
    if not (made and put(cudnn, made, _TENSOR_TYPE, DATA_TYPE, dtype)):
        return 0
    if not put_all(cudnn, made, _TENSOR_SIZES, sizes):
        return 0
    dense_strides(sizes, channels_last, cudnn[_ROOM:])
    if call(cudnn[_SET], made, _TENSOR_STRIDES, INT64, rank, cudnn[_ADDRESS], 0) != 0:
        return 0
    named = put(cudnn, made, _TENSOR_NAME, INT64, name)
    return made if named and put(cudnn, made, _TENSOR_ALIGNMENT, INT64, alignment) and finalize(cudnn, made) else 0


@compiled_within
def dense_strides(sizes: Words, channels_last: bool, strides: Words) -> None:
    """Write the strides of a dense tensor [N, C, ..] (fixSizeOneDimStride).

    A dimension of size 1 has the stride of a dense tensor: the number of elements of its inner dimensions.
    """
    rank, distance = len(sizes), 1
    for place in range(rank):  # from the innermost
        dimension = rank - 1 - place
        if channels_last:
            dimension = 1 if place == 0 else (0 if place == rank - 1 else rank - place)
        strides[dimension] = distance
        distance *= sizes[dimension]


@compiled_within
def convolution(cudnn: Words, dtype: int, padding: Words, stride: Words, dilation: Words) -> int:
    """Return the description of a convolution computed in a dtype."""
    made = create(cudnn, CONVOLUTION)
    if not (made and put(cudnn, made, _COMPUTE_TYPE, DATA_TYPE, dtype)):
        return 0
    if not put(cudnn, made, _MODE, CONVOLUTION_MODE, _CROSS_CORRELATION):
        return 0
    if not (put(cudnn, made, _DIMENSIONS, INT64, len(stride)) and put_all(cudnn, made, _STRIDES, stride)):
        return 0
    if not (put_all(cudnn, made, _PRE_PADDINGS, padding) and put_all(cudnn, made, _POST_PADDINGS, padding)):
        return 0
    return made if put_all(cudnn, made, _DILATIONS, dilation) and finalize(cudnn, made) else 0


@compiled_within
def graph(cudnn: Words, operation: int) -> int:
    """Return a graph of one operation."""
    made = create(cudnn, GRAPH)
    return made if made and put(cudnn, made, _GRAPH_OPERATIONS, DESCRIPTOR, operation) and finalize(cudnn, made) else 0


@compiled_within
def _heuristics(cudnn: Words, asked: int, device: int, mode: int) -> int:
    """Return the heuristics of a mode for a graph; 0 if cuDNN refuses."""
    made = create(cudnn, HEURISTICS)
    if not (made and put(cudnn, made, _HEURISTICS_GRAPH, DESCRIPTOR, asked)):
        return 0
    if not put(cudnn, made, _HEURISTICS_MODE, HEURISTICS_MODE, mode):
        return 0
    return made if put(cudnn, made, _HEURISTICS_DEVICE, DESCRIPTOR, device) and finalize(cudnn, made) else 0


@compiled_within
def first_config(
    cudnn: Words, asked: int, device: int, mode: int, unwanted_notes: int, unwanted_engines: Words
) -> int:
    """Return the configuration of a graph's engine that a mode of the heuristics prefers; 0 if there is none.

    Some engines, and engines with some numerical notes (one bit each), are skipped. Configurations are read a few at a time:
    cuDNN creates each one when it is read, and nearly always one of the first two is used.
    """
    heuristics = _heuristics(cudnn, asked, device, mode)
    if not heuristics:
        return 0
    count, given = 1, 0
    while count <= _MOST_CONFIGS:
        first = _MADE + cudnn[_COUNT]
        found = _read_configs(cudnn, heuristics, count)
        for at in range(first + given, first + found):
            verdict = _is_wanted(cudnn, cudnn[at], unwanted_notes, unwanted_engines)
            if verdict != 0:
                return cudnn[at] if verdict > 0 else 0
        if found < count:
            return 0
        count, given = count * 2, found
    return 0


@compiled_within
def largest_workspace(
    cudnn: Words, asked: int, device: int, mode: int, unwanted_notes: int, unwanted_engines: Words, most: int
) -> int:
    """Return the bytes of the largest workspace, at most `most`, among the configurations of a mode; -1 if there is none.

    Configurations that `first_config` skips are left out.
    """
    heuristics = _heuristics(cudnn, asked, device, mode)
    if not heuristics:
        return -1
    first, largest = _MADE + cudnn[_COUNT], -1
    for at in range(first, first + _read_configs(cudnn, heuristics, _MOST_CONFIGS)):
        if _is_wanted(cudnn, cudnn[at], unwanted_notes, unwanted_engines) > 0:
            bytes_ = workspace(cudnn, cudnn[at])
            largest = bytes_ if largest < bytes_ <= most else largest
    return largest


@compiled_within
def _read_configs(cudnn: Words, heuristics: int, count: int) -> int:
    """Read at most `count` configurations in the order of preference, and return their number.

    They are written after the descriptors.
    """
    first = _MADE + cudnn[_COUNT]
    for _ in range(count):
        if not create(cudnn, ENGINE_CONFIG):
            return 0
    into = cudnn[_ADDRESS] + (first - _ROOM) * cudnn.itemsize
    if call(cudnn[_GET], heuristics, _HEURISTICS_RESULTS, DESCRIPTOR, count, cudnn[_ADDRESS], into) != 0:
        return 0
    return min(count, cudnn[_ROOM])


@compiled_within
def _is_wanted(cudnn: Words, config: int, unwanted_notes: int, unwanted_engines: Words) -> int:
    """Return 1 if a configuration's engine has none of the unwanted notes and numbers, else 0; -1 if cuDNN does not answer."""
    left = cudnn[_COUNT]
    engine = create(cudnn, ENGINE)
    cudnn[_ROOM + 1] = engine
    if not engine or read(cudnn, config, _CONFIG_ENGINE, DESCRIPTOR, 1) < 0:
        return -1
    count, wanted = read(cudnn, engine, _ENGINE_NOTES, NUMERICAL_NOTE, _MOST_NOTES), 1
    for at in range(count):  # enumerations, two of them in an int64
        note = (cudnn[_ROOM + 1 + at // 2] >> (32 * (at % 2))) & 0xFFFFFFFF
        if (unwanted_notes >> note) & 1:
            wanted = 0
    if len(unwanted_engines) and wanted and count >= 0:
        count = read(cudnn, engine, _ENGINE_INDEX, INT64, 1)
        for number in unwanted_engines:
            if number == cudnn[_ROOM + 1]:
                wanted = 0
    destroy(cudnn, left)
    return wanted if count >= 0 else -1


@compiled_within
def workspace(cudnn: Words, config: int) -> int:
    """Return the bytes of a configuration's workspace; -1 if cuDNN refuses it.

    Its plan, which would have to be compiled first, has the same workspace.
    """
    return cudnn[_ROOM + 1] if read(cudnn, config, _CONFIG_WORKSPACE, INT64, 1) >= 0 else -1

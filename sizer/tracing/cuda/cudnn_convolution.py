"""The workspace of one convolution as PyTorch would ask cuDNN for it: aten/src/ATen/native/cudnn/Conv_v8.cpp, versions 2.11
to 2.15, without benchmarking.

A size query's words are the direction, the dtype, the layout and flags ("tf32", "deterministic"); its numbers the sizes of
input, output and weight, then padding, stride and dilation, then where input, output and weight begin in their blocks (bytes).
"""

from __future__ import annotations

import ctypes
import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import gcd

from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.cuda import cudnn
from sizer.tracing.cuda.cudnn import Descriptors, RefusedError

_CONVOLUTION = 1
_COMPUTE_TYPE, _MODE, _DILATIONS, _STRIDES, _POST_PADDINGS, _PRE_PADDINGS, _DIMENSIONS = range(100, 107)
_DATA_TYPE, _CONVOLUTION_MODE, _CROSS_CORRELATION = 1, 7, 1
_FARTHEST = 32  # getAlignment looks no farther


# The kinds of operation, each with the numbers of its attributes: alpha, beta, convolution, weight, input, output.
_OPERATIONS = {
    "forward": (10, range(700, 706)),
    "backward data": (12, range(706, 712)),
    "backward filter": (11, range(712, 718)),
}


# An fp32 1x1 convolution [8, 256, 56, 56] to 64 channels: cuDNN asks cuBLASLt for it on every device.
_POINTWISE = (8, 256, 56, 56, 8, 64, 56, 56, 64, 256, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0)


@functools.cache
def without_cublaslt() -> str | None:
    """Why engines that use cuBLASLt are not among those that cuDNN chooses from, in words; None where they are.

    The query that tells is also the first one of a process, about a device with TF32: cuDNN remembers from the first device
    that it is asked about whether TF32 is to be had, and would deny it to later ones (seen in 9.19 and 9.26).
    """
    interposed = cudnn.interposer()
    if isinstance(interposed, str):
        return interposed
    _workspace_bytes("a100-80gb", ("forward", "float32", "contiguous", "tf32"), _POINTWISE)
    return None if interposed.product_queries else "cuDNN had looked for cuBLASLt before, or does not"


@functools.lru_cache(maxsize=2**16)
def workspace_bytes(gpu: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int | None:
    """The workspace (bytes) of the first plan that PyTorch would run on a GPU of the catalogue; None where cuDNN is not
    installed, too old for described devices, or has no plan."""
    without_cublaslt()
    return _workspace_bytes(gpu, words, numbers)


def _workspace_bytes(gpu: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int | None:
    found, device = cudnn.library(), _device(gpu)
    if found is None or device is None:
        return None
    with Descriptors(found, HARDWARE[gpu].capability) as descriptors:
        try:
            graph = _graph(descriptors, words, numbers)
            for mode in (cudnn.INSTANT, cudnn.FALLBACK):
                for config in _usable(descriptors, graph, device, mode, gpu, words, numbers):
                    return descriptors.workspace(config)
        except RefusedError:  # cuDNN does not support it
            return None
    return None


@functools.cache
def _device(gpu: str) -> ctypes.c_void_p | None:
    """The described device, kept for good; None where cuDNN refuses the description."""
    found = cudnn.library()
    if found is None:
        return None
    try:
        return Descriptors(found, HARDWARE[gpu].capability).device(HARDWARE[gpu])
    except RefusedError:
        return None


def _graph(descriptors: Descriptors, words: tuple[str, ...], numbers: tuple[int, ...]) -> ctypes.c_void_p:
    """build_opgraph, getTensorDescriptor and getConvDescriptor."""
    direction, dtype, layout = words[:3]
    rank = (len(numbers) + 3) // 6
    sizes, rest = [numbers[i * rank : (i + 1) * rank] for i in range(3)], numbers[3 * rank :]
    padding, stride, dilation = (rest[i * (rank - 2) : (i + 1) * (rank - 2)] for i in range(3))
    (kind, (alpha, beta, described, weight, input, output)), begins = _OPERATIONS[direction], numbers[-3:]
    alignments = [gcd(begin, _FARTHEST) or _FARTHEST for begin in begins]
    made = descriptors.create(kind)
    for attribute, name, size, alignment in zip((input, output, weight), "xyw", sizes, alignments, strict=True):
        descriptors.set_descriptor(made, attribute, _TENSORS.get(name, dtype, size, layout, alignment))
    descriptors.set_descriptor(made, described, _convolution(dtype, padding, stride, dilation))
    descriptors.set_float(made, alpha, 1.0)
    descriptors.set_float(made, beta, 0.0)
    return descriptors.graph(descriptors.finalize(made))


class _Tensors:
    """The tensors that were asked for last: passes forward and backward have the same ones, and weights all batch sizes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[tuple, ctypes.c_void_p] = OrderedDict()

    def get(self, name: str, dtype: str, sizes: tuple[int, ...], layout: str, alignment: int) -> ctypes.c_void_p:
        """A finalized tensor, which lives until `most` others have been asked for. Raises RefusedError."""
        key = (name, dtype, sizes, layout, alignment)
        if key not in self._found:
            self._found[key] = _kept().tensor(name, dtype, sizes, strides_of(sizes, layout), alignment)
        self._found.move_to_end(key)
        if len(self._found) > self._most:
            _kept().destroy(self._found.popitem(last=False)[1])
        return self._found[key]


_TENSORS = _Tensors(2**8)


@functools.cache
def _convolution(
    dtype: str, padding: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> ctypes.c_void_p:
    """The description of a convolution in a dtype, kept for good."""
    descriptors = _kept()
    made = descriptors.create(_CONVOLUTION)
    computed = "float32" if dtype in ("float16", "bfloat16") else dtype
    descriptors.set_enum(made, _COMPUTE_TYPE, _DATA_TYPE, cudnn.DATA_TYPES[computed])
    descriptors.set_enum(made, _MODE, _CONVOLUTION_MODE, _CROSS_CORRELATION)
    descriptors.set_integers(made, _DIMENSIONS, len(stride))
    descriptors.set_integers(made, _STRIDES, *stride)
    descriptors.set_integers(made, _PRE_PADDINGS, *padding)
    descriptors.set_integers(made, _POST_PADDINGS, *padding)
    descriptors.set_integers(made, _DILATIONS, *dilation)
    return descriptors.finalize(made)


@functools.cache
def _kept() -> Descriptors:
    """Descriptors of what no device has a say in, which outlive a query."""
    return Descriptors(cudnn.library(), HARDWARE["a100-80gb"].capability)


def strides_of(sizes: Sequence[int], layout: str) -> list[int]:
    """Strides of a dense tensor [N, C, ..] that is "contiguous" or in "channels last"; a dimension of 1 is as far apart as
    its inner ones are large (fixSizeOneDimStride)."""
    rank = len(sizes)
    inner_first = [*range(rank - 1, -1, -1)] if layout == "contiguous" else [1, *range(rank - 1, 1, -1), 0]
    strides, distance = [0] * rank, 1
    for dimension in inner_first:
        strides[dimension] = distance
        distance *= sizes[dimension]
    return strides


def _usable(
    descriptors: Descriptors, graph: ctypes.c_void_p, device: ctypes.c_void_p, mode: int,
    gpu: str, words: tuple[str, ...], numbers: tuple[int, ...],
) -> Iterator[ctypes.c_void_p]:  # fmt: skip
    """Configurations that pass filterEngineConfigs and plan_errata_exception; none where the heuristics know none."""
    direction, dtype = words[:2]
    unwanted, errata = (
        _UNWANTED[dtype == "float32" and "tf32" not in words, "deterministic" in words],
        _errata(direction, gpu, rank=(len(numbers) + 3) // 6),
    )
    try:
        for config in descriptors.configs(graph, device, mode):
            engine = descriptors.engine(config)
            if not unwanted.isdisjoint(descriptors.notes(engine)):
                continue
            if not errata or descriptors.number(engine) not in errata:
                yield config
    except RefusedError:
        return


# Notes of engines that are passed over, by whether tensor cores are, and whether it must be deterministic.
_UNWANTED = {
    (cores, deterministic): frozenset(
        (cudnn.DOWN_CONVERT, *(cudnn.TENSOR_CORE,) * cores, *(cudnn.NONDETERMINISTIC,) * deterministic)
    )
    for cores in (False, True)
    for deterministic in (False, True)
}


def _errata(direction: str, gpu: str, *, rank: int) -> frozenset[int]:
    """plan_errata_exception: engines that PyTorch passes over."""
    version, found = cudnn.version() or 0, frozenset()
    if rank == 5 and (direction == "backward data" or 90800 <= version < 91500):
        found |= _ERRATA_3D.get(direction, frozenset())
    if HARDWARE[gpu].capability[0] == 12 and version >= 92300:
        found |= _ERRATA_SM120[direction]
    return found


_ERRATA_3D = {"forward": frozenset({23}), "backward data": frozenset({23})}
_ERRATA_SM120 = {"forward": frozenset({58}), "backward data": frozenset({63}), "backward filter": frozenset({63})}

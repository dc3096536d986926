"""Sizes that depend on a GPU's hardware: memory of sorts, reductions, and gradients of embeddings and norms.

Each function resolves size queries (sizer.tape.size_queries) of one kind. Plain numbers: no torch. The sources are named in the
modules of the kernels: `scans`, `reductions`, `indexing` and `normalization`.

Source of the staging memory of reductions that use several thread blocks: ATen/native/cuda/Reduce.cuh (setReduceConfig,
global_memory_size, semaphore_size; the same in PyTorch 2.6, 2.11 and 2.15) and TensorIterator.cpp (reorder_dimensions,
coalesce_dimensions). With many rows and few columns, as in the gradient of a bias, the partial sums of each column and block
are stored per thread: tens of MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from sizer.base.units import round_up
from sizer.base.versions import parse_version
from sizer.catalogue.hardware import HARDWARE

# Kinds of size queries, and their words
SORT, REDUCTION, EMBEDDING = "CUB sort", "CUDA reduction", "CUDA embedding's gradient"
GEMM_4BIT = "product of 4-bit weights on CUDA"  # resolved by bitsandbytes.resolve
NORM = "gradients of a norm's weights on CUDA"
DROPOUT = "cuDNN's dropout state"
INDICES, PERMUTED = "indices", "permuted"
COUNT, SELECT, SCAN, LARGEST = "count", "select", "scan", "largest"
KEYS, UNIQUE, RUNS, NUMBERED = "keys alone", "unique", "runs", "numbered runs"
FLOAT, WHOLE, COMPLEX = "float", "whole", "complex"  # kinds of numbers
PARTIAL, SEMAPHORES = "partial results", "semaphores"
SUMS, SUM = "partial sums", "sum"
ALWAYS, FEW = "always sorted", "few rows"

_DROPOUT_PER_PROCESSOR = 2048 * 16  # threads, and bytes of each
SMALL_ROW, WARP = 4096, 32  # values of a row that one block sorts; columns of a block
_ALIGNED, _SEGMENTS, _LARGE = 256, 128, 1_000_000
_SCAN = {2: (7680, 16), 4: (1920, 8), 8: (896, 16)}  # by bytes of a value: elements of a tile, bytes of its descriptor
_SCAN_OF_COMPLEX = {8: 896, 16: 384}  # elements of a tile; CUB has no descriptor for these values
# Elements of a tile, by the bytes of a key and of its value: from capability 9.0 on, from 8.0 on, and before 8.0
_TILES = {
    (1, 8): 3456, (2, 8): 5632, (4, 8): 5376, (8, 8): 4608, (4, 4): 6528, (1, 0): 9728, (2, 0): 9728, (4, 0): 7296, (8, 0): 5760,
}  # fmt: skip
_TILES_OF_8 = {(4, 8): 3072, (8, 8): 3840, (4, 4): 6528, (4, 0): 8064, (8, 0): 3840}
_TILES_BEFORE = {(4, 8): 2816, (8, 8): 2816, (4, 4): 11776, (4, 0): 5888, (8, 0): 2816}
_HALF_KEYS, _FLOAT_KEYS = 7680, 6912  # keys alone: of 2 bytes from 10.0 on, and in float32 from 9.0 on
# Before 9.0, thread blocks count keys of less than 4 bytes, this many digits at a time
_DIGITS = {1: 32, 2: 64}
_BLOCKS_PER_PROCESSOR, _THREADS, _SCANNED_BYTES = 5, 128, 44_800
# Elements that are sorted in one tile without further memory, by bytes of a key and of its value
_AT_ONCE = {
    (8, 8): 2304, (4, 8): 2304, (2, 8): 2304, (1, 8): 2304, (4, 4): 4864, (1, 0): 4864, (2, 0): 4864, (4, 0): 4864, (8, 0): 2304,
}  # fmt: skip
_COUNTED_AT_ONCE, _COUNTING_THREADS = 4096, 256  # elements that one block sums, and its threads
_SELECTED = {8: 2304, 9: 4224}  # elements of a tile of capabilities 8.0 and 9; later ones have 3,520
# Elements of a tile that keeps one element of each run, by capability and bytes of an element; then of tiles that count and
# number runs
_UNIQUE = {
    8: {1: 20480, 2: 8192, 4: 4608, 8: 1920},
    9: {1: 5632, 2: 5632, 4: 6528, 8: 4224},
    10: {1: 8448, 2: 5632, 4: 5760, 8: 4224},
}
_UNIQUE_BEFORE, _UNIQUE_HALF = {1: 1280, 2: 1280, 4: 1280, 8: 640}, 1280
_RUNS, _NUMBERED, _NUMBERED_OF_8, _NUMBERED_BEFORE = 768, 3072, 3840, 1920
# Fewest and most rows, and the length from which several blocks search one row
_ROWS_OF_BLOCKS = (
    (1, 20, 20000), (21, 40, 10000), (41, 80, 8000), (81, 199, 5000), (200, 799, 3000), (800, 4000, 800), (4001, 2**32, 400),
)  # fmt: skip
_SEARCHES_PER_PROCESSOR, _SEARCHING = 6, 256  # blocks of 256 threads with 40 registers each, of 65,536
_COUNTS_OF_TILE = 4000  # between 3,907 and 4,024, according to CUB's answers on capability 9.0
_UNSORTED = 3072  # up to this number of indices, one kernel adds rows without sorting
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD
_FEW_PER_PROCESSOR, _MANY_PER_ROW = 4, 30  # rows of an embedding for each multiprocessor, and indices for each row
_MANY, _ROWS = 64 * 1024, 32  # with more rows, sums are computed in parts; rows of a block, unless there were too many blocks
_MOST_BLOCKS = 32 * 1024


def dropout_state(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """Return the bytes of the random numbers that cuDNN keeps for dropout. They are not published: a guess."""
    return HARDWARE[key].processors * _DROPOUT_PER_PROCESSOR


def scanned(elements: int, itemsize: int, *, is_complex: bool = False) -> int:
    """Return the bytes that CUB holds for an inclusive scan.

    Complex numbers have a status of 4 bytes, a sum of the tile and a sum so far in three arrays (single_pass_scan_operators.cuh,
    ScanTileState<T, false>).
    """
    if is_complex:
        tiles = -(-elements // _SCAN_OF_COMPLEX[itemsize]) + 32
        return round_up(tiles * 4, _ALIGNED) + 2 * round_up(tiles * itemsize, _ALIGNED) + 2 * _ALIGNED - 1
    return _scanned_tiles(elements, *_SCAN.get(itemsize, _SCAN[8]))


def _scanned_tiles(elements: int, tile: int, descriptor: int) -> int:
    """Return the bytes of the descriptors of all tiles, and of 32 more."""
    return round_up((-(-elements // tile) + 32) * descriptor, _ALIGNED) + 2 * _ALIGNED - 1


def selected(key: str, elements: int) -> int:
    """Return the bytes that CUB holds while it selects the true elements of a mask on a GPU (DeviceSelect).

    The tiles were derived from CUB's answers for each generation.
    """
    capability = HARDWARE[key].capability
    tile = 640 if capability[0] < 9 and capability != (8, 0) else _SELECTED.get(capability[0], 3520)
    return _scanned_tiles(elements, tile, 8)


def counted(key: str, elements: int) -> int:
    """Return the bytes that CUB holds while it counts the true elements of a mask on a GPU (DeviceReduce): a sum of each block."""
    if elements <= _COUNTED_AT_ONCE:
        return 1
    hardware = HARDWARE[key]
    blocks = hardware.processors * _BLOCKS_PER_PROCESSOR * (hardware.threads // _COUNTING_THREADS)
    return round_up(blocks * 4, _ALIGNED) + _ALIGNED - 1


def kept_of_runs(key: str, elements: int, itemsize: int, *, is_half: bool) -> int:
    """Return the bytes that CUB holds while it keeps one element of each run on a GPU (DeviceSelect::Unique)."""
    capability = HARDWARE[key].capability
    generation = min(10, capability[0])
    tiles = _UNIQUE[generation] if generation >= 9 or capability == (8, 0) else _UNIQUE_BEFORE
    return _scanned_tiles(elements, _UNIQUE_HALF if is_half else tiles[itemsize], 8)


def counted_runs(elements: int) -> int:
    """Return the bytes that CUB holds while it counts runs of equal elements (DeviceRunLengthEncode)."""
    return round_up(-(-elements // _RUNS) * 16, _ALIGNED) + 3 * _ALIGNED - 1


def numbered_runs(key: str, elements: int) -> int:
    """Return the bytes that CUB holds while it numbers runs of equal elements on a GPU (a scan of int32 to int64)."""
    capability = HARDWARE[key].capability
    before = _NUMBERED_OF_8 if capability == (8, 0) else _NUMBERED_BEFORE
    return _scanned_tiles(elements, _NUMBERED if capability >= (9, 0) else before, 8)


def sort_bytes(key: str, elements: int, sizes: tuple[int, int], passes: int, *, is_float: bool = False) -> int:
    """Return the bytes that CUB holds while it sorts pairs, or keys alone, on a GPU.

    Args:
        key: The GPU.
        elements: Number of pairs.
        sizes: Bytes of a key, and of the value that is sorted with it.
        passes: Passes of 8 bits; several passes need a second copy of keys and values.
        is_float: Whether keys are floating-point numbers.
    """
    hardware = HARDWARE[key]
    if elements <= _AT_ONCE.get(sizes, 0):
        return 1
    copies = sum(round_up(elements * size, _ALIGNED) for size in sizes)
    if sizes[0] in _DIGITS and hardware.capability < (9, 0):
        blocks = hardware.processors * _BLOCKS_PER_PROCESSOR * (hardware.threads // _THREADS)
        return copies + blocks * _DIGITS[sizes[0]] * 8 + _SCANNED_BYTES + 2 * _ALIGNED - 1
    generation = hardware.capability
    tiles = _TILES if generation >= (9, 0) else _TILES_OF_8 if generation >= (8, 0) else _TILES_BEFORE
    tile = tiles.get(sizes) or tiles[8, 8]
    if sizes == (2, 0) and generation >= (10, 0):
        tile = _HALF_KEYS
    elif sizes == (4, 0) and is_float and generation >= (9, 0):
        tile = _FLOAT_KEYS
    return (copies if passes > 1 else 0) + (2 + 8 * passes) * _ALIGNED + 1024 * -(-elements // tile) - 1


def takes_blocks(rows: int, row: int) -> bool:
    """Return True if several blocks of threads search the largest values of a row (TensorTopK.cu, should_use_multiblock)."""
    return any(fewest <= rows <= most and row >= shortest for fewest, most, shortest in _ROWS_OF_BLOCKS)


def largest_block(key: str, which: str, itemsize: int, rows: int, row: int) -> int:
    """Return the bytes of one buffer of `topk` by several blocks of threads (TensorTopK.cu, mbtopk::launch, 2.15)."""
    if not takes_blocks(rows, row):
        return 0
    device = HARDWARE[key]
    elements = -(-rows * row // (device.processors * _SEARCHES_PER_PROCESSOR * _SEARCHING))
    blocks = rows * -(-row // (min(64, max(4, elements)) * _SEARCHING))
    if which == "scan":  # of counts, by row: a descriptor of 16 bytes and a key for each tile
        tiles = -(-blocks // _COUNTS_OF_TILE)
        return round_up((tiles + 32) * 16, _ALIGNED) + round_up(4 * tiles, _ALIGNED) + _ALIGNED - 1
    sizes = {
        "values": rows * itemsize, "places": 8 * rows, "digits": 2 * rows * max(4, itemsize), "counts": blocks * 512,
        "sums": rows * 1024, "before": blocks * 4,
    }  # fmt: skip
    return sizes[which]


def sort_block(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """Return the bytes of one block of a sort on a GPU, by the block's name.

    The sizes depend on:

    - indices: (indices, rows);
    - random keys: (keys, bytes of a key, bits);
    - rows of values: bytes of a value and passes, and (rows, values of a row);
    - a mask: its elements;
    - a scan: bytes of a value, its kind and elements;
    - `unique`: bytes of an element, its kind and elements.
    """
    name = words[0]
    if name == RUNS:
        return counted_runs(numbers[0])
    if name == NUMBERED:
        return numbered_runs(key, numbers[0])
    if name in (KEYS, UNIQUE):
        itemsize, kind, (elements,) = int(words[1]), words[2], numbers
        if name == KEYS:
            return sort_bytes(key, elements, (itemsize, 0), itemsize, is_float=kind == FLOAT)
        return kept_of_runs(key, elements, itemsize, is_half=kind == FLOAT and itemsize == 2)
    if name == SCAN:
        return scanned(numbers[0], int(words[1]), is_complex=words[-1] == COMPLEX)
    if name == LARGEST:
        return largest_block(key, words[1], int(words[2]), *numbers)
    if name == PERMUTED:
        elements, itemsize, bits = numbers
        return sort_bytes(key, elements, (itemsize, 8), -(-bits // 8))
    if name in (COUNT, SELECT):
        return (counted if name == COUNT else selected)(key, numbers[0])
    if name == INDICES:
        elements, rows = numbers
        return sort_bytes(key, elements, (8, 8), -(-max(1, rows - 1).bit_length() // 8))
    itemsize, passes = map(int, words[1:])
    rows, row = numbers
    elements = rows * row
    small, single, segmented = row <= SMALL_ROW, rows == 1 or row >= _LARGE, rows >= _SEGMENTS
    if name == "places":
        return (row if small or single else elements) * 8
    if small or (name != "scratch" and (single or segmented)):
        return 0
    if name == "scratch" and segmented and not single:
        return round_up(elements * itemsize, _ALIGNED) + round_up(elements * 8, _ALIGNED) + _ALIGNED - 1
    if name == "scratch":
        return sort_bytes(key, row if single else elements, (itemsize, 8), passes)
    return elements * (8 if name == "pairs" else itemsize)


def summed_rows(key: str, which: str, rows: int, columns: int, itemsize: int) -> int:
    """Return the bytes of block `which` that a GPU holds while it sums over the rows of a float matrix [rows, columns]."""
    accumulator, converts = (4, "0") if itemsize == 2 else (itemsize, "1")
    return reduction_block(key, (which, "10", str(itemsize), str(accumulator), converts), (rows, columns, columns, 1))


def reduction_block(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """Return the bytes of one block of a reduction on a GPU.

    An input that 32 bits cannot index is reduced in pieces; then the bytes are those of the largest piece's block.
    """
    which, reduced, itemsize, accumulator, converts = words
    rank = len(reduced)
    work = Reduction(
        shape=numbers[:rank],
        strides=numbers[rank:],
        reduced=tuple(mark == "1" for mark in reduced),
        itemsize=int(itemsize),
        accumulator=int(accumulator),
        converts=converts == "1",
    )
    device = HARDWARE[key]
    stages = staging_bytes(work, device.processors, device.threads)
    if which == SEMAPHORES:
        return max((stage[-1] for stage in stages if len(stage) > 1), default=0)
    return max((sum(stage[: max(1, len(stage) - 1)]) for stage in stages), default=0)


def norm_block(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """Return the bytes of one block on a GPU: partial sums, their sum, or the memory of summing them."""
    (which, itemsize), (rows, columns) = words, numbers
    if rows <= _MANY or columns // WARP >= HARDWARE[key].processors // 2:
        return 0
    sums = min(-(-rows // _ROWS), _MOST_BLOCKS // -(-columns // WARP))
    if which == SUM:
        return columns * int(itemsize)
    if which == SUMS:
        return sums * columns * int(itemsize)
    return summed_rows(key, which, sums, columns, int(itemsize))


def embedding_block(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """Return the bytes of one block of an embedding's gradient, by the block's name and PyTorch's version.

    `numbers` are indices, rows of the embedding, bytes of a row as summed, and bytes of an index.
    """
    name, version, *kinds = words
    indices, rows, width, itemsize = numbers
    if indices <= _UNSORTED and ALWAYS not in kinds:
        return 0
    segments = min(indices, rows)
    parts = segments + indices // _ROWS_PER_THREAD
    passes = 8 if parse_version(version) < (2, 12) else -(-rows.bit_length() // 8)  # of the lowest bits, or of all 64
    few = FEW in kinds and segments < HARDWARE[key].processors * _FEW_PER_PROCESSOR and indices // segments >= _MANY_PER_ROW
    return {
        "indices": indices * itemsize,
        "sort": sort_bytes(key, indices, (itemsize, itemsize), passes),
        "count": 8,
        "scan": 511 + round_up(16 * (-(-indices // 4864) + 32), 256),
        "segments": segments * itemsize,
        "parts": parts * itemsize,
        "sums": 0 if few else parts * width,
        "segment of a part": parts * itemsize if few else 0,
        "result in float32": rows * width if few else 0,
    }[name]


# ---------------------------------------------------------------------------------------------------------- reductions

_MOST_THREADS = 512  # of a block: mnt_wrapper
_LEAST_VALUES, _MOST_VALUES = 16, 256  # per thread
_INDEXED = 2**31 - 1  # elements (and extent in bytes) that 32-bit indices can address


@dataclass(frozen=True, slots=True)
class _Dim:
    size: int
    stride: int  # of the input, in elements
    out: int  # of the output; 0 if reduced


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A reduction: the input's `shape`, `strides` (in elements) and `itemsize` (in bytes), and the reduced dimensions.

    `accumulator` is the bytes of a partial result, `vector` the elements that a thread loads at once; `converts` says whether
    partial results can wait in the output.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    reduced: tuple[bool, ...]
    itemsize: int
    accumulator: int
    vector: int = 4
    converts: bool = True


@lru_cache(maxsize=4096)
def staging_bytes(work: Reduction, processors: int, threads: int) -> tuple[tuple[int, ...], ...]:
    """Return the blocks (bytes) that a reduction holds, as stages: partial results and semaphores of each piece.

    A piece is a part of the input that 32 bits can index. `processors` and `threads` are the number of the device's
    multiprocessors and the threads that each of them can hold.
    """
    if not prod(work.shape):
        return ()
    dims = _iterator_order(work.shape, work.strides, work.reduced)
    pieces = list(_pieces(dims, work.itemsize))
    waiting: tuple[int, ...] = ()
    if len(pieces) > 1 and not work.converts:
        waiting = (prod(dim.size for dim in dims if dim.out) * work.accumulator,)
    stages = [(*waiting, *_piece_staging(piece, work, processors, threads)) for piece in pieces]
    return tuple(stage for stage in stages if stage)


def _piece_staging(dims: list[_Dim], work: Reduction, processors: int, threads: int) -> tuple[int, ...]:
    inner = sum(1 for dim in dims if dim.out == 0)  # num_reduce_dims
    inputs = prod(dim.size for dim in dims[:inner])
    outputs = prod(dim.size for dim in dims[inner:])
    along_rows = inner == len(dims) or (inner > 0 and dims[0].stride < dims[inner].stride)
    width, height = (inputs, outputs) if along_rows else (outputs, inputs)
    lanes = 1  # output_vec_size
    if dims and dims[0 if along_rows else inner].stride == 1:
        if along_rows and width >= 128 and inner == 1:
            width //= work.vector
        elif not along_rows:
            lanes = _output_vector(dims, inner)
            width //= lanes
    across, down = _block(width, height, _MOST_THREADS // lanes)
    step_input, step_output = (across, 1) if along_rows else (1, across)
    if -(-inputs // step_input) < min(down * 16, _MOST_VALUES):
        return ()  # each warp has its own outputs, and blocks share none
    grid = -(-(outputs // lanes) // step_output)
    values = -(-inputs // (step_input * down))
    target = processors * (threads // (across * down))
    if values < _MOST_VALUES or grid > target:
        return ()
    fewest, most = -(-values // _MOST_VALUES), -(-values // _LEAST_VALUES)
    blocks = min(max(-(-target // grid), fewest), most)  # per output
    if blocks <= 1:
        return ()
    return work.accumulator * outputs * blocks * (1 if along_rows else across * lanes), 4 * grid


def _pieces(dims: list[_Dim], itemsize: int) -> Iterator[list[_Dim]]:
    """Yield the dimensions in pieces that 32 bits can index.

    TensorIterator halves the dimension with the largest extent in bytes.
    """
    reaches = [(dim.size - 1) * dim.stride * itemsize for dim in dims]
    if prod(dim.size for dim in dims) <= _INDEXED and 1 + sum(reaches) <= _INDEXED:
        yield dims
        return
    place = max(range(len(dims)), key=lambda at: (reaches[at], at))
    dim = dims[place]
    for size in (dim.size // 2, dim.size - dim.size // 2):
        yield from _pieces([*dims[:place], replace(dim, size=size), *dims[place + 1 :]], itemsize)


def _iterator_order(shape: Sequence[int], strides: Sequence[int], reduced: Sequence[bool]) -> list[_Dim]:
    """Return the dimensions in TensorIterator's order: reduced ones first, then by stride; adjacent dimensions are merged."""
    outs, step = [], 1
    for size, gone in zip(reversed(shape), reversed(reduced), strict=True):
        outs.append(0 if gone or size == 1 else step)
        step *= 1 if gone else size
    dims = [_Dim(*row) for row in zip(shape, strides, reversed(outs), strict=True)]
    merged: list[_Dim] = []
    for dim in sorted((d for d in reversed(dims) if d.size != 1), key=lambda d: (d.out != 0, d.out, d.stride)):
        last = merged[-1] if merged else None
        if last and last.size * last.stride == dim.stride and last.size * last.out == dim.out:
            merged[-1] = _Dim(last.size * dim.size, last.stride, last.out)
        else:
            merged.append(dim)
    return merged


def _output_vector(dims: list[_Dim], inner: int) -> int:
    vector = 4
    for number in (dims[inner].size, *(dim.stride for place, dim in enumerate(dims) if place != inner)):
        while number % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Return the threads of a block along and across (set_block_dimension)."""
    wide, tall = (most if size >= most else _power_of_two(size) for size in (width, height))
    across = min(wide, WARP)
    down = min(tall, most // across)
    return min(wide, most // down), down


def _power_of_two(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)

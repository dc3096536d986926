"""Sizes that go by a GPU's hardware: what sorts, reductions, and gradients of embeddings and norms hold.

Each function answers size queries (sizer.tape.size_queries) of one kind. Plain numbers: no torch. The sources are named in the
modules whose kernels ask: `scans`, `reductions`, `embedding` and `normalization`.
"""

from __future__ import annotations

from sizer.base.units import round_up
from sizer.base.versions import parse_version
from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.cuda.reduction_staging import Reduction, staging_bytes

# Kinds of size queries, and words of theirs
SORT, REDUCTION, EMBEDDING = "CUB sort", "CUDA reduction", "CUDA embedding's gradient"
GEMM_4BIT = "product of 4-bit weights on CUDA"  # answered by bitsandbytes.resolve
NORM = "gradients of a norm's weights on CUDA"
INDICES = "indices"
PARTIAL, SEMAPHORES = "partial results", "semaphores"
SUMS = "partial sums"
ALWAYS = "always sorted"

SMALL_ROW, WARP = 4096, 32  # values of a row that one block sorts; columns of a block
_ALIGNED, _SEGMENTS, _LARGE = 256, 128, 1_000_000
_SCAN = {2: (7680, 16), 4: (1920, 8), 8: (896, 16)}  # by bytes of a value: elements of a tile, bytes of its descriptor
# Elements of a tile by the bytes of a key and of what is sorted with it; from capability 9.0 on, from 8.0 on, and before
_TILES = {(1, 8): 3456, (2, 8): 5632, (4, 8): 5376, (8, 8): 4608, (4, 4): 6528}
_TILES_OF_8 = {(4, 8): 3072, (8, 8): 3840, (4, 4): 6528}
_TILES_BEFORE = {(4, 8): 2816, (8, 8): 2816, (4, 4): 11776}
# Before 9.0 keys of less than 4 bytes are counted by blocks of threads, so many digits at a time
_DIGITS = {1: 32, 2: 64}
_BLOCKS_PER_PROCESSOR, _THREADS, _SCANNED_BYTES = 5, 128, 44_800
_AT_ONCE = {(8, 8): 2304, (4, 4): 4864}  # elements that are sorted in one tile, without anything beside
_UNSORTED = 3072  # indices up to which one kernel adds rows without sorting
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD
_MANY, _ROWS = 64 * 1024, 32  # more rows than these are summed in parts; rows of a block


def scanned(elements: int, itemsize: int) -> int:
    """Return the bytes that CUB holds for an inclusive scan: descriptors of its tiles and 32 more."""
    tile, descriptor = _SCAN.get(itemsize, _SCAN[8])
    return round_up((-(-elements // tile) + 32) * descriptor, _ALIGNED) + 2 * _ALIGNED - 1


def sort_bytes(key: str, elements: int, sizes: tuple[int, int], passes: int) -> int:
    """Return the bytes that CUB holds while it sorts pairs on a GPU.

    Args:
        key: The GPU.
        elements: Pairs.
        sizes: Bytes of a key, and of what is sorted with it.
        passes: Passes of 8 bits; with several of them keys and values are there once more.
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
    return (copies if passes > 1 else 0) + (2 + 8 * passes) * _ALIGNED + 1024 * -(-elements // tile) - 1


def sort_block(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """The bytes of one block of a sort on a GPU, by its name: of indices, by (indices, rows); of rows of values, by bytes of a
    value and passes, and by (rows, values of a row)."""
    name = words[0]
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
    """What a sum over the rows [rows, columns] of a floating-point matrix holds on a GPU: `which` of its blocks, in bytes."""
    accumulator, converts = (4, "0") if itemsize == 2 else (itemsize, "1")
    return reduction_block(key, (which, "10", str(itemsize), str(accumulator), converts), (rows, columns, columns, 1))


def reduction_block(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """The bytes of one block of a reduction on a GPU; where 32 bits do not index the input, the largest of its pieces' blocks."""
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
    """The bytes of one block on a GPU: partial sums, or what their sum holds."""
    (which, itemsize), (rows, columns) = words, numbers
    if rows <= _MANY or columns // WARP >= HARDWARE[key].processors // 2:
        return 0
    sums = -(-rows // _ROWS)
    if which == SUMS:
        return sums * columns * int(itemsize)
    return summed_rows(key, which, sums, columns, int(itemsize))


def embedding_block(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """The bytes of one block by its name and PyTorch's version, and by (indices, rows of the embedding, bytes of a row as
    summed, bytes of an index)."""
    name, version, *always = words
    indices, rows, width, itemsize = numbers
    if indices <= _UNSORTED and not always:
        return 0
    segments = min(indices, rows)
    parts = segments + indices // _ROWS_PER_THREAD
    passes = 8 if parse_version(version) < (2, 12) else -(-rows.bit_length() // 8)  # of the lowest bits, or of all 64
    return {
        "indices": indices * itemsize,
        "sort": sort_bytes(key, indices, (itemsize, itemsize), passes),
        "count": 8,
        "scan": 511 + round_up(16 * (-(-indices // 4864) + 32), 256),
        "segments": segments * itemsize,
        "parts": parts * itemsize,
        "sums": parts * width,
    }[name]

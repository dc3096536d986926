"""Staging memory of CUDA reductions: by hand, piece by piece."""

from __future__ import annotations

import pytest

from sizer.tracing.cuda.by_hardware import Reduction, staging_bytes

H100, T4 = (132, 2048), (40, 1024)


def reduction(
    shape: tuple[int, ...], *dims: int, itemsize: int = 4, accumulator: int = 4, converts: bool = True
) -> Reduction:
    """Over some dimensions of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return Reduction(
        shape=shape, strides=tuple(reversed(strides)), reduced=tuple(dim in dims for dim in range(len(shape))),
        itemsize=itemsize, accumulator=accumulator, converts=converts,
    )  # fmt: skip


def test_a_bias_gradient_of_a_transformer():
    # 3,072 columns by fours: blocks of 32 * 4 threads and 24 of them; each thread has 1,024 / 4 = 256 values, the least that is
    # shared. 132 * (2048 / 128) = 2,112 blocks are wanted, 88 a column, at most 256 / 16 = 16: 4 * 3072 * 16 * 32 * 4 bytes
    assert staging_bytes(reduction((1024, 3072), 0), *H100) == ((4 * 3072 * 16 * 32 * 4, 4 * 24),)


def test_the_device_decides_how_many_blocks_share():
    # a sum over all of 2**25 by blocks of 512 threads: on an H100 132 * 4 of them, each with a partial result of 4 bytes; on a T4
    # 40 * 2 would do, but no thread is given more than 256 values: 2**25 / 512 / 256 = 256 blocks
    whole = reduction((2**25,), 0)
    assert staging_bytes(whole, *H100) == ((4 * 132 * 4, 4),)
    assert staging_bytes(whole, *T4) == ((4 * 256, 4),)


@pytest.mark.parametrize(("shape", "dims"), [((64, 1000), (0,)), ((4096, 768), (1,)), ((0, 5), (0,)), ((7,), (0,))])
def test_small_or_wide_work_needs_none(shape, dims):
    assert staging_bytes(reduction(shape, *dims), *H100) == ()


def test_what_32_bits_do_not_index_goes_in_pieces():
    # 2**31 bytes and more: two halves of the rows, one after the other; half precision keeps sums of both waiting in float32
    work = reduction((2**19, 3072), 0, itemsize=2, converts=False)
    stages = staging_bytes(work, *H100)
    assert len(stages) == 2
    assert {stage[0] for stage in stages} == {3072 * 4}

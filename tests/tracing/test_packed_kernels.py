"""Kernels that take many matrices or copies at once on CUDA: what they hold, as PyTorch 2.15's host code allocates it."""

from __future__ import annotations

import pytest
import torch

from sizer.tracing.allocations import PRODUCT
from sizer.tracing.cuda import many_tensors
from sizer.tracing.device import Device

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
HALF, FLOAT = torch.bfloat16, torch.float32


def held_by_products(capability: tuple[int, int], groups: int, rows: int, dtype: torch.dtype = HALF) -> list[list[int]]:
    """What [groups * rows, 512] by [groups, 512, 768] holds beside its result."""
    first = torch.empty(groups * rows, 512, dtype=dtype, device="meta")
    second = torch.empty(groups, 512, 768, dtype=dtype, device="meta")
    ends = torch.empty(groups, dtype=torch.int32, device="meta")
    out = torch.empty(groups * rows, 768, dtype=dtype, device="meta")
    return list(many_tensors.grouped_mm(Device("cuda", capability), (first, second, ends), {}, out))


@pytest.mark.parametrize(
    ("groups", "arguments"),
    [(1, 84), (8, 480), (31, 1884), (128, 7680)],  # 24 bytes of an even number of groups, and 36 of each
)
def test_cutlass_takes_arguments_for_each_group_and_descriptors_for_each_multiprocessor(groups: int, arguments: int):
    assert held_by_products(HOPPER, groups, 512) == [[arguments, 132 * 512]]


@pytest.mark.parametrize(("rows", "each"), [(128, 5_376), (129, 5_888)])
def test_on_blackwell_few_rows_take_other_tiles(rows: int, each: int):
    assert held_by_products(BLACKWELL, 8, rows) == [[480, 152 * each]]  # of the largest, GB200


@pytest.mark.parametrize(("capability", "dtype"), [(AMPERE, HALF), (HOPPER, FLOAT), (BLACKWELL, torch.float16)])
def test_other_dtypes_and_devices_multiply_group_by_group(capability: tuple[int, int], dtype: torch.dtype):
    assert held_by_products(capability, 8, 512, dtype) == [[PRODUCT]]


def held_by_copies(dtypes: tuple[torch.dtype, torch.dtype], rows: int) -> list[list[int]]:
    """What packing [rows, 768] and [768] in 8 chunks holds."""
    tensors = [torch.empty(shape, dtype=dtypes[0], device="meta") for shape in ((rows, 768), (768,))]
    out = torch.empty(8 * (-(-rows // 8) * 768 + 96), dtype=dtypes[1], device="meta")
    device, args = Device("cuda", HOPPER), (tensors, 0, 8)
    found = list(many_tensors.chunk_cat(device, args, {"out": out}, None))
    assert list(many_tensors.chunk_cat_mixed_dtype(device, args, {"out": out}, None)) == found
    return found


def test_a_table_tells_each_block_what_to_pack():
    # chunks of 125 rows: 384,000 bytes in 188 blocks of 2,048, and 384 in one; 6 columns of 2 rows, and 2 ends
    assert held_by_copies((FLOAT, FLOAT), 1000) == held_by_copies((HALF, FLOAT), 1000) == [[(6 * 2 + 2 + 189) * 8]]


def test_what_the_kernel_does_not_take_is_padded():
    assert held_by_copies((torch.float16, FLOAT), 1000) == [[]]  # 8 times 125: nothing to pad
    assert held_by_copies((torch.float16, FLOAT), 1001) == [[1008 * 768 * 2]]


@pytest.mark.parametrize(("columns", "launched"), [(2**14, 32), (2**22, 2048)])
def test_a_table_tells_each_block_what_to_unpack(columns: int, launched: int):
    # of each of 8 chunks 2 * 2**15 bytes, 32 blocks of 2,048; or 8,192, 16 tiles for each of 4,224 at once: 4 of each of 4 chunks
    gathered = torch.empty(8, 2 * columns, dtype=HALF, device="meta")
    out = [torch.empty(8, columns, dtype=HALF, device="meta") for _ in range(2)]
    args = gathered, [columns, columns], 1
    (held,) = many_tensors.split_with_sizes_copy(Device("cuda", HOPPER), args, {"out": out}, None)
    assert held == [(4 * 2 + 1 + launched) * 8]

"""CUB's scratch for sorts, against PyTorch 2.15 over the null driver: the last blocks of `torch.sort` and `index_put_`."""

from __future__ import annotations

import pytest

from sizer.catalogue.gpus import GPUS
from sizer.estimating.tracer import Tracer
from sizer.query.text import parse_query
from sizer.tracing.cuda.by_hardware import FLOAT, KEYS, NUMBERED, RUNS, WHOLE, sort_block, sort_bytes
from sizer.tracing.cuda.by_hardware import UNIQUE as KEPT

# By GPU and bytes of a key: bytes for 5,000 and for 200,000 keys with places of 8 bytes.
SORTED = {
    "h100-80gb": {1: (4607, 61951), 2: (56063, 2041599), 4: (70143, 2447615), 8: (99327, 3261951)},
    "rtx-4090": {1: (2056703, 3811583), 2: (4027903, 5977599), 4: (71167, 2476287), 8: (99327, 3271167)},
    "a100-40gb": {1: (2302463, 4057343), 2: (4519423, 6469119), 4: (71167, 2476287), 8: (99327, 3271167)},
    "t4": {1: (500223, 2255103), 2: (914943, 2864639), 4: (71167, 2482431), 8: (99327, 3290623)},
}
# By GPU: bytes of `index_put_(.., accumulate=True)` with 50,000 indices into 100, 1,000 and 100,000 rows.
ACCUMULATED = {
    "h100-80gb": (13823, 816127, 818175),
    "rtx-4090": (16895, 819199, 821247),
    "t4": (20991, 823295, 825343),
}
# By GPU: bytes with which an embedding's gradient sorts 50,000 and 400,000 int32 indices of 1,000 rows.
NARROW = {"h100-80gb": (413183, 3268095), "rtx-4090": (413183, 3268095), "t4": (410111, 3239423)}


# By GPU, what `unique` of 1,000,000 int16, int32, float32 and int64 holds: while it sorts, and while it keeps one of each run.
UNIQUE = {
    "t4": ((2864639, 7167), (4182783, 7167), (4182783, 7167), (8381439, 13311)),
    "a100-80gb": ((6469119, 1791), (4136703, 2559), (4136703, 2559), (8284159, 5119)),
    "rtx-4090": ((5977599, 7167), (4136703, 7167), (4136703, 7167), (8284159, 13311)),
    "h100-80gb": ((2110207, 2303), (4150015, 2047), (4157183, 2047), (8195071, 2815)),
    "b200": ((2138879, 2303), (4150015, 2303), (4157183, 2303), (8195071, 2815)),
}


@pytest.mark.parametrize("gpu", SORTED)
def test_a_sort_holds_what_cub_asks_for(gpu: str) -> None:
    for itemsize, expected in SORTED[gpu].items():
        words = ("scratch", str(itemsize), str(itemsize))
        assert tuple(sort_block(gpu, words, (1, count)) for count in (5_000, 200_000)) == expected


@pytest.mark.parametrize("gpu", ACCUMULATED)
def test_keys_of_more_than_8_bits_are_there_twice(gpu: str) -> None:
    found = [sort_block(gpu, ("indices",), (50_000, rows)) for rows in (100, 1_000, 100_000)]
    assert tuple(found) == ACCUMULATED[gpu]


@pytest.mark.parametrize("gpu", NARROW)
def test_narrow_pairs_have_tiles_of_their_own(gpu: str) -> None:
    assert tuple(sort_bytes(gpu, count, (4, 4), 2) for count in (50_000, 400_000)) == NARROW[gpu]


@pytest.mark.parametrize("gpu", UNIQUE)
def test_unique_elements_are_sorted_and_kept(gpu: str) -> None:
    kinds = ("2", WHOLE), ("4", WHOLE), ("4", FLOAT), ("8", WHOLE)
    for words, expected in zip(kinds, UNIQUE[gpu], strict=True):
        assert tuple(sort_block(gpu, (name, *words), (1_000_000,)) for name in (KEYS, KEPT)) == expected
    numbered = {"t4": 5119, "a100-80gb": 3071, "rtx-4090": 5119}.get(gpu, 3583)
    assert [sort_block(gpu, (name,), (1_000_000,)) for name in (NUMBERED, RUNS)] == [numbered, 21759]


def test_short_rows_need_places_alone() -> None:
    names = ("places", "pairs", "keys", "scratch")
    assert [sort_block("t4", (name, "2", "2"), (1, 4096)) for name in names] == [4096 * 8, 0, 0, 0]
    together = [sort_block("t4", (name, "2", "2"), (8, 5000)) for name in names]
    assert together[:3] == [320_000, 320_000, 80_000]
    assert together[3] == 1_264_639  # float16 [8, 5000] over the null driver
    assert [sort_block("t4", (name, "2", "2"), (200, 5000)) for name in names] == [8_000_000, 0, 0, 10_000_383]


# Experts are found by a sort of all tokens' choices: of 256 tokens and 8 choices up to two sequences are short rows, more are not.
def test_a_model_of_experts_is_a_line_over_the_batch() -> None:
    query = "arch=hf:qwen3-30b-a3b&dtype=bfloat16&batch=1,2,8&seq=256&gpu=h200&mode=inference"
    request = parse_query(query)
    assert Tracer(request, GPUS["h200"]).trace("bfloat16", request.batches).family.lines

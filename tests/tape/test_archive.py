"""Tapes as bytes: what is read back is what was written, and anything else is refused."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

from sizer.base.codec import DecodeError
from sizer.tape.affine import fit_affine
from sizer.tape.archive import Kernel, Traced, pack, unpack
from sizer.tape.family import TapeFamily
from sizer.tape.size_queries import AffineSizeQuery, SizeQuery
from tests.report.reports import step

QUERY = SizeQuery(kind="cudnn", words=("float16", "forward"), numbers=(2, 64, 7), blocks=(3, 4))
AFFINE = AffineSizeQuery(kind="cudnn", words=("float16",), constant=(0, 64), per_item=(1, 0), blocks=(3,))
LINE = replace(fit_affine(step(2), step(3)), size_queries=(AFFINE,))
TRACED = Traced(
    family=TapeFamily(
        lines=((1, LINE), (9, LINE)),
        exact=(replace(step(1), size_queries=(QUERY,), second_forward=13), step(7, stand_ins=("four boxes",))),
        smallest=2,
    ),
    failure="aten.foo in head at batch 3: no kernel ä",
    note="traced separately at each batch size",
    kernels=(Kernel(operator="attention", kernel="flash", why="bfloat16", modules=12),),
    halves_differ=True,
)


@pytest.mark.parametrize("traced", [TRACED, Traced()], ids=["full", "empty"])
def test_what_was_packed_comes_back(traced: Traced) -> None:
    found = unpack(pack(traced))
    assert found == traced
    for tape in found.family.tapes():
        tape.validate()


def test_a_tape_taken_from_the_archive_is_the_same_at_every_batch() -> None:
    found = unpack(pack(TRACED)).family
    assert [found.evaluate(batch) for batch in (1, 2, 8, 9, 100)] == [TRACED.family.evaluate(batch) for batch in (1, 2, 8, 9, 100)]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: b"no archive",
        lambda data: data[:-9],
        lambda data: zlib.compress(zlib.decompress(data)[:-8]),
        lambda data: zlib.compress(b"7\n" + zlib.decompress(data)),
        lambda data: zlib.compress(zlib.decompress(data).replace(b'"little"', b'"middle"')),
        lambda data: zlib.compress(zlib.decompress(data).replace(b'"smallest"', b'"smellest"')),
    ],
    ids=["empty", "text", "cut", "short", "length", "byte order", "key"],
)
def test_anything_else_is_refused(change) -> None:
    with pytest.raises(DecodeError, match=r"these (are not the bytes of tapes|tapes are of a machine)"):
        unpack(change(pack(TRACED)))


def test_a_truncated_archive_does_not_pass_for_a_smaller_one() -> None:
    data = pack(TRACED)
    for end in range(0, len(data) - 5, 7):
        with pytest.raises(DecodeError, match="these are not the bytes of tapes"):
            unpack(data[:end])

"""How a report was computed: workspaces read off the tapes, and everything as sections of lines."""

from __future__ import annotations

import pytest

from sizer.allocator.allocator import describe
from sizer.catalogue.gpus import GPUS
from sizer.report.explanation import (
    Explanation,
    Formula,
    KernelUse,
    explain_workspaces,
    sections,
)
from sizer.tape.tape import Tape
from tests.tape.tapes import make_tape

KERNEL = KernelUse(operator="attention", kernel="flash", why="no mask", dtypes=("bfloat16",), modules=32)


def tape(*events) -> Tape:  # type: ignore[no-untyped-def]
    return make_tape(events, batch=4)


def test_most_at_once_calls_and_what_is_kept() -> None:
    once = tape(("mm", 100, "workspace"), "-mm", ("out", 8), ("sort", 30, "workspace"), ("keys", 5, "workspace"), "-keys",
                "-sort", ("handle", 70, "workspace"))  # fmt: skip
    found = explain_workspaces({"float32": once})
    assert [(use.op, use.bytes, use.calls, use.kept) for use in found] == [
        ("aten.mm", 100, 1, False),
        ("aten.handle", 70, 1, True),
        ("aten.sort", 30, 1, False),
        ("aten.keys", 5, 1, False),
    ]
    assert {use.batch for use in found} == {4}


def one_operator(*events: int) -> Tape:
    """Blocks of one operator: a positive number allocates as many bytes, a negative one releases the block of that number."""
    names = [f"b{i}" for i in range(len(events))]
    made, script = [], []
    for event in events:
        if event > 0:
            made.append(names.pop(0))
            script.append((made[-1], event, "workspace"))
        else:
            script.append(f"-{made[-event - 1]}")
    whole = make_tape(script)
    return Tape(**{name: getattr(whole, name) for name in Tape.__slots__} | {"ops": whole.ops[:1] * len(whole.sizes)})


@pytest.mark.parametrize(
    ("events", "most", "calls"),
    [
        ((10, -1, 10, -2), 10, 1),  # stages of one call follow each other
        ((10, 5, -2, -1), 15, 1),
        ((10, 5, -2, -1, 20, -3), 20, 1),
    ],
)
def test_stages_of_one_call(events: tuple[int, ...], most: int, calls: int) -> None:
    (use,) = explain_workspaces({"float32": one_operator(*events)})
    assert (use.bytes, use.calls) == (most, calls)


def test_two_calls_have_something_between_them() -> None:
    first = make_tape([("mm", 10, "workspace"), "-mm", ("out", 4), ("again", 10, "workspace"), "-again"])
    ops = first.ops[:]
    ops[2] = ops[0]  # the third block is the first one's operator again
    (use,) = explain_workspaces({"float32": Tape(**{n: getattr(first, n) for n in Tape.__slots__} | {"ops": ops})})
    assert (use.bytes, use.calls) == (10, 2)


def test_dtypes_that_held_the_same_share_a_row() -> None:
    wide, narrow = tape(("mm", 100, "workspace"), "-mm"), tape(("mm", 50, "workspace"), "-mm")
    found = explain_workspaces({"float32": wide, "bfloat16": narrow, "float16": narrow})
    assert [(use.bytes, use.dtypes) for use in found] == [(100, ("float32",)), (50, ("bfloat16", "float16"))]
    assert explain_workspaces({}) == ()


def test_lines_group_operators_by_formula() -> None:
    both = tape(
        ("mm", 2048, "workspace"), "-mm", ("out", 4), ("bmm", 1024, "workspace"), "-bmm", ("conv", 512, "workspace")
    )
    formulas = {"aten.mm": Formula(text="cuBLAS"), "aten.bmm": Formula(text="cuBLAS"),
                "aten.conv": Formula(text="copies", modelled=True)}  # fmt: skip
    found = explain_workspaces({"float32": both, "bfloat16": both}, formulas)
    told = Explanation(rules="CUDA", kernels=(KERNEL,), workspaces=found, exact=("weights",))
    kernels, inside, exact = sections(told)
    assert kernels.title == "Kernels, by the rules of CUDA"
    assert kernels.lines == ("attention: flash (no mask), 32 modules; bfloat16",)
    assert inside.title == "Internal memory of kernels, at batch 4"
    assert inside.lines == (
        "cuBLAS",
        "  mm: 2.00 KiB, 1 call",
        "  bmm: 1.00 KiB, 1 call",
        "Modelled: copies",
        "  conv: 512 B, 1 call, kept",
    )
    assert (exact.title, exact.lines) == ("Exact", ("weights",))


def test_without_a_formula_it_says_so() -> None:
    told = Explanation(rules="CUDA", workspaces=explain_workspaces({"float32": tape(("mm", 8, "workspace"), "-mm")}))
    assert sections(told)[0].lines[0] == "No formula is given."


@pytest.mark.parametrize("backend", sorted({gpu.backend for gpu in GPUS.values()}))
def test_every_allocator_of_the_catalogue_describes_itself(backend: str) -> None:
    assert all(describe(backend))


def test_allocators_are_described_with_their_own_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sizer.allocator.cuda.MIN_BLOCK", 256)
    assert "sizes rounded up to 256 B" in describe("cuda")[0]
    assert "expandable segments" in describe("cuda", expandable_segments=True)[0]

"""The estimate against what PyTorch's own host code allocated over the null driver: cases of the suite, to the byte."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from sizer.device.record.files import CaseRecord, read_measured
from tests.benchmarks.bench_accuracy import hold
from tests.device.replayed import disagreements

RECORDED = Path(__file__).parent / "recorded"
FOLDERS = sorted(RECORDED.iterdir())
CASES = {f"{folder.name}/{case.name}": case for folder in FOLDERS for case in read_measured(folder)}

OTHER_VERSIONS = 0.02  # with other versions than those recorded, the models' own code and PyTorch's rules may differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """How far off the peaks of a case are, as signed shares from low to high; and why."""

    allocated: tuple[float, float] = (0.0, 0.0)
    reserved: tuple[float, float] = (0.0, 0.0)
    why: str = ""


_ORDER = "not found yet: a block of the hidden state falls otherwise in the forward pass"
_ROWS = "layer norm's partial sums above 65,536 narrow rows, and index_put's sort"
KNOWN = {
    "gpt2-b4-float32": Known(allocated=(-0.0006, 0.0), reserved=(0.0, 0.0015), why=_ORDER),
    "gpt2-b4-float32-loop": Known(allocated=(-0.0006, 0.0), reserved=(0.0, 0.0015), why=_ORDER),
    "gpt2-b4-bfloat16": Known(allocated=(0.0, 0.001), why=_ORDER),
    "gpt2-b4-bfloat16-eager": Known(allocated=(0.0, 0.0002), reserved=(0.0, 0.004), why=_ORDER),
    "gpt2-b4-amp-float16": Known(allocated=(0.0, 0.0001), reserved=(-0.0033, 0.0), why=_ORDER),
    "gpt2-b16-bfloat16-checkpointing": Known(allocated=(-0.0003, 0.0), reserved=(-0.009, 0.0), why=_ORDER),
    "bert-base-uncased-b16-amp-float16": Known(allocated=(-0.0004, 0.0), reserved=(0.0, 0.0015), why=_ORDER),
    "swin_t-b32-float32": Known(allocated=(0.0, 0.0001), reserved=(0.0, 0.001), why=_ROWS),
    "swin_t-b32-amp-float16": Known(allocated=(-0.0004, 0.0), reserved=(0.0, 0.0022), why=_ROWS),
    "vit_b_16-b32-float32": Known(allocated=(-0.00001, 0.0), why="a few KiB"),
}


def _versions_are_those(case: CaseRecord) -> bool:
    """Whether the models' own code and the rules by PyTorch's version are those of the recording."""
    found = case.measured.measurement.versions
    return all(found[name] == version(name).split("+")[0] for name in ("torch", "torchvision", "transformers"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_allocators_replay_gives_pytorchs_own_figures(folder: Path):
    recorded = read_measured(folder)
    assert len(recorded) > 10
    assert [text for case in recorded for text in disagreements(case)] == []


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_pytorch_allocates(name: str):
    case = CASES[name]
    slack = 0.0 if _versions_are_those(case) else OTHER_VERSIONS
    held = hold(name, case.measured)
    allowed = KNOWN.get(case.name, Known())
    for quantity, limits in (("peak_allocated_bytes", allowed.allocated), ("peak_reserved_bytes", allowed.reserved)):
        low, high = limits
        assert low - slack <= held.errors[quantity] <= high + slack, (quantity, held.errors[quantity])


def test_nearly_all_are_exact():
    recorded = {case.name for case in CASES.values()}
    assert set(KNOWN) <= recorded
    assert len(KNOWN) / len(recorded) < 0.3

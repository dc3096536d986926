"""The estimate against what PyTorch's own host code allocated over the null driver: cases of the suite, to the byte."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from sizer.device.record.files import CaseRecord, read_measured
from tests.benchmarks.bench_accuracy import hold
from tests.device.replayed import disagreements

RECORDED = Path(__file__).parent / "recorded"
FOLDERS = sorted(RECORDED.iterdir())
OTHER_VERSIONS = (
    0.2  # with other versions than any that was recorded models' code, PyTorch's rules and cuDNN's engines differ
)


def _versions_are_those(case: CaseRecord) -> bool:
    """Whether the models' own code and the rules by PyTorch's version are those of the recording."""
    found = case.measured.measurement.versions
    return all(found[name] == version(name).split("+")[0] for name in ("torch", "torchvision", "transformers"))


EVERY = {f"{folder.name}/{case.name}": case for folder in FOLDERS for case in read_measured(folder)}
# Those of the installed versions; where none was recorded with them, all.
CASES = {name: case for name, case in EVERY.items() if _versions_are_those(case)} or EVERY


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_allocators_replay_gives_pytorchs_own_figures(folder: Path):
    recorded = read_measured(folder)
    assert len(recorded) >= 8
    assert [text for case in recorded for text in disagreements(case)] == []


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_pytorch_allocates(name: str):
    case = CASES[name]
    slack = 0.0 if _versions_are_those(case) else OTHER_VERSIONS
    held = hold(name, case.measured)
    for quantity in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert abs(held.errors[quantity]) <= slack, (quantity, held.errors[quantity])

"""The oldest supported PyTorch's own host code against the estimate by its rules, to the byte.

`recorded/h100-80gb-2.11` was made by tests/null_driver/record.py with torch 2.11.0, torchvision 0.26.0 and transformers 5.17.0. No
case has a convolution, so that it does not depend on cuDNN's version.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from sizer.device.record.files import read_measured
from tests.benchmarks.bench_accuracy import hold
from tests.device.replayed import disagreements

CASES = {case.name: case for case in read_measured(Path(__file__).parent / "recorded" / "h100-80gb-2.11")}


def test_cases_are_those_of_the_oldest_versions() -> None:
    found = [case.measured.measurement.versions for case in CASES.values()]
    assert len(found) == 7
    assert {(said["torch"], said["transformers"]) for said in found} == {("2.11.0", "5.17.0")}


@pytest.mark.parametrize("name", CASES)
def test_the_replay_gives_the_allocators_own_figures(name: str) -> None:
    assert list(disagreements(CASES[name])) == []


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_pytorch_allocates(name: str) -> None:
    measured = CASES[name].measured
    recorded = measured.measurement.versions["transformers"]
    if version("transformers") != recorded:
        pytest.skip(f"the models' own code is that of another transformers than {recorded}")
    errors = hold(name, measured).errors
    assert (errors["peak_allocated_bytes"], errors["peak_reserved_bytes"]) == (0.0, 0.0)

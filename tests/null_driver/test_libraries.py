"""Steps of other libraries in `size_step` against PyTorch's own CUDA code over the null driver, to the byte.

`.ci/full` installs all of these libraries and records what was compared in libraries.json. `.ci/run` repeats torchao's steps.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from sizer.estimating.custom import size_step
from tests.null_driver.conftest import Run
from tests.null_driver.libraries import STEPS

GPU = "a100-80gb"
PACKAGES = {"torchao": "torchao", "trl": "trl", "torchtune": "torchtune", "fabric": "lightning"}
PACKAGES["liger"] = "liger-kernel"
OTHER_GPUS = {"liger": "h100-80gb", "trl-loss": "h100-80gb", "liger-layers": "rtx-4090"}
RECORDED = Path(__file__).parent / "libraries.json"
RECORD = "SIZER_RECORD_LIBRARIES"


@pytest.mark.full
@pytest.mark.parametrize("name", STEPS)
def test_a_librarys_step_takes_what_it_takes_on_cuda(run_on_null: Run, name: str) -> None:
    package, gpu = PACKAGES[name.partition("-")[0]], OTHER_GPUS.get(name, GPU)
    (estimate,) = size_step(STEPS[name], steps=2, gpu=gpu).estimates
    found = [max(phase.peak_allocated_bytes for phase in estimate.phases), estimate.peak_reserved_bytes]
    assert found == run_on_null("tests.null_driver.libraries", name, gpu=gpu)
    if os.environ.get(RECORD):
        rows = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
        versions = {one: version(one) for one in ("torch", package)}
        rows[name] = {"allocated_bytes": found[0], "reserved_bytes": found[1], "gpu": gpu, "versions": versions}
        RECORDED.write_text(json.dumps(dict(sorted(rows.items())), indent=2) + "\n", encoding="utf-8")


def test_every_librarys_step_is_recorded_as_equal() -> None:
    rows = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert set(rows) == set(STEPS)
    assert all(row["allocated_bytes"] > 0 and set(row["versions"]) > {"torch"} for row in rows.values())

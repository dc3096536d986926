"""The pytest plugin: guards of GPU memory in a test session of somebody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sizer.running.driver.build import find_obstacle
from tests.running.conftest import ROOT

TESTS = """
import pytest
import torch

PROCESSES = set()


def step(width):
    model = torch.nn.Linear(width, width, bias=False, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, width, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def batch():
    return torch.randn(4, 4, device="cuda")


@pytest.mark.gpu_memory(gpu="rtx-4090", max="20GiB")
def test_fits(batch):
    assert batch.is_cuda and torch.cuda.get_device_name() == "NVIDIA GeForce RTX 4090"
    step(1024)


@pytest.mark.gpu_memory(gpu="rtx-4090", max_allocated="1MiB")
def test_more_than_allowed():
    step(1024)


@pytest.mark.gpu_memory(gpu="rtx-4060-8gb")
def test_more_than_the_device_has():
    torch.empty(9 * 2**30, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu_memory(gpu="rtx-4090")
def test_numbers(batch):
    assert float(batch.std()) > 0.5


@pytest.mark.gpu_memory(gpu="rtx-4090", tolerance="1%")
def test_growth():
    step(int(open("width").read()))


@pytest.mark.gpu_memory(gpu="rtx-4090")
def test_a_part(gpu_memory):
    with gpu_memory(max_allocated="4MiB") as used:
        torch.empty(2**20, dtype=torch.uint8, device="cuda")
    assert used.peak_allocated_bytes == 2**20
    with gpu_memory(max_allocated="4MiB"):
        torch.empty(2**23, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu_memory(gpu="rtx-4090", most="1GiB")
def test_a_marker_of_another_name():
    pass


def test_the_host_has_no_gpu():
    assert not torch.cuda.is_available()
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rA",
            "-p",
            "sizer.running.pytest_plugin",
            "-p",
            "no:xdist",
            *options,
            "test_memory.py",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout


def test_guards_fail_with_lines_and_modules(tmp_path: Path):
    if (obstacle := find_obstacle()) is not None:
        pytest.fail(obstacle) if os.environ.get("CI") else pytest.skip(obstacle)
    (tmp_path / "test_memory.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "width").write_text("1024")
    _, first = run(tmp_path, "--gpu-memory-update")
    outcomes = dict(
        reversed(line.split(" ")[:2]) for line in first.splitlines() if line.startswith(("PASSED", "FAILED"))
    )
    assert {name.partition("::")[2]: outcome for name, outcome in outcomes.items()} == {
        "test_fits": "PASSED",
        "test_more_than_allowed": "FAILED",
        "test_more_than_the_device_has": "FAILED",
        "test_numbers": "FAILED",
        "test_growth": "PASSED",
        "test_a_part": "FAILED",
        "test_a_marker_of_another_name": "FAILED",
        "test_the_host_has_no_gpu": "PASSED",
    }, first
    assert "more than max_allocated=1.00 MiB" in first and "test_memory.py:9" in first
    assert "gpu_memory on rtx-4060-8gb: the process needs 9." in first and "the device has 7." in first
    assert "assert shapes and memory, not numbers" in first
    assert "8.00 MiB allocated, more than 4.00 MiB" in first
    assert "allowed are gpu, max, max_allocated, tolerance by name" in first
    stored = json.loads((tmp_path / "gpu_memory" / "test_memory.json").read_text())
    assert stored["test_growth"]["gpu"] == "rtx-4090" and stored["test_growth"]["peak_allocated_bytes"] > 8 * 2**20

    (tmp_path / "width").write_text("2048")
    _, second = run(tmp_path, "-k", "growth")
    assert "allocated memory grew from" in second and "lines that grew:" in second and "test_memory.py:9" in second

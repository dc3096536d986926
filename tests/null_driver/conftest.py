"""The null driver, built once for all of these tests, and processes that run over it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sizer.catalogue.hardware import HARDWARE
from tests.null_driver.build import null_environment

ROOT = Path(__file__).parent.parent.parent
SECONDS = 300

Run = Callable[..., dict]


def _buildable() -> None:
    missing = [name for name in ("gcc", "nm") if shutil.which(name) is None]
    if torch.version.cuda is None:
        missing.append("a CUDA build of PyTorch")
    if missing:
        reason = f"the null driver needs {', '.join(missing)}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


@pytest.fixture(scope="session")
def run_on_null() -> Run:
    """Runs a module of these tests over the null driver of a GPU (a key of the catalogue, and its memory in bytes where it is
    another) and returns what its last line says in JSON."""
    _buildable()

    def run(
        module: str,
        *arguments: str,
        gpu: str,
        total_bytes: int | None = None,
        **environment: str,
    ) -> dict:
        hardware = HARDWARE[gpu]
        if total_bytes is not None:
            hardware = replace(hardware, gpu=replace(hardware.gpu, total_bytes=total_bytes))
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, **null_environment(hardware), **environment},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run

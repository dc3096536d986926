"""Dry runs of small scripts, one process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sizer.running.driver.build import find_obstacle

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
_SEARCHED = [str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The exit status of `sizer run`, what it printed, and its JSON (empty if there is none)."""

    status: int
    stdout: str
    stderr: str
    json: dict

    @property
    def figures(self) -> dict:
        (row,) = self.json["estimates"]
        return row


DryRunner = Callable[..., DryRun]


@pytest.fixture
def dry_run(tmp_path: Path) -> DryRunner:
    """Run `sizer run` with some options and a command; scripts are found by name."""
    obstacle = find_obstacle()
    if obstacle is not None:
        pytest.fail(obstacle) if os.environ.get("CI") else pytest.skip(obstacle)

    def run(*words: str, cwd: Path = tmp_path, **environment: str) -> DryRun:
        out = tmp_path / "out.json"
        out.unlink(missing_ok=True)
        words = tuple(str(SCRIPTS / word) if (SCRIPTS / word).is_file() else word for word in words)
        done = subprocess.run(
            [sys.executable, "-m", "sizer", "run", "--json", str(out), *words],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *_SEARCHED)), **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
        data = json.loads(out.read_text()) if out.exists() else {}
        return DryRun(status=done.returncode, stdout=done.stdout, stderr=done.stderr, json=data)

    return run

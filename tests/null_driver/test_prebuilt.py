"""The null driver that is shipped is what a compiler makes of its sources, and needs none."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sizer.running.driver import build, prebuilt
from sizer.running.driver.compiling import LIBRARIES, RUNTIME, PyTorch, symbols_of
from sizer.running.driver.compiling import build as compile_driver


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def no_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_the_shipped_driver_is_of_these_sources_and_for_this_pytorch():
    told = "run `python -m sizer.running.driver.prebuilt FOLDER...` as CONTRIBUTING.md says"
    assert prebuilt.covers(build.find_pytorch()), told


@pytest.mark.usefixtures("empty_cache", "no_tools")
def test_no_compiler_is_needed_where_it_fits():
    assert build.find_obstacle() is None
    assert all((build.built_driver() / name).exists() for name in LIBRARIES)


def test_it_answers_what_a_driver_of_this_pytorch_does(empty_cache: Path):
    shipped, compiled = (empty_cache / name for name in ("shipped", "compiled"))
    for folder in (shipped, compiled):
        folder.mkdir()
    prebuilt.unpack(shipped)
    compile_driver(compiled, build.find_pytorch())
    for name in LIBRARIES:
        assert symbols_of("--defined-only", compiled / name, "-D") <= symbols_of("--defined-only", shipped / name, "-D")
    listed = subprocess.run(["nm", "-D", shipped / RUNTIME], check=True, capture_output=True, text=True).stdout
    needed = {tuple(map(int, version.split("."))) for version in re.findall(r"@GLIBC_([\d.]+)", listed)}
    assert max(needed) <= (2, 14)


@pytest.mark.usefixtures("no_tools")
def test_a_pytorch_that_it_does_not_cover_needs_a_compiler(empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    found = build.find_pytorch()
    for version in ("2.9.1+cu130", "3.0.0.dev20270101"):
        assert not prebuilt.covers(PyTorch(version=version, folder=found.folder))
    assert prebuilt.covers(PyTorch(version=f"{found.version.partition('+')[0]}+cu130", folder=found.folder))
    assert not prebuilt.covers(PyTorch(version=found.version, folder=empty_cache / "torch"))  # of another CUDA
    monkeypatch.setattr(prebuilt, "ARCHIVE", empty_cache / "none")
    assert build.find_obstacle() == "gcc and nm cannot be found: install gcc and binutils"


def test_changed_sources_are_compiled(empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prebuilt, "sources_digest", lambda: "another")
    folder = build.built_driver()
    assert (folder / "stubs.c").exists()
    assert folder.is_relative_to(empty_cache)

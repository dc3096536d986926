"""The package: what a wheel holds, and that it answers outside of the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

import sizer
from sizer.commands import app

ROOT = Path(sizer.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
QUERY = "arch=torchvision:resnet18&dtype=float32&batch=1&image=64&gpu=t4"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def requirements(path: str) -> set[str]:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_requirements_are_those_of_the_package():
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *(row for name in ("app", "timm", "adapters", "quantized") for row in extras[name])]
    assert requirements("requirements.txt") == set(asked)
    assert requirements("deploy/requirements-broker.txt") == set(extras["broker"])


def test_the_wheel_has_every_file(installed: Path):
    ours = {path.relative_to(ROOT) for path in (ROOT / "sizer").rglob("*") if path.is_file()}
    ours = {path for path in ours if "__pycache__" not in path.parts}
    assert {path.relative_to(installed) for path in (installed / "sizer").rglob("*") if path.is_file()} > ours
    for name in ("app.py", ".streamlit/config.toml", *(f"pages/{path.name}" for path in (ROOT / "pages").glob("*.py"))):
        assert (installed / "sizer/app" / name).read_bytes() == (ROOT / name).read_bytes()
    (metadata,) = installed.glob("*.dist-info/METADATA")
    assert f"Version: {sizer.__version__}" in metadata.read_text(encoding="utf-8")


def test_the_wheel_answers_outside_of_the_checkout(installed: Path, tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "sizer", "estimate", QUERY, "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["estimates"] == json.loads(sizer.estimate(QUERY).to_json())["estimates"]
    where = "import sizer.commands.app as app; print(app.script())"
    done = subprocess.run(
        [sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == installed / "sizer/app/app.py"
    assert not [*tmp_path.iterdir()]


def test_the_page_is_started_from_a_checkout(monkeypatch: pytest.MonkeyPatch):
    started: list = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append(arguments))
    from sizer.__main__ import main

    main(["app", "--", "--server.port", "8600"])
    assert started == [[sys.executable, "-m", "streamlit", "run", str(ROOT / "app.py"), "--server.port", "8600"]]


def test_the_command_is_the_module(capsys: pytest.CaptureFixture):
    module, _, function = PROJECT["scripts"]["sizer"].partition(":")
    assert (module, function) == ("sizer.__main__", "main")
    assert re.fullmatch(r"\d+\.\d+\.\d+", sizer.__version__)
    assert app.script() == ROOT / "app.py"

"""What can be held of `deploy/` without the programs that read it: the files parse, and name what is there."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import sizer
from sizer.service.variables import BROKER_VARIABLE, FOLDER_VARIABLE, LIMITS
from sizer.ui import hosting
from tests.test_project import requirements

PROJECT = Path(sizer.__file__).parent.parent
DEPLOY = PROJECT / "deploy"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, continued lines joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.strip().split(maxsplit=1)) for line in lines]


def arguments(name: str) -> list[str]:
    return [argument for instruction, argument in instructions() if instruction == name]


def constraints() -> dict[str, str]:
    lines = (DEPLOY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_image_holds_what_the_app_needs_and_nothing_else():
    copied = [source for argument in arguments("COPY") for source in shlex.split(argument)[:-1]]
    assert all((PROJECT / source).exists() for source in copied)
    files = {"requirements.txt", "deploy/requirements-broker.txt", "deploy/constraints.txt"}
    assert {"app.py", "pages", "sizer", ".streamlit", *files} == set(copied)
    ignored = (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)


def test_image_runs_as_nobody_in_public_mode():
    names = [name for name, _ in instructions()]
    assert arguments("USER") == ["sizer"]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))
    environment = dict(word.split("=", 1) for argument in arguments("ENV") for word in shlex.split(argument))
    assert environment["SIZER_PUBLIC"] == "1"
    assert environment["STREAMLIT_SERVER_ADDRESS"] == "0.0.0.0"


def test_programs_of_the_image_are_there_and_healthy_is_asked_where_it_is_told():
    (command,) = [json.loads(argument) for argument in arguments("CMD")]
    assert shutil.which(command[0], path=Path(sys.executable).parent)
    assert (PROJECT / command[-1]).is_file()
    (check,) = arguments("HEALTHCHECK")
    program = json.loads(check[check.index("CMD") + 4 :])
    (path,) = re.findall(r"127\.0\.0\.1:8501(/\w+)", program[-1])
    assert path in [route.path for route in hosting.routes()]
    assert arguments("EXPOSE") == ["8501"]
    # Nothing listens there: the check says so by its exit status, and is a program that runs.
    failed = subprocess.run(
        [sys.executable, *program[1:-1], program[-1].replace("8501", "9")], capture_output=True, text=True, timeout=60
    )
    assert failed.returncode == 1
    assert "URLError" in failed.stderr


@pytest.mark.parametrize("command", arguments("RUN"))
def test_commands_of_the_image_are_written_as_a_shell_reads_them(command):
    subprocess.run(["sh", "-n", "-c", command], check=True, timeout=60)


def test_constraints_hold_every_requirement_above_its_floor():
    def parts(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version)]

    pinned = constraints()
    required = requirements("requirements.txt") | requirements("deploy/requirements-broker.txt")
    for name, floor in required.items():
        assert parts(pinned[name]) >= parts(floor), name
    assert len(pinned) > 60
    assert pinned["nvidia-cudnn-cu13"]  # without it convolution workspaces are modelled


def test_compose_file_names_what_is_there():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    app, proxy, redis = (compose["services"][name] for name in ("app", "proxy", "redis"))
    assert (DEPLOY / app["build"]["context"] / app["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    assert (app["read_only"], app["cap_drop"]) == (True, ["ALL"])
    assert "ports" not in app  # nobody reaches it but through the proxy
    assert "outside" not in app["networks"]
    files = [volume.split(":")[0] for volume in proxy["volumes"] if volume.startswith("./")]
    assert files == ["./Caddyfile"]
    assert all((DEPLOY / file).is_file() for file in files)
    upstream = re.search(r"reverse_proxy (\w+):8501", (DEPLOY / "Caddyfile").read_text(encoding="utf-8"))[1]
    assert upstream in compose["services"]
    assert upstream in app["environment"]["STREAMLIT_SERVER_ALLOWED_HOSTS"].split()
    known = {*(limit.name for limit in LIMITS), BROKER_VARIABLE, FOLDER_VARIABLE}
    workers = [service for name, service in compose["services"].items() if name.startswith("worker")]
    assert len(workers) == 2
    for service in (app, *workers):
        assert {name for name in service["environment"] if name.startswith("SIZER_")} <= known
        assert service["environment"][BROKER_VARIABLE] == app["environment"][BROKER_VARIABLE]
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    for service in (redis, *workers):
        assert "ports" not in service
        assert "outside" not in service["networks"]


def test_workers_of_the_compose_file_are_programs_that_take_every_queue_between_them():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    queues = []
    for name in ("worker", "worker-short"):
        python, _, module, option, value = compose["services"][name]["command"]
        assert (python, module, option) == ("python", "sizer.service.broker.worker", "--queues")
        queues.append(set(value.split(",")))
    assert queues == [{"short", "long"}, {"short"}]


def test_service_leaves_jobs_the_namespaces_of_their_wall():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string((DEPLOY / "sizer.service").read_text(encoding="utf-8"))
    service = unit["Service"]
    assert set(service["RestrictNamespaces"].split()) == {"user", "net", "ipc"}
    assert "SystemCallFilter" not in service
    assert service["ExecStart"].endswith("-m streamlit run app.py")
    assert {"Unit", "Service", "Install"} == set(unit.sections())


def test_every_variable_is_documented():
    text = (PROJECT / "docs/hosting.md").read_text(encoding="utf-8")
    for limit in LIMITS:
        assert f"| `{limit.name}` | {limit.what} | {limit.default} |" in text

"""The files around the code: what is required, how the app is set up, what continuous integration runs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from streamlit import config as streamlit_config

import sizer

PROJECT = Path(sizer.__file__).parent.parent
REQUIREMENT = re.compile(r"(?P<name>[a-z0-9-]+)>=(?P<floor>[0-9.]+),<(?P<limit>[0-9.]+)")


def requirements(path: str) -> dict[str, str]:
    """Each required package and its lowest version; fails where a line is no range."""
    lines = (PROJECT / path).read_text(encoding="utf-8").splitlines()
    rows = [REQUIREMENT.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(rows), lines
    return {row["name"]: row["floor"] for row in rows}


def third_party(*folders: str) -> set[str]:
    """The packages from outside that the project's Python files import, wherever the import stands."""
    files = [
        file
        for folder in folders
        for file in ([PROJECT / folder] if folder.endswith(".py") else (PROJECT / folder).rglob("*.py"))
    ]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"sizer", "tests"}


IMPORTED_AS = {"PIL": "pillow", "yaml": "pyyaml"}  # packages whose modules have another name
# its detection losses ask for scipy by name when they run, its models with linear attention for flash-linear-attention
NEEDED_BY_TRANSFORMERS = {"scipy", "fla-core"}

# the errors and docs say how to install these
OF_AN_EXTRA = {"accelerate", "cut_cross_entropy", "diffusers", "liger_kernel", "sentence_transformers", "torchao", "triton", "trl"}
BROUGHT_BY_TRANSFORMERS = {"huggingface_hub"}  # its errors are part of transformers' configs
OF_THE_PLUGIN = {"pytest"}  # sizer.running's plugin is loaded by pytest alone
NEEDED_BY_STREAMLIT = {"python-multipart"}  # reads uploads; its floor is ours, because it is above what Streamlit asks


def test_what_is_required_is_what_is_imported():
    imported = {IMPORTED_AS.get(name, name) for name in third_party("app.py", "pages", "sizer")}
    of_broker = set(requirements("deploy/requirements-broker.txt"))
    needed = (imported | NEEDED_BY_TRANSFORMERS | NEEDED_BY_STREAMLIT) - of_broker - OF_THE_PLUGIN - OF_AN_EXTRA
    needed -= BROUGHT_BY_TRANSFORMERS
    assert set(requirements("requirements.txt")) == needed


def test_pytest_is_imported_by_the_plugin_alone():
    others = [path for path in (PROJECT / "sizer").rglob("*.py") if not path.name.startswith("pytest_")]
    assert not third_party(*map(str, others)) & OF_THE_PLUGIN


def test_what_a_broker_requires_is_imported_by_its_own_modules_alone():
    of_broker = requirements("deploy/requirements-broker.txt")
    elsewhere = [path for path in (PROJECT / "sizer").rglob("*.py") if path.parent.name != "broker"]
    assert third_party("sizer/service/broker") & of_broker.keys() == of_broker.keys()
    assert not third_party(*map(str, elsewhere)) & of_broker.keys()
    assert of_broker.items() <= requirements("tests/requirements.txt").items()


def test_the_supported_floor_is_required():
    floors = requirements("requirements.txt")
    assert (floors["torch"], floors["torchvision"]) == ("2.11", "0.26")
    assert (floors["transformers"], floors["streamlit"]) == ("5.17", "1.61")


def test_what_the_tests_require_beside():
    assert set(requirements("tests/requirements.txt")) - requirements("deploy/requirements-broker.txt").keys() == {
        "altair",
        "axe-playwright-python",
        "expecttest",
        "hatchling",
        "hypothesis",
        "mypy",
        "playwright",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
    }
    known = {
        *requirements("requirements.txt"),
        "accelerate",  # which peft brings
        "altair",
        "torchao",  # which .ci/run installs for its own tests
        "triton",  # which torch brings on Linux
        "lightning",  # these five by .ci/full
        "deepspeed",
        "liger_kernel",
        "torchtune",
        "trl",
        "datasets",  # which trl brings
        "safetensors",  # these two by transformers
        "tokenizers",
        "cut_cross_entropy",
        "diffusers",  # in works of the full tier, which .ci/full installs
        "torchtitan",  # of the clone that bench_torchtitan is given; once it was torchtrain
        "torchtrain",
        "axe_playwright_python",
        "hypothesis",
        "mypy",
        "playwright",
        "PIL",
        "pytest",
        "starlette",
        "huggingface_hub",
        "numpy",
        "yaml",
        "xdist",
        "websockets",
        "google",
        *requirements("deploy/requirements-broker.txt"),
    }
    assert third_party("tests") <= known


SETTINGS = tomllib.loads((PROJECT / ".streamlit/config.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("server.fileWatcherType", "none"),
        ("server.maxUploadSize", 16),
        ("server.maxWidgetStateSize", 3),
        ("server.maxMessageSize", 16),
        ("server.address", "127.0.0.1"),
        ("server.enableXsrfProtection", True),
        ("server.enableCORS", True),
        ("client.showErrorDetails", "none"),
        ("client.toolbarMode", "minimal"),
        ("client.disableDataExport", True),
        ("runner.postScriptGC", False),
        ("runner.fastReruns", False),
        ("browser.gatherUsageStats", False),
    ],
)
def test_the_app_is_set_up_for_the_public(option: str, value: object):
    section, _, name = option.partition(".")
    assert SETTINGS[section][name] == value


def options(settings: dict, path: str = "") -> list[str]:
    """The dotted names of all options in a settings file."""
    rows = ((f"{path}{name}", value) for name, value in settings.items())
    return [
        option for name, value in rows for option in (options(value, f"{name}.") if isinstance(value, dict) else [name])
    ]


@pytest.mark.parametrize("option", options(SETTINGS))
def test_streamlit_knows_every_option(option: str):
    streamlit_config.get_option(option)


def test_an_option_that_streamlit_lacks_is_caught():
    with pytest.raises(RuntimeError, match=r'Config key "server\.noSuchOption" not defined'):
        streamlit_config.get_option("server.noSuchOption")


def test_continuous_integration_runs_everything_and_names_no_host():
    script = PROJECT / ".ci/run"
    text = script.read_text(encoding="utf-8")
    assert script.stat().st_mode & 0o111 == 0o111
    assert "set -euo pipefail" in text
    for step in ("-r requirements.txt", "-r tests/requirements.txt", 'ruff" check', 'bin/mypy"', "-m pytest"):
        assert step in text
    assert not re.search(r"https?://|index-url|\w\.(com|org|co|io)\b", text)

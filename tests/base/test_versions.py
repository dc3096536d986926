"""PyTorch's version: how it is written, where it is asked for, and which GPUs a build of it has kernels for."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sizer
from sizer.base.versions import (
    NEWEST,
    OLDEST,
    READ,
    allocator_variable,
    cautions,
    format_version,
    installed_version,
    parse_version,
    rules_version,
)
from sizer.catalogue.gpus import GPUS
from sizer.tracing.cuda import builds

PACKAGE = Path(sizer.__file__).parent
# Where the installed version may be asked for: as a device's default, to tell it from the device's, and where the question is
# what the installed code does, not what the device would.
MAY_ASK = {
    "base/versions.py",
    "decision/lever_code.py",
    "decision/lever_table.py",  # which losses the installed code has
    "estimating/cautions.py",
    "commands/measurements.py",
    "tracing/compiled/compile_findings.py",  # the compiler that runs is the installed one, here too
    "tracing/compiled/install.py",  # to tell it from the device's
    "tracing/compiled/names.py",  # the compiler that runs is the installed one
    "tracing/device.py",
    "tracing/cuda/builds.py",
    "tracing/values/masks.py",
}


def test_versions_are_written_as_they_are_read() -> None:
    assert [parse_version(text) for text in ("2.11", "2.11.1", "3.0")] == [(2, 11), (2, 11), (3, 0)]
    assert format_version((2, 11)) == "2.11"
    assert format_version(installed_version()) == ".".join(torch.__version__.split(".")[:2])


@pytest.mark.parametrize("text", ["", "2", "2.", "2.x", "2.11.0+cu130", "²·¹", "2.11 ", "2.11.0.0"])
def test_other_texts_are_no_versions(text: str) -> None:
    with pytest.raises(ValueError, match="is not a version of PyTorch"):
        parse_version(text)


def _asks(source: str) -> bool:
    nodes = list(ast.walk(ast.parse(source)))
    named = any(
        isinstance(node, ast.ImportFrom) and "installed_version" in [a.name for a in node.names] for node in nodes
    )
    return named or any(
        isinstance(node, ast.Attribute) and node.attr in ("installed_version", "__version__") for node in nodes
    )


def test_rules_ask_the_device_for_its_version() -> None:
    asking = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if _asks(path.read_text(encoding="utf-8"))
    }
    of_rules = {name for name in asking if not name.startswith(("device/", "service/", "ui/"))}
    assert of_rules - {"base/versions.py"} == MAY_ASK - {"base/versions.py"}


def test_the_allocators_variable_by_version() -> None:
    assert allocator_variable((2, 8)) == "PYTORCH_CUDA_ALLOC_CONF"
    assert allocator_variable((2, 9)) == allocator_variable((2, 15)) == "PYTORCH_ALLOC_CONF"


def test_who_asks_is_caught() -> None:
    assert _asks("from sizer.base.versions import installed_version")
    assert _asks("import torch\nnew = torch.__version__ > '2'")
    assert not _asks("def rule(device):\n    return device.version >= (2, 14)")


def test_what_to_know_of_another_version() -> None:
    assert cautions(NEWEST, NEWEST) == ()
    (said,) = cautions(OLDEST, NEWEST)
    assert said.startswith("the rules are those of PyTorch 2.6, the code that ran is the installed 2.15")
    newer = cautions((9, 0), (9, 0))
    assert newer == (
        "PyTorch 9.0 is newer than the versions with known rules, 2.6 and 2.11 to 2.15: the rules of 2.15 are used",
    )
    assert len(cautions((9, 0), NEWEST)) == 2
    (older,) = cautions((2, 5), (2, 5))  # the installed one, which no query could ask for
    assert older.startswith(
        "PyTorch 2.5 is older than the versions with known rules, 2.6 and 2.11 to 2.15: the rules of 2.6"
    )


@pytest.mark.parametrize(
    ("target", "followed"), [((2, 7), "2.6"), ((2, 8), "2.6"), ((2, 9), "2.11"), ((2, 10), "2.11")]
)
def test_a_version_that_was_not_read_follows_a_neighbour_and_says_so(target: tuple[int, int], followed: str) -> None:
    assert format_version(rules_version(target)) == followed
    not_read, other = cautions(target, NEWEST)
    assert not_read == (
        f"PyTorch {format_version(target)} is not among the versions with known rules, 2.6 and 2.11 to "
        f"2.15: the rules of {followed} are used"
    )
    assert other.startswith(f"the rules are those of PyTorch {format_version(target)}, the code that ran is")


def test_versions_that_were_read_follow_themselves() -> None:
    assert [rules_version(version) for version in READ] == list(READ)
    assert (rules_version((1, 13)), rules_version((9, 0))) == (OLDEST, NEWEST)


@pytest.mark.parametrize(
    ("capability", "flags", "runs"),
    [
        ((7, 5), "sm_75 sm_80", True),
        ((7, 0), "sm_75 sm_80", False),  # older than every one
        ((8, 9), "sm_75 sm_80 sm_90", True),  # of the same major, and not older
        ((8, 0), "sm_86 sm_90", False),  # of the same major, but older
        ((10, 0), "sm_90 sm_120", False),  # another major
        ((12, 1), "sm_100 sm_120", True),
        ((11, 0), "sm_90 compute_100", True),  # PTX is compiled for what is newer
        ((9, 0), "compute_100", False),
        ((9, 0), "sm_90a", True),
        ((8, 0), "", False),
    ],
)
def test_whether_a_build_runs_on_a_gpu(capability: tuple[int, int], flags: str, runs: bool) -> None:
    assert builds.runs_on(capability, tuple(flags.split())) is runs


def test_a_volta_is_too_old_for_todays_wheels() -> None:
    said = builds.caution(GPUS["v100-16gb"], (2, 14))
    assert said is not None
    assert "PyTorch 2.14 has no kernels for the Tesla V100 (16 GB), whose" in said
    assert "capability is 7.0: it was built for sm_75, sm_80" in said
    assert [builds.caution(GPUS[key], (2, 14)) for key in ("t4", "rtx-4090", "b200", "cpu", "m2-ultra-64gb")] == [
        None
    ] * 5


def test_the_wheels_of_2_6_know_a_volta_but_no_blackwell() -> None:
    assert builds.caution(GPUS["v100-16gb"], (2, 6)) is None
    said = builds.caution(GPUS["rtx-5090"], (2, 6))
    assert said is not None
    assert "built for sm_50, sm_60, sm_70, sm_75, sm_80, sm_86, sm_90 and would fail there" in said


def test_every_other_gpu_of_the_catalogue_is_not_older() -> None:
    assert {key for key, gpu in GPUS.items() if builds.caution(gpu, NEWEST)} == {
        key for key, gpu in GPUS.items() if gpu.capability is not None and gpu.capability < (7, 5)
    }


def test_what_cuda_builds_have_says_nothing_of_another_makers_gpus() -> None:
    assert [builds.caution(GPUS[key], (2, 6)) for key in ("mi300x", "rx-9070-xt", "arc-b580", "max-1550")] == [None] * 4
    assert builds.caution(GPUS["gtx-1080-ti"], (2, 14)) is not None
    assert builds.caution(GPUS["gtx-1080-ti"], (2, 6)) is None
    # binaries for 8.6 run on 8.7, those for 10.0 and 12.0 on 10.3 and 12.1
    assert [builds.caution(GPUS[key], NEWEST) for key in ("jetson-agx-orin-64gb", "b300", "dgx-spark")] == [None] * 3


def test_the_wheels_of_a_version_nobody_read_are_not_guessed() -> None:
    assert builds.flags_of((9, 0)) is None
    assert builds.caution(GPUS["v100-16gb"], (9, 0)) is None


def test_an_installed_cuda_build_speaks_for_itself() -> None:
    if torch.version.cuda is None:
        pytest.skip("this PyTorch is built without CUDA")
    assert builds.flags_of(installed_version()) == tuple(torch._C._cuda_getArchFlags().split())
    unknown = replace(GPUS["a100-80gb"], capability=(3, 5))
    assert builds.caution(unknown, installed_version()) is not None


def test_a_build_without_cuda_is_told_by_its_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert builds.flags_of(NEWEST) == builds.WHEELS[NEWEST]


def test_the_report_says_that_pytorch_does_not_run_there() -> None:
    def setup():
        layer = torch.nn.Linear(2, 2).cuda()
        return lambda: layer(torch.zeros(1, 2, device="cuda")).sum().backward()

    report = sizer.size_step(setup, gpu="v100-16gb", torch="2.14")
    (said,) = [text for text in report.cautions if "has no kernels" in text]
    assert said in report.notes
    assert sizer.size_step(setup, gpu="t4").cautions == ()

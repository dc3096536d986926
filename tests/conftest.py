"""What holds for every test: none leaves a setting of the process to the next, whose answer would then depend on their order."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
import torch
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from sizer.service.tape_folder import FOLDER_VARIABLE
from tests.hub import hub  # noqa: F401 (a fixture of several folders)

FOLDER = Path(__file__).parent
EVERY, EVERY_BROWSER = 128, 5  # exhaustive tests to one that CI runs, and those in a browser
# What is left out of the quick tier (`-m "not slow"`): folders, and files that take longest (--durations=0).
SLOW = (
    "browser", "decision", "null_driver",
    "architecture/test_huggingface", "architecture/test_presets", "architecture/test_quantization", "architecture/test_vision",
    "architecture/test_vision_counts", "architecture/test_vision_sizes",
    "device/comparison/test_accuracy", "device/trial/test_launch",
    "device/trial/test_measure_models", "device/trial/test_trial", "distributed/test_gloo", "distributed/test_pipeline",
    "service/test_broker", "service/test_client", "service/test_memory_budget", "service/test_server",
    "serving/test_logs", "serving/test_planner", "serving/test_queries",
    "estimating/test_estimator", "estimating/test_scopes", "estimating/test_tracer", "test_measure_command", "test_peak_command",
    "test_published", "test_readme",
    "tracing/test_accumulate", "tracing/test_batch_curve",
    "tracing/test_cpu_truth", "tracing/test_cpu_truth_adapters", "tracing/test_cpu_truth_generation",
    "tracing/test_cpu_truth_models", "tracing/test_cpu_truth_optimizers",
    "tracing/test_cudnn_null_driver", "tracing/test_generation", "tracing/test_halves", "tracing/test_order",
    "tracing/test_scratch_cpu",
    "tracing/test_timm_names", "tracing/test_torchvision_names",
    "ui/test_hosting", "ui/test_ledger_page", "ui/test_measure_page", "ui/test_page",
)  # fmt: skip


def pytest_configure() -> None:
    """Keep tapes in memory alone: a test finds nothing that an earlier run has left on disk. One thread for each process: threads
    of several workers wait for each other."""
    os.environ.setdefault(FOLDER_VARIABLE, "")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # the scratch of AMX's kernels is not modelled
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --exhaustive, --full and --one-in."""
    parser.addoption("--exhaustive", action="store_true", help="run every test; where CI is set some of these run")
    parser.addoption("--one-in", type=int, default=1, help="run one in so many tests, by their names")
    parser.addoption("--full", action="store_true", help="run tests that need packages outside of requirements.txt, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of SLOW. Leave out tests marked exhaustive or full, unless an option asks for them; CI samples the former."""
    one_in = config.getoption("one_in")
    everything, full, in_ci = config.getoption("exhaustive"), config.getoption("full"), bool(os.environ.get("CI"))

    def runs(item: pytest.Item) -> bool:
        if (item.get_closest_marker("full") and not full) or not _is_one_in(one_in, item.nodeid):
            return False
        return everything or not item.get_closest_marker("exhaustive") or (in_ci and is_sampled(item.nodeid))

    left_out = [item for item in items if not runs(item)]
    items[:] = [item for item in items if runs(item)]
    config.hook.pytest_deselected(items=left_out)
    for item in items:
        name = item.path.relative_to(FOLDER).with_suffix("").as_posix()
        if name in SLOW or name.split("/")[0] in SLOW:
            item.add_marker(pytest.mark.slow)


def is_sampled(name: str) -> bool:
    """Return True if CI runs an exhaustive test: one in EVERY by its name, more in a browser. `.ci/full` runs all of them."""
    return _is_one_in(EVERY_BROWSER if name.startswith("tests/browser/") else EVERY, name)


def _is_one_in(count: int, name: str) -> bool:
    return crc32(name.encode()) % count == 0


class OneWorkerAFile(LoadScopeScheduling):
    """What a file's tests share is made once, and the browser's files share one app."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "browser" if file.startswith("tests/browser/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneWorkerAFile:
    """Has each file's tests run by one worker. (pytest 9.2 drops the groups of `--dist loadgroup` without a word.)"""
    return OneWorkerAFile(config, log)


@pytest.fixture(autouse=True, scope="module")
def little_to_collect() -> None:
    """Keep the garbage collector from going over what was imported before this file: half a million objects, each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Thaws what was frozen: compiled modules would call it leaked."""
    gc.unfreeze()


def _settings() -> dict[str, object]:
    """PyTorch's and Python's settings that an answer depends on."""
    return {
        "torch.backends.cudnn.conv.fp32_precision": torch.backends.cudnn.conv.fp32_precision,
        "torch.backends.cudnn.rnn.fp32_precision": torch.backends.cudnn.rnn.fp32_precision,
        "torch.backends.cuda.matmul.fp32_precision": torch.backends.cuda.matmul.fp32_precision,
        "torch.backends.cudnn.enabled": torch.backends.cudnn.enabled,
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.get_fastpath_enabled(),
        "gc.isenabled()": gc.isenabled(),
    }


@pytest.fixture(autouse=True)
def settings_unchanged() -> Iterator[None]:
    """Fails the test that leaves another setting than it found."""
    before = _settings()
    yield
    assert _settings() == before

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

from sizer.service.variables import FOLDER_VARIABLE
from tests.hub import hub  # noqa: F401 (a fixture of several folders)

FOLDER = Path(__file__).parent
EVERY, EVERY_BROWSER = 128, 5  # exhaustive tests to one that CI runs, and those in a browser
# Files that take longest (--durations=0), in two parts that take equally long. The quick tier (`-m "not slow"`) leaves them out.
# `.ci/run` runs one part for each commit, by its hash (--turn); other runs have both.
TURNS = (
    (
        "architecture/test_presets", "decision/test_devices", "decision/test_limits", "decision/test_ranks",
        "decision/test_script", "decision/test_serving", "device/comparison/test_accuracy", "device/machine/test_demonstration",
        "device/record/test_measured", "distributed/test_alike", "distributed/test_communication",
        "distributed/test_expert_parallel", "distributed/test_gloo", "distributed/test_rank",
        "distributed/test_tensor_parallel", "estimating/test_estimator", "estimating/test_scopes", "null_driver/test_allocator",
        "null_driver/test_convolutions", "null_driver/test_generations", "null_driver/test_optimizers",
        "null_driver/test_recorded", "running/test_run", "running/test_trainers", "service/test_broker",
        "service/test_stored_reports", "service/test_server", "service/test_whole_configs", "serving/test_logs", "test_cli",
        "test_t4_queries", "tracing/test_by_version", "tracing/test_compiled_queries", "tracing/test_cpu_truth_models",
        "tracing/test_cpu_truth_optimizers", "tracing/test_generation",
    ),
    (
        "decision/test_levers", "device/trial/test_launch", "device/trial/test_measure_models",
        "device/trial/test_measure_what_is_served", "distributed/test_pipeline", "estimating/test_custom",
        "estimating/test_tracer", "null_driver/test_adapters", "null_driver/test_operators", "null_driver/test_quantized",
        "null_driver/test_ranks", "null_driver/test_samplers", "recipes/test_recipes", "running/test_launchers",
        "running/test_plugin", "service/test_client", "service/test_local", "service/test_replaying", "serving/test_lora",
        "tape/test_loop_choices", "test_compare_command", "test_measure_command", "test_peak_command", "test_published",
        "tracing/test_accumulate", "tracing/test_batch_curve", "tracing/test_capability", "tracing/test_compiled",
        "tracing/test_cpu_truth", "tracing/test_cpu_truth_adapters", "tracing/test_cpu_truth_generation",
        "tracing/test_depth", "tracing/test_kv_cache", "tracing/test_missing_kernels", "tracing/test_order",
        "tracing/test_timm_names", "tracing/test_torchvision_names", "tracing/test_values",
    ),
)  # fmt: skip
ALWAYS = ("browser/", "ui/test_hosting", "ui/test_page")  # slow, too, and run for each commit


def pytest_configure() -> None:
    """Keep tapes in memory alone: a test finds nothing that an earlier run has left on disk. One thread for each process: threads
    of several workers wait for each other."""
    os.environ.setdefault(FOLDER_VARIABLE, "")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # the scratch of AMX's kernels is not modelled
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --exhaustive, --full, --one-in and --turn."""
    parser.addoption("--exhaustive", action="store_true", help="run every test; where CI is set some of these run")
    parser.addoption("--one-in", type=int, default=1, help="run one in so many tests, by their names")
    parser.addoption("--turn", choices=("1", "2", "all"), default="all", help="which of the slow files to run")
    parser.addoption("--full", action="store_true", help="run tests that need packages outside of requirements.txt, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests. Leave out tests marked exhaustive or full, unless an option asks for them; CI samples the
    former."""
    one_in = config.getoption("one_in")
    everything, full, in_ci = config.getoption("exhaustive"), config.getoption("full"), bool(os.environ.get("CI"))
    left_to_others = {"1": TURNS[1], "2": TURNS[0], "all": ()}[config.getoption("turn")]

    def runs(item: pytest.Item) -> bool:
        if _name_of(item) in left_to_others:
            return False
        if (item.get_closest_marker("full") and not full) or not _is_one_in(one_in, item.nodeid):
            return False
        return everything or not item.get_closest_marker("exhaustive") or (in_ci and is_sampled(item.nodeid))

    left_out = [item for item in items if not runs(item)]
    items[:] = [item for item in items if runs(item)]
    config.hook.pytest_deselected(items=left_out)
    for item in items:
        name = _name_of(item)
        if any(name in files for files in TURNS) or name.startswith(ALWAYS):
            item.add_marker(pytest.mark.slow)


def _name_of(item: pytest.Item) -> str:
    return item.path.relative_to(FOLDER).with_suffix("").as_posix()


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

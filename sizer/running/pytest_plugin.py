"""A memory guard for tests, without a GPU.

    @pytest.mark.gpu_memory(gpu="rtx-4090", max="20GiB")
    def test_a_step_fits():
        train_one_step()

A marked test runs over the null driver of its GPU. It fails if it needs more memory than the GPU has, or than is allowed:

- `max` bounds the peak of reserved memory, `max_allocated` the peak of allocated memory;
- `tolerance` ("1%" or "64MiB") bounds the growth over a stored baseline, which `pytest --gpu-memory-update` writes.

The fixture `gpu_memory` bounds a part of a marked test:

    def test_generation(gpu_memory):
        model = build()
        with gpu_memory(max_allocated="2GiB"):
            model.generate(...)

All tests of a GPU share one process. Values on the device are not computed: assert shapes and memory, not numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sizer.base.errors import DeviceError, RefusedValueError
from sizer.base.units import format_bytes, format_more
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import Gpu
from sizer.running.difference import Change, Tolerance, read_share, read_size

MARK = "gpu_memory"
INSIDE = "SIZER_PYTEST_PIPES"
BASELINES = "gpu_memory"  # the folder of baselines, next to the test's file
_OPTION = "--gpu-memory-update"
_ARGUMENTS = {"gpu", "max", "max_allocated", "tolerance"}
_ROWS = 8
_WORKERS = pytest.StashKey[dict[str, "_Worker"]]()
_GROWN = 2**20  # a line or module that grew less is not named


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes baselines."""
    group = parser.getgroup("sizer", "GPU memory without a GPU")
    group.addoption(_OPTION, action="store_true", help="write the baselines of tests that are marked with a tolerance")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    text = "gpu_memory(gpu, max=None, max_allocated=None, tolerance=None): run over the null driver of a GPU and bound its memory"
    config.addinivalue_line("markers", text)
    config.stash[_WORKERS] = {}


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes of the GPUs."""
    for worker in config.stash.get(_WORKERS, {}).values():
        worker.close()


@pytest.fixture
def gpu_memory(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return a context manager that bounds the memory of a part of a test.

    Use it as `with gpu_memory(max="2GiB") as used: ...`. Its arguments are `max` and `max_allocated`. After the context, `used`
    has `peak_allocated_bytes` and `peak_reserved_bytes`.
    """
    if request.node.get_closest_marker(MARK) is None:
        pytest.fail(
            'the fixture gpu_memory needs a GPU: add @pytest.mark.gpu_memory(gpu="rtx-4090") to the test', pytrace=False
        )
    return _part


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test in the process of its GPU."""
    mark = item.get_closest_marker(MARK)
    if mark is None or INSIDE in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _run_outside(item, mark):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests that the first process requests, in the process of a GPU."""
    if INSIDE not in os.environ:
        return None
    importlib.import_module("sizer.running.pytest_worker").serve(session, *map(int, os.environ[INSIDE].split(",")))
    return True


# ------------------------------------------------------------------------------------------------------------ the first process


class _Worker:
    """The process of one GPU: runs pytest with the null driver, and runs the tests whose names it receives."""

    def __init__(self, config: pytest.Config, gpu: Gpu, files: list[str]) -> None:
        from sizer.running.driver.build import find_obstacle
        from sizer.running.starting import child_environment

        obstacle = find_obstacle()
        if obstacle is not None:
            raise DeviceError("this machine cannot run the null driver", todo=obstacle)
        asks, self._asking = os.pipe()
        self._answering, answers = os.pipe()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `close`)
        environment = child_environment(gpu, devices=1, strict=False) | {
            INSIDE: f"{asks},{answers}",
            "SIZER_PYTEST_GPU": gpu.key,
        }
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment["PYTHONPATH"], *sys.path)))
        words = [
            "-p",
            __name__,
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-o",
            "addopts=",
            "--rootdir",
            str(config.rootpath),
        ]
        if config.inipath is not None:
            words += ["-c", str(config.inipath)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *words, *files],
            env=environment,
            cwd=config.invocation_params.dir,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(asks, answers),
        )
        os.close(asks)
        os.close(answers)
        self._lines = os.fdopen(self._answering, encoding="utf-8")

    def run(self, nodeid: str) -> dict[str, Any]:
        """Return the process's result for a test. Raises DeviceError if the process has ended."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._asking, f"{json.dumps(nodeid)}\n".encode())
        line = self._lines.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            tail = " ".join(self._log.read()[-1500:].split())
            raise DeviceError(
                "the process of the GPU ended", given=f"status {self._process.returncode}", todo=f"its output: {tail}"
            )
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        os.close(self._asking)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()
        self._process.wait()
        self._lines.close()
        self._log.close()


def _run_outside(item: pytest.Item, mark: pytest.Mark) -> list[pytest.TestReport]:
    """Return the reports of a marked test."""
    try:
        gpu, limits = _read_mark(mark)
        workers = item.config.stash[_WORKERS]
        if gpu.key not in workers:
            files = [str(other.path) for other in item.session.items if other.get_closest_marker(MARK) is not None]
            workers[gpu.key] = _Worker(item.config, gpu, list(dict.fromkeys(files)))
        found = workers[gpu.key].run(item.nodeid)
    except (DeviceError, pytest.UsageError) as error:
        return [_report(item, "call", f"gpu_memory: {error}")]
    reports = [
        item.config.hook.pytest_report_from_serializable(config=item.config, data=data) for data in found["reports"]
    ]
    call = next((report for report in reports if report.when == "call"), None)
    if call is None or not call.passed or found["found"] is None:
        return reports
    failure = _judge(item, gpu, limits, found["found"], call)
    if failure:
        call.outcome, call.longrepr = "failed", failure
    return reports


def _judge(item: pytest.Item, gpu: Gpu, limits: dict[str, Any], found: dict[str, Any], call: pytest.TestReport) -> str:
    """Return the faults of a test's memory."""
    from sizer.running.run_outcome import read_outcome

    outcome = read_outcome(found, gpu=gpu, route="driver", reason="", notes=(), expandable=False)
    row = outcome.estimate
    if row is None:
        return f"gpu_memory: the test allocated nothing on {gpu.key}"
    peaks = {"peak_reserved_bytes": row.peak_reserved_bytes, "peak_allocated_bytes": row.peak_allocated_bytes}
    call.user_properties.extend(peaks.items())
    said = []
    if row.out_of_memory is not None:
        said.append(
            f"the process needs {format_bytes(row.process_bytes)}, and the device has {format_bytes(gpu.total_bytes)}"
        )
    for name, argument in (("peak_reserved_bytes", "max"), ("peak_allocated_bytes", "max_allocated")):
        if argument in limits and peaks[name] > limits[argument]:
            what = name.split("_")[1]
            said.append(f"{format_bytes(peaks[name])} {what}, more than {argument}={format_bytes(limits[argument])}")
    lines, modules = dict(outcome.lines_at_peak), dict(outcome.modules_at_peak)
    if "tolerance" in limits and not said:
        now = {**peaks, "gpu": gpu.key, "lines": lines, "modules": modules}
        return _hold_to_baseline(item, limits["tolerance"], now)
    if not said:
        return ""
    alive = (f"{format_bytes(size):>12}  {where or 'outside of modules'}" for where, size in [*lines.items()][:_ROWS])
    in_modules = (
        f"{format_bytes(size):>12}  {name or 'outside of modules'}" for name, size in [*modules.items()][:_ROWS]
    )
    return "\n".join(
        [
            f"gpu_memory on {gpu.key}: {'; '.join(said)}",
            "alive at the peak, by line:",
            *alive,
            "by module:",
            *in_modules,
        ]
    )


def _hold_to_baseline(item: pytest.Item, tolerance: Tolerance, now: dict[str, Any]) -> str:
    path = item.path.parent / BASELINES / f"{item.path.stem}.json"
    name = item.nodeid.partition("::")[2]
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    now = {**now, "lines": _without_folders(item, now["lines"])}
    if item.config.getoption(_OPTION):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**stored, name: now}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return ""
    if name not in stored or stored[name]["gpu"] != now["gpu"]:
        return f"gpu_memory: {path} has no baseline of this test on {now['gpu']}: write it with `pytest {_OPTION}`"
    before, said = stored[name], []
    for key in ("peak_reserved_bytes", "peak_allocated_bytes"):
        if now[key] > tolerance.allowed(before[key]):
            said.append(f"{key.split('_')[1]} memory grew from {format_bytes(before[key])} to {format_bytes(now[key])}")
    if not said:
        return ""
    rows = [f"gpu_memory on {now['gpu']}: {'; '.join(said)}"]
    for group in ("lines", "modules"):
        grew = [change for change in _changes(group, before[group], now[group]) if change.more_bytes >= _GROWN]
        rows += [f"{group} that grew:"] if grew else []
        rows += [
            f"{format_more(change.more_bytes):>14}  {change.name or 'outside of modules'}" for change in grew[:_ROWS]
        ]
    return "\n".join([*rows, f"If this is intended, write the baseline with `pytest {_OPTION}`"])


def _changes(group: str, before: dict[str, int], after: dict[str, int]) -> list[Change]:
    changes = (
        Change(group=group, name=name, before_bytes=before.get(name, 0), after_bytes=after.get(name, 0))
        for name in dict.fromkeys((*before, *after))
    )
    return sorted(changes, key=lambda change: -change.more_bytes)


def _without_folders(item: pytest.Item, lines: dict[str, int]) -> dict[str, int]:
    """Return the lines with paths relative to the root folder, so that a baseline is valid on other machines."""
    root = str(item.config.rootpath) + os.sep
    return {line.removeprefix(root): size for line, size in lines.items()}


def _read_mark(mark: pytest.Mark) -> tuple[Gpu, dict[str, Any]]:
    """Return the GPU and the limits of a marker. Raises UsageError for an invalid marker."""
    if mark.args or not {"gpu"} <= mark.kwargs.keys() <= _ARGUMENTS:
        raise pytest.UsageError(f"allowed are {', '.join(sorted(_ARGUMENTS))} by name, and gpu is required")
    given = mark.kwargs
    try:
        limits: dict[str, Any] = {
            name: _bytes_of(given[name]) for name in ("max", "max_allocated") if given.get(name) is not None
        }
        if (text := given.get("tolerance")) is not None:
            share = str(text).endswith("%")
            limits["tolerance"] = Tolerance(share=read_share(text)) if share else Tolerance(bytes=_bytes_of(text))
        return find_gpu(given["gpu"]), limits
    except RefusedValueError as refused:
        raise pytest.UsageError(str(refused.refusal("gpu", given["gpu"]))) from None
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def _bytes_of(value: str | int) -> int:
    return value if isinstance(value, int) else read_size(value)


def _report(item: pytest.Item, when: str, failure: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed", longrepr=failure, when=when
    )


# ------------------------------------------------------------------------------------------------------- the process of a GPU


class Used:
    """The most bytes that a part of a test had allocated and reserved."""

    peak_allocated_bytes = peak_reserved_bytes = 0


@contextlib.contextmanager
def _part(*, max: str | int | None = None, max_allocated: str | int | None = None) -> Iterator[Used]:
    cuda = importlib.import_module("torch").cuda
    cuda.reset_peak_memory_stats()
    used = Used()
    yield used
    used.peak_allocated_bytes, used.peak_reserved_bytes = cuda.max_memory_allocated(), cuda.max_memory_reserved()
    for name, limit in (("reserved", max), ("allocated", max_allocated)):
        found = getattr(used, f"peak_{name}_bytes")
        if limit is not None and found > _bytes_of(limit):
            pytest.fail(
                f"gpu_memory: {format_bytes(found)} {name}, more than {format_bytes(_bytes_of(limit))}", pytrace=False
            )

"""The process of one GPU in a test session: pytest over the null driver. Imports torch; `pytest_plugin` starts it."""

from __future__ import annotations

import gc
import json
import os
from typing import Any

import pytest
import torch

from sizer.catalogue.gpu_keys import find_gpu
from sizer.running.run_settings import Settings
from sizer.running.script_child import Run, end_with_parent
from sizer.running.starting import hardware_of


def serve(session: pytest.Session, asks: int, answers: int) -> None:
    """Run the tests whose names arrive, each measured separately, until the first process closes its end."""
    end_with_parent()
    hardware, _ = hardware_of(find_gpu(os.environ["SIZER_PYTEST_GPU"]))
    settings = Settings(kind="script", target="", arguments=(), out=os.devnull, capability=hardware.capability, steps=0)
    run = Run(settings)
    run.check()
    run.install()
    items = {item.nodeid: item for item in session.items}
    collector = _Reports(session.config)
    session.config.pluginmanager.register(collector)
    with os.fdopen(asks, encoding="utf-8") as names, os.fdopen(answers, "w", encoding="utf-8") as out:
        for line in names:
            collector.reports.clear()
            item = items[json.loads(line)]
            _begin(run)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            found = run.found() if torch.cuda.is_initialized() else None
            out.write(json.dumps({"reports": collector.reports, "found": found}) + "\n")
            out.flush()
    os._exit(0)  # PyTorch's threads would wait for a device that never answers


def _begin(run: Run) -> None:
    """Begin a test with an empty device and history."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run.restart()


class _Reports:
    """The reports of the running test, as pytest sends them between processes."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.reports: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a report; a failed comparison may be one of values that were not computed."""
        if report.failed and "AssertionError" in str(report.longrepr):
            report.sections.append(
                ("gpu_memory", "values on the device are not computed: assert shapes and memory, not numbers")
            )
        self.reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

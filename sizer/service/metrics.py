"""What an operator may know of jobs: how many of which task ended how, how long they waited and ran. Nothing of what was asked."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping


class JobMetrics:
    """Counts and sums since the process began, by task and outcome ("result", or an error's class). For use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: Counter[tuple[str, str]] = Counter()
        self._waited: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._ran: defaultdict[tuple[str, str], float] = defaultdict(float)

    def add(self, task: str, outcome: str, *, waited_seconds: float, ran_seconds: float) -> None:
        """Take note of a job that has ended."""
        key = (task, outcome)
        with self._lock:
            self._ended[key] += 1
            self._waited[key] += waited_seconds
            self._ran[key] += ran_seconds

    def text(self, *, present: int) -> str:
        """All of it in Prometheus' text format; `present` jobs are running or waiting now."""
        with self._lock:
            tables: dict[str, Mapping[tuple[str, str], float]] = {
                "sizer_jobs_total": dict(self._ended),
                "sizer_job_wait_seconds_total": dict(self._waited),
                "sizer_job_run_seconds_total": dict(self._ran),
            }
        lines = ["# TYPE sizer_jobs gauge", f"sizer_jobs {present}"]
        for name, values in tables.items():
            lines.append(f"# TYPE {name} counter")
            lines += (
                f'{name}{{task="{task}",outcome="{outcome}"}} {value:g}'
                for (task, outcome), value in sorted(values.items())
            )
        return "\n".join(lines) + "\n"

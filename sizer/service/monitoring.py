"""Monitoring of jobs for operators: log lines as JSON (SIZER_LOG=json), and counts.

Neither holds anything of a question.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping

LOG_VARIABLE = "SIZER_LOG"  # "json"; any other value does not change logging
FACTS = ("task", "outcome", "waited_seconds", "ran_seconds")  # keys of a record in addition to its message


class JsonFormatter(logging.Formatter):
    """One line for each record: time (UTC), level, logger, message, its facts, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FACTS if hasattr(record, name)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging() -> None:
    """Write every log line of this process as JSON to standard error, if the environment requests it."""
    if os.environ.get(LOG_VARIABLE, "").strip().lower() != "json":
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    for name in list(logging.root.manager.loggerDict):  # Streamlit and uvicorn have their own handlers
        logger = logging.getLogger(name)
        if logger.handlers:
            logger.handlers.clear()
            logger.propagate = True


# ------------------------------------------------------------------------------------------------------------- metrics


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
        """Return all metrics in Prometheus' text format; `present` jobs are running or waiting now."""
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

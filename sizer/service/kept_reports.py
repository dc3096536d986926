"""Finished reports, kept in the user's cache folder, so that a question that was answered before starts no job server.

The key of a report holds all that decides it: the complete query, this package's code and data, the installed packages, and the
processor. The command line reads and writes them. It keeps a report under the query that it asked by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

from sizer.catalogue.sources import SOURCES
from sizer.errors import RequestError
from sizer.memory.codec import DecodeError, encode
from sizer.memory.report import Report
from sizer.request import format_query, parse_query
from sizer.service.edition import code_digest

MOST_FILES = 500  # a report of 40 cells has some 200 kB
_SUFFIX = ".report"


class KeptReports:
    """Reports by query in a folder. Without a folder nothing is kept.

    A file that cannot be read or written, or was truncated, counts as absent.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) / "reports" if folder else None

    def find(self, query: str) -> Report | None:
        """Return the report on a query, None if there is none."""
        if (path := self._path(query)) is None:
            return None
        with contextlib.suppress(OSError, ValueError, DecodeError):
            report = Report.from_dict(json.loads(path.read_bytes()))
            os.utime(path)
            return report
        return None

    def keep(self, query: str, report: Report) -> None:
        """Keep a whole report without failures: a failure may come from a limit."""
        path = self._path(query)
        if path is None or report.pending or report.failures:
            return
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(path.parent)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent)
            try:
                with os.fdopen(descriptor, "w", encoding="ascii") as file:
                    json.dump(encode(report), file)
                os.replace(temporary, path)
            except OSError:
                os.unlink(temporary)
                raise

    def _path(self, query: str) -> Path | None:
        """Return the file of a query; None if nothing is kept: no folder, a refused query, or a config that the hub may change."""
        if self._folder is None:
            return None
        try:
            request = parse_query(query)
        except RequestError:
            return None
        if SOURCES[request.source].fetched:
            return None
        parts = (format_query(request, complete=True), code_digest(), *_installation())
        return self._folder / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]}{_SUFFIX}"

    def _make_room(self, folder: Path) -> None:
        files = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for path in files[: max(0, len(files) - MOST_FILES + 1)]:
            path.unlink(missing_ok=True)


def _installation() -> list[str]:
    """Return the Python version, the processor, and the name and version of every installed package."""
    found = {name for folder in sys.path for name in _names(folder) if name.endswith((".dist-info", ".egg-info"))}
    return [platform.python_version(), platform.machine(), _processor(), *sorted(found)]


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder or ".")
    return []


def _processor() -> str:
    """Return the processor's model: the CPU's scratch memory depends on it, and the number of its cores."""
    model = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line for line in lines if line.startswith("model name")), model)
    return f"{model} {os.cpu_count()}"

"""Finished reports, stored in the user's cache folder, so that a repeated question starts no job server.

The key of a report contains everything that determines it: the complete query, this package's code and data, the installed
packages, and the processor. The command line reads and writes them. A report is stored under its query, together with the
printed text. Files are compressed; each ends with a checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from sizer.base.errors import RequestError
from sizer.query.text import format_query, parse_query
from sizer.service.edition import stored_digest, write_whole

if TYPE_CHECKING:
    from sizer.report.report import Report

MOST_FILES, MOST_BYTES = 2_000, 256 * 2**20  # a report of 40 cells has some 60 kB, its text as JSON 90 kB
REPORT, NAMES = "report", "names"


class StoredReports:
    """Reports and their texts by query in a folder. Without a folder nothing is kept.

    A file that cannot be read or written, or was truncated, counts as absent.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) / "reports" if folder else None
        self._keys: dict[str, str | None] = {}  # by query: a command uses the same query several times

    def find(self, query: str) -> Report | None:
        """Return the report on a query, None if there is none."""
        if (data := self.find_text(query, REPORT)) is None:
            return None
        from sizer.base.codec import DecodeError
        from sizer.report.report import Report

        with contextlib.suppress(ValueError, DecodeError):
            return Report.from_dict(json.loads(data))
        return None

    def keep(self, query: str, report: Report) -> None:
        """Store a whole report."""
        if is_whole(report):
            from sizer.base.codec import encode

            self.keep_text(query, REPORT, json.dumps(encode(report)))

    def find_names(self) -> dict[str, list[dict[str, str]]] | None:
        """Return the models of each source's package, None if they are not kept for the installed packages."""
        with contextlib.suppress(ValueError):
            if (text := self.find_text(NAMES, NAMES)) is not None:
                return json.loads(text)
        return None

    def keep_names(self, named: dict[str, list[dict[str, str]]]) -> None:
        """Keep the models of each source's package."""
        self.keep_text(NAMES, NAMES, json.dumps(named))

    def keep_text(self, query: str, form: str, text: str) -> None:
        """Keep the text of a whole report in a form; REPORT is the form of its encoded data."""
        if (path := self._path(query, form)) is None:
            return
        with contextlib.suppress(OSError):
            data = zlib.compress(text.encode("utf-8", "replace"), level=1)
            self._make_room(len(data))
            write_whole(path, data)

    def find_text(self, query: str, form: str) -> str | None:
        """Return the text of a report in a form, None if there is none."""
        if (path := self._path(query, form)) is None:
            return None
        with contextlib.suppress(OSError, ValueError, zlib.error):
            text = zlib.decompress(path.read_bytes()).decode()
            os.utime(path)
            return text
        return None

    def _path(self, query: str, form: str) -> Path | None:
        """Return a file of a query; None if nothing is stored: no folder, a refused query, or a config that the hub may change."""
        if self._folder is None:
            return None
        if query not in self._keys:
            folder = self._folder.parent
            self._keys[query] = _digest(NAMES, folder) if query == NAMES else _key_of(query, folder)
        key = self._keys[query]
        return None if key is None else self._folder / f"{key}.{form}"

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files, so that `size` more bytes may be written."""
        folder = self._folder
        found = [(path, path.stat()) for path in folder.glob("*")] if folder is not None and folder.is_dir() else []
        number, held = len(found) + 1, sum(state.st_size for _, state in found) + size
        for path, state in sorted(found, key=lambda one: one[1].st_mtime):
            if number <= MOST_FILES and held <= MOST_BYTES:
                break
            path.unlink(missing_ok=True)
            number, held = number - 1, held - state.st_size


def is_whole(report: Report) -> bool:
    """Return True if a report is complete, and nothing failed: a failure may come from a limit."""
    return not report.pending and not report.failures


def _key_of(query: str, folder: Path) -> str | None:
    """Return a digest of all that the report on a query depends on; None if it is refused or the hub may change it."""
    try:
        request = parse_query(query)
    except RequestError:
        return None
    if request.is_fetched:
        return None
    return _digest(format_query(request, complete=True), folder)


def _digest(text: str, folder: Path) -> str:
    """Return a digest of a text, of this package's code and data, and of the installation."""
    parts = (text, stored_digest(folder), *_installation())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def _installation() -> list[str]:
    """Return the Python version, the processor, and the name and version of every installed package.

    Vendored copies of packages are left out: setuptools adds its own to `sys.path` when it is imported.
    """
    folders = [folder for folder in sys.path if Path(folder).name != "_vendor"]
    found = {name for folder in folders for name in _names(folder) if name.endswith((".dist-info", ".egg-info"))}
    return [platform.python_version(), platform.machine(), _processor(), *sorted(found)]


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder or ".")
    return []


def _processor() -> str:
    """Return the processor's model: the CPU's scratch memory depends on it, and the number of its cores."""
    model = None
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line for line in lines if line.startswith("model name")), None)
    return f"{model or platform.processor()} {os.cpu_count()}"  # `processor` starts a program

"""Answer a question from stored results only, in a child that imports no torch.

The code is the same as for every job. If it has to import a refused package, a result is not stored: the answer is then None.
Replays run as plain Python unless the worker has imported Numba's functions, because that import takes as long as a few
replays.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from sizer.catalogue.sources import SOURCES
from sizer.processes.child import Channel
from sizer.service import tasks
from sizer.service.local.placeholders import hidden

REFUSED = ("torch", *sorted({source.package for source in SOURCES.values()}))


class NotStoredError(Exception):
    """A package is needed that traces models."""


class _Refusal(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        raise NotStoredError(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        raise NotStoredError(module.__name__)


class Refusing:
    """Finds the packages of REFUSED, so that other code sees them as installed, and refuses to import them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in REFUSED else None
        if spec is not None:
            spec.loader = _Refusal()
        return spec


def run(job: dict, channel: Channel) -> dict:
    """Return {"answer": the result of a job}, or {"answer": None} if it needs more than the stored results."""
    sys.meta_path.insert(0, Refusing())
    try:
        with hidden("numba"):
            return {"answer": tasks.run(job, channel)}
    except NotStoredError:
        return {"answer": None}

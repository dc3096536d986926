"""Settings of the job server at its start: limits, the number of jobs, the functions that they call."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from itertools import chain
from typing import Literal

from sizer.base.units import GIB, MIB
from sizer.catalogue.adapters import PACKAGE
from sizer.catalogue.sources import offered_sources
from sizer.service.job_memory import budget_bytes
from sizer.service.variables import JOB_MEMORY, JOB_SECONDS, JOBS, SPARES, WAITING, default_folder, read_limit

# Imports of an estimate, including late ones: a confined job should find all of them imported
TRACING = (
    *("sizer.estimating.estimator", "sizer.estimating.model", "sizer.estimating.work", "sizer.service.tasks"),
    *("sizer.tracing.trace", "sizer.tracing.traced_rank", "sizer.tracing.rule_texts"),
)
PREPARE_PEFT = "sizer.architecture.peft_adapters:prepare"
PREPARE_CUDNN = "sizer.tracing.cuda.cudnn_convolution:prepare"
WARM, MERGE = "sizer.service.preload:warm", "sizer.service.preload:merge_pages"

Launch = Literal["fork", "spawn"]
Wall = Literal["wanted", "required"]
Sharing = Literal["no", "yes"]
_CHOICES = {"launch": ("fork", "spawn"), "wall": ("wanted", "required"), "sharing": ("no", "yes")}
_OFF = ("", "0")
PUBLIC_VARIABLE = "SIZER_PUBLIC"  # anything but 0: strangers use this app
UNWALLED_VARIABLE = "SIZER_PUBLIC_WITHOUT_SECCOMP"  # 1: run although the kernel cannot confine jobs
FRAMED_BY_VARIABLE = "SIZER_FRAMED_BY"  # origins, with spaces between them


def is_public() -> bool:
    """Return whether this app is public: the variable is set to a value other than empty and 0."""
    return os.environ.get(PUBLIC_VARIABLE, "") not in _OFF


def framing_origins() -> tuple[str, ...]:
    """Return the other sites that may embed this app in a frame; invalid origins are left out."""
    given = os.environ.get(FRAMED_BY_VARIABLE, "").split()
    return tuple(origin for origin in given if re.fullmatch(r"https?://[\w.*-]+(:\d+)?", origin, re.ASCII))


def wanted_wall() -> Wall:
    """Return whether jobs require the kernel's seccomp: in public mode, unless overridden."""
    return "required" if is_public() and os.environ.get(UNWALLED_VARIABLE) != "1" else "wanted"


def wanted_spares() -> int:
    """Return one in public mode, so that users do not wait for an import of torch; none for one user, to save memory."""
    return read_limit(SPARES, 1 if is_public() else 0)


def preloaded() -> tuple[str, ...]:
    """Return the imports of estimates and decisions for every source, and the functions to call before any of them."""
    of_sources = ((row.package, *row.preload, row.blueprint.partition(":")[0]) for row in offered_sources())
    adapters = (PACKAGE, PREPARE_PEFT) if find_spec(PACKAGE) else ()
    caches = ("sizer.allocator.cuda_cache", "sizer.allocator.expandable_cache", "sizer.allocator.heaps")
    sizers = (*TRACING, "sizer.estimating.cautions:versions", *caches)
    decisions = (f"sizer.decision.{name}" for name in ("devices", "levers", "limits", "peak", "ranks"))
    warm = (WARM, MERGE) if is_public() else ()  # some four seconds, which a spare spends beforehand
    names = ("torch", *chain.from_iterable(of_sources), *adapters, *sizers, *decisions, PREPARE_CUDNN, *warm)
    return tuple(dict.fromkeys(names))


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits of the job server; each field is also an option of `python -m sizer.service.server`.

    An operator sets some of them by environment variables (`sizer.service.variables`). Raises JobError if one is out of range.

    - `memory_bytes`: limit of a job's address space (RLIMIT_AS). Importing torch takes 3.5 GB of it, with some builds far more:
      a job always gets at least `headroom_bytes` above the server's own use.
    - `budget_bytes`: limit of all jobs together, without memory shared with the process they are forked from; 0: no limit.
    - `wall_seconds`: counts while the job runs, not while it waits or is paused.
    - `max_waiting`: number of jobs that may wait; more are refused.
    - `preload`: modules that the server imports before it forks its first job, and functions (MODULE:FUNCTION) that it calls.
    - `function`: the function of a job, as MODULE:FUNCTION (see sizer.service.tasks.run).
    - `tapes`: folder in which traces are stored for later servers, empty for none.
    - `readable`: files and folders that a job may read, in addition to those of the interpreter and the packages.
    - `spares`: number of servers that are started in advance, to replace one that dies.
    - `silence_seconds`: how long a server may be silent before it is considered dead, `start_seconds` while it starts.
    - `wall`: "required" if no job may run without seccomp.
    - `sharing`: "yes" if the client receives the results that jobs store.
    - `launch`: "fork" (a copy of the preloaded template per job) or "spawn" (a fresh process, on systems without fork).
    """

    max_jobs: int = field(default_factory=lambda: read_limit(JOBS, usable_cpus()))
    max_waiting: int = field(default_factory=lambda: read_limit(WAITING, 128))
    wall_seconds: float = field(default_factory=lambda: float(read_limit(JOB_SECONDS, 120)))
    cpu_seconds: int = field(default_factory=lambda: read_limit(JOB_SECONDS, 120) + 30)
    memory_bytes: int = field(default_factory=lambda: read_limit(JOB_MEMORY, 8) * GIB)
    budget_bytes: int = field(default_factory=budget_bytes)
    headroom_bytes: int = 4 * GIB
    result_bytes: int = 32 * MIB
    request_bytes: int = 16 * MIB
    function: str = "sizer.service.tasks:run"
    preload: tuple[str, ...] = field(default_factory=preloaded)
    tapes: str = field(default_factory=default_folder)
    readable: tuple[str, ...] = ()
    spares: int = field(default_factory=wanted_spares)
    silence_seconds: float = 2.5
    start_seconds: float = 300.0
    wall: Wall = field(default_factory=wanted_wall)
    sharing: Sharing = "no"
    launch: Launch = "fork" if hasattr(os, "fork") else "spawn"

    def to_arguments(self) -> list[str]:
        """Return the command-line options that `from_arguments` parses."""
        return [f"--{one.name.replace('_', '-')}={_to_text(getattr(self, one.name))}" for one in fields(self)]

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Settings:
        """Return the settings of a command line; missing options keep their defaults. Ends the process on a wrong option."""
        parser = argparse.ArgumentParser(prog="python -m sizer.service.server", allow_abbrev=False)
        default = cls()
        for one in fields(cls):
            value = getattr(default, one.name)
            parse = _to_names if isinstance(value, tuple) else type(value)
            name = f"--{one.name.replace('_', '-')}"
            parser.add_argument(name, type=parse, default=value, choices=_CHOICES.get(one.name))
        return cls(**vars(parser.parse_args(arguments)))


def _to_text(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _to_names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)

"""Imports, preparations and answers that the job server makes once, so that its forked jobs do not repeat them.

The first trace of a process fills caches of operators, and writes to 65 MiB of memory that a forked job would copy.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.metadata
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from sizer.base.errors import JobError, SizerError
from sizer.base.frozen import freeze
from sizer.base.versions import installed
from sizer.catalogue.sources import called_packages
from sizer.query.text import parse_query


def preload(names: tuple[str, ...]) -> dict[str, str]:
    """Import modules and call functions (MODULE:FUNCTION), so that children need not; return the modules' versions.

    The versions include those of packages that are imported later. Raises JobError.
    """
    gc.disable()
    try:
        tempfile.gettempdir()  # writes a file on its first call, which jobs may not: see sizer.processes.sandbox.confine
    except FileNotFoundError as error:
        todo = "set TMPDIR to a folder that can be written"
        raise JobError("there is no folder for temporary files", todo=todo) from error
    for name in names:
        module, _, function = name.partition(":")
        try:
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
        except Exception as error:
            raise explain_import(name, error) from error
    gc.collect()
    freeze()  # keeps the collector from touching, and so copying, pages shared with the children
    gc.enable()
    later = (name for name in called_packages() if name not in names) if "torch" in names else ()
    return {
        **{name: _version(name) for name in ("sizer", *names) if name.isidentifier()},
        **{name: _installed(name) for name in later},
    }


def _version(name: str) -> str:
    return str(getattr(sys.modules.get(name), "__version__", "unknown"))


def explain_import(name: str, error: Exception) -> JobError:
    """Return the error for a module that could not be imported, with the remedy."""
    text = " ".join(str(error).split())
    if "torchvision::nms" in text:
        return JobError(
            f"torch {_installed('torch')} and torchvision {_installed('torchvision')} are incompatible "
            "(operator torchvision::nms does not exist)",
            todo="reinstall both with one pip command from the same package index",
        )
    missing = isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("sizer")
    todo = "reinstall Sizer with its requirements" if missing else None
    return JobError(f"{name} could not be imported ({type(error).__name__}: {text[:300]})", todo=todo)


def _installed(name: str) -> str:
    try:
        return installed(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


# ---------------------------------------------------------------------------------------------------------------- warm


# One of the smallest models of each kind, in the dtypes that take other ways through autocast and the gradient scaler.
QUESTIONS = (
    "arch=torchvision:squeezenet1_1&dtype=float32,bfloat16,amp-float16&batch=1,2&image=64",
    "arch=torchvision:squeezenet1_1&mode=inference&dtype=float32&batch=1&image=64",
    "arch=hf:gpt2&dtype=bfloat16&batch=1&seq=16",
)


def warm() -> None:
    """Answer each question, or leave it: a package that is not installed is no reason to run no job."""
    from sizer.estimating.estimator import estimate  # imports torch: only the job server calls this

    for question in QUESTIONS:
        with suppress(SizerError):
            estimate(parse_query(question))


# --------------------------------------------------------------------------------------------------------------- pages


MAPPED = Path("/proc/self/maps")
COLLAPSE = 25  # MADV_COLLAPSE (asm-generic/mman-common.h, Linux 6.1), whatever the system's setting for huge pages
HUGE_BYTES = 2**21  # x86-64, and 64-bit ARM with pages of 4 KiB


def merge_pages() -> None:
    """Merge this process's memory into huge pages, so that forks copy, and their ends free, far fewer entries of page tables.

    A fork that writes to a huge page copies 4 KiB, as without it. Systems that cannot do this are left as they are.
    """
    if not MAPPED.exists():
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in MAPPED.read_text().splitlines():
        extent, access, _, _, _, *name = line.split(maxsplit=5)
        if access != "rw-p" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(place, 16) for place in extent.split("-"))
        start, end = -(-start // HUGE_BYTES) * HUGE_BYTES, end // HUGE_BYTES * HUGE_BYTES
        if start < end:
            advise(start, end - start, COLLAPSE)  # an error leaves the rest as it is

"""Imports, preparations and answers that the job server makes once, so that the jobs that it forks need not.

The first trace of a process fills caches of operators, and writes to 65 MiB of memory that a forked job would copy.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec

from sizer.base.errors import JobError, SizerError
from sizer.base.frozen import freeze
from sizer.base.versions import installed
from sizer.catalogue.optimizers import BITSANDBYTES, TORCHAO
from sizer.query.text import parse_query

IMPORTED_LATER = (BITSANDBYTES, TORCHAO)  # where a question asks for it, on which its answer depends then


def preload(names: tuple[str, ...]) -> dict[str, str]:
    """Imports modules and calls functions (MODULE:FUNCTION), so that children need not; the versions of those modules that have
    one, and of what they may import yet.

    Raises JobError.
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
    later = (name for name in IMPORTED_LATER if "torch" in names and find_spec(name))
    return {
        **{name: _version(name) for name in ("sizer", *names) if name.isidentifier()},
        **{name: _installed(name) for name in later},
    }


def _version(name: str) -> str:
    return str(getattr(sys.modules.get(name), "__version__", "unknown"))


def explain_import(name: str, error: Exception) -> JobError:
    """Return why a module could not be imported, and what to do."""
    text = " ".join(str(error).split())
    if "torchvision::nms" in text:
        return JobError(
            f"torch {_installed('torch')} and torchvision {_installed('torchvision')} do not belong together "
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

"""The worker's side of the direct path: import the modules that a question needs, fork a confined child, store what it traces."""

from __future__ import annotations

import gc
import importlib
import os
import tempfile
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib.util import find_spec

from sizer.base.errors import JobError, SizerError
from sizer.base.frozen import freeze
from sizer.base.versions import installed
from sizer.catalogue.adapters import IMPORT, PACKAGE
from sizer.catalogue.sources import SOURCES, called_packages
from sizer.processes.process import kill_group
from sizer.processes.wire import error_from_wire, from_line
from sizer.query.request import Request, gpu_of
from sizer.query.text import parse_query
from sizer.service.access import Access, access_of
from sizer.service.edition import edition_of
from sizer.service.job_child import run_forked
from sizer.service.job_memory import private_bytes
from sizer.service.job_process import explain_end, is_crash, over_budget, too_large, too_slow, work_of_child
from sizer.service.local import placeholders
from sizer.service.messages import COMPILED
from sizer.service.preload import explain_import
from sizer.service.settings import TRACING, Settings
from sizer.service.tapes import TapeFolder

LOOK_SECONDS = 0.25  # between two looks at the time and the memory of a child
MOST_RUNS = 2  # a crashed child, not ended by its own limits, is run once more
_COMPILER = "torch._dynamo"
# Numba's compiled code is read from files here, because a confined child could not store it.
_COMPILED = {
    "cuda": ("sizer.allocator.cuda_cache", "sizer.tracing.cuda.cudnn_plans"),
    "mps": ("sizer.allocator.heaps", "sizer.tracing.cuda.cudnn_plans"),
    "cpu": ("sizer.tracing.cuda.cudnn_plans",),
}
_EXPANDABLE = "sizer.allocator.expandable_cache"
REPLAYED = ("estimate", "devices")  # tasks that may be answered from stored results
COMPILING = ("budget",)  # tasks that compile a step even if the query does not ask for it
_REPLAY = "sizer.service.local.replaying:run"
_REPLAYS = ("sizer.estimating.estimator", "sizer.service.local.replaying")
# Cells times stored bytes, from which on compiled replays are faster including their import
_WORTH_COMPILING = 2**20
# The same for untraced cells, of sources with tapes of some thousand events
_SHORT, _CELLS_WORTH_COMPILING = ("torchvision", "timm"), 3


def answer(
    task: str,
    query: str,
    config_text: str | None,
    settings: Settings,
    show: Callable[[str], None],
    *,
    show_part: Callable[[dict], None] | None = None,
    part: str | None = None,
    prepares: bool = True,
) -> dict:
    """Return the plain data of a task's result (`sizer.service.tasks`) on one question.

    Args:
        task: The name of the task.
        query: The query of the question.
        config_text: The config of an architecture from the hub.
        settings: Limits, the folder of tapes, and the function that the child calls.
        show: Called with each line of progress.
        show_part: Called with the data of new parts of the result.
        part: The part of a task that can be split (`sizer.service.messages`).
        prepares: False for a function that needs no torch.

    Raises:
        SizerError: The error of the job, or why it ended without a result.
    """
    request = parse_query(query)
    access = access_of(task, query, config_text, edition_of(_versions(), settings.tapes))
    folder = TapeFolder(settings.tapes) if settings.tapes else None
    kept = access.readable(folder.read(access.architecture)) if folder and access else {}
    job = {
        "task": task,
        "query": query,
        "config_text": config_text,
        "part": part,
        "partials": show_part is not None,
        "kept": kept,
    }
    worker = _Worker(settings, access, folder, show, show_part)
    if prepares and task in REPLAYED and kept and request.compile is None:
        show("replaying stored traces")
        prepare_replay(request, kept, task)
        with suppress(SizerError):  # the job that imports torch reports the error
            if (found := worker.run(job, _REPLAY)) is not None and found.get("answer") is not None:
                return found["answer"]
    if prepares:
        show("importing torch")
        prepare(request, task, compiles=request.compile is not None or task in COMPILING or part == COMPILED)
    for _ in range(MOST_RUNS):
        if (found := worker.run(job)) is not None:
            return found
        if not worker.is_worth_repeating:
            break
    raise worker.end()


class _Worker:
    """Runs children for one question, stores their traces, and reports how the last one ended."""

    def __init__(
        self,
        settings: Settings,
        access: Access | None,
        folder: TapeFolder | None,
        show: Callable[[str], None],
        show_part: Callable[[dict], None] | None,
    ) -> None:
        self._settings, self._access, self._folder, self._show = settings, access, folder, show
        self._show_part = show_part
        self._failure: JobError | None = None
        self._status = 0

    def run(self, job: dict, function: str | None = None) -> dict | None:
        """Return the result of a job in a child that calls a function, the settings' by default; None if it ends without one.

        Raises:
            SizerError: The error of the job.
        """
        settings = self._settings if function is None else replace(self._settings, function=function)
        child = _Child(job, settings)
        try:
            for message in child.messages():
                if "keep" in message and self._folder and self._access:
                    _keep(self._folder, self._access, message["keep"])
                elif "progress" in message:
                    self._show(message["progress"])
                elif "partial" in message and self._show_part is not None:
                    self._show_part(message["partial"])
                elif "error" in message:
                    raise error_from_wire(message["error"])
                elif "result" in message:
                    return message["result"]
        finally:
            self._status, self._failure = child.stop(), child.failure
        return None

    @property
    def is_worth_repeating(self) -> bool:
        """Return True if the last child crashed, and was not ended by its own limits."""
        return self._failure is None and is_crash(self._status)

    def end(self) -> JobError:
        """Return why the last child ended."""
        return self._failure or explain_end(self._status, self._settings)


def imports_of(request: Request) -> tuple[str, ...]:
    """Return the modules that a question needs, or functions (MODULE:FUNCTION) that import them.

    These are the package of its own source, and that of adapters if it trains one.
    """
    source = SOURCES[request.source]
    adapters = (IMPORT,) if request.train == "adapter" and find_spec(PACKAGE) else ()
    # if an optional package is not installed, the job says how to install it
    own = (source.package, source.blueprint.partition(":")[0]) if source.required or find_spec(source.package) else ()
    return (*own, *adapters, *TRACING)


def compiled_for(request: Request) -> tuple[str, ...]:
    """Return the modules of compiled functions that a question needs."""
    expandable = (_EXPANDABLE,) if request.expandable_segments else ()
    return (*_COMPILED[gpu_of(request).backend], *expandable)


def prepare_replay(request: Request, kept: Mapping[str, bytes], task: str) -> None:
    """Import the modules for replays of stored tapes."""
    cells = len(request.dtypes) * len(request.batches)
    many = task != "estimate" or cells * sum(map(len, kept.values())) >= _WORTH_COMPILING
    gc.disable()
    try:
        with placeholders.hidden("scipy"):
            for name in compiled_for(request) if many else ():
                importlib.import_module(name)
        for name in _REPLAYS:
            importlib.import_module(name)
    finally:
        freeze()
        gc.enable()


def prepare(request: Request, task: str, *, compiles: bool) -> None:
    """Import the modules for a question of a task, and the compiler if it `compiles`.

    The garbage collector is off meanwhile, because it would scan all objects of torch repeatedly.

    Raises:
        JobError: A module could not be imported.
    """
    tempfile.gettempdir()  # writes a file on its first call, which jobs may not
    gc.disable()
    name = "torch"
    try:
        if not compiles:
            placeholders.install()
        else:  # the compiler needs its real modules
            importlib.import_module(name)
            importlib.import_module(name := _COMPILER)
            placeholders.install_unrelated()
        with placeholders.hidden("scipy"), placeholders.hidden("numba") if _is_short(request, task) else nullcontext():
            for name in compiled_for(request):
                importlib.import_module(name)
        # PEFT takes for granted that transformers has imported DTensor
        alone = request.world == 1 and request.train != "adapter"
        if SOURCES[request.source].package == "transformers":
            name = "transformers"
            placeholders.install_transformers()
            if alone:
                placeholders.import_undistributed()
        for name in imports_of(request):
            module, _, function = name.partition(":")
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
    except Exception as error:
        raise explain_import(name, error) from error
    freeze()  # keeps the collector from touching, and so copying, pages shared with the child
    gc.enable()


def _is_short(request: Request, task: str) -> bool:
    """Return True if plain Python replays sooner than Numba is imported."""
    cells = len(request.dtypes) * len(request.batches)
    return task == "estimate" and request.source in _SHORT and cells < _CELLS_WORTH_COMPILING


def _versions() -> dict[str, str]:
    """Return the versions of all packages that answers depend on."""
    return {name: installed(name) for name in called_packages()}


def _keep(folder: TapeFolder, access: Access, kept: dict) -> None:
    folder.add(access.architecture, access.stored_name(str(kept["name"])), b64decode(kept["data"], validate=True))


class _Child:
    """A forked and confined child that runs one job, and a thread that ends it when it exceeds a limit of time or memory.

    `failure` is the reason for its end.
    """

    def __init__(self, job: dict, settings: Settings) -> None:
        self.failure: JobError | None = None
        self._settings = settings
        source, sink = os.pipe()
        with tempfile.TemporaryFile() as work:
            work.writelines(work_of_child(job))
            work.seek(0)
            worker = os.getpid()
            self._id = os.fork()
            if self._id == 0:
                run_forked(settings, work.fileno(), sink, parent=worker, group=None)
        os.close(sink)
        self._pipe = os.fdopen(source, "rb")
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._keep_limits, daemon=True)
        self._watch.start()

    def messages(self) -> Iterator[dict]:
        """Yield the child's messages until it ends. Raises JobError if they are too long or not understood."""
        left = self._settings.result_bytes
        while line := self._pipe.readline(left + 1):
            if (left := left - len(line)) < 0:
                raise too_large(self._settings)
            if not line.endswith(b"\n"):
                return  # it was ended in the middle of a line
            try:
                yield from_line(line)
            except ValueError:
                raise JobError("the job wrote something that is not an answer", todo="try again") from None

    def stop(self) -> int:
        """End the child with all that it started; its exit status, negative for the signal that ended it."""
        self._ended.set()
        while True:
            kill_group(self._id)  # no effect if it has ended, or has not made its group yet
            found, status = os.waitpid(self._id, os.WNOHANG)
            if found:
                break
            time.sleep(0.002)
        self._watch.join()
        self._pipe.close()
        return os.waitstatus_to_exitcode(status)

    def _keep_limits(self) -> None:
        deadline, own = time.monotonic() + self._settings.wall_seconds, private_bytes(os.getpid())
        while not self._ended.wait(LOOK_SECONDS):
            if time.monotonic() > deadline:
                self.failure = too_slow(self._settings)
            elif self._settings.budget_bytes and (held := private_bytes(self._id) - own) > self._settings.budget_bytes:
                self.failure = over_budget(held, self._settings)
            if self.failure is not None:
                return kill_group(self._id)

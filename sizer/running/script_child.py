"""Run a script with the null driver and write the results. Imports torch; started by `sizer.running.starting`.

The script runs unchanged in this process, as `python` would run it. Hooks of PyTorch count its steps. PyTorch's own counters
and memory history are read at its end.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.metadata
import json
import multiprocessing
import multiprocessing.process
import os
import pickle
import resource
import signal
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from sizer.base.codec import encode
from sizer.running import other_ranks
from sizer.running.checkpoints import Checkpoints
from sizer.running.driver.build import kernels_for
from sizer.running.history import columns_of
from sizer.running.optimizer_steps import Steps, Stop
from sizer.running.own_recordings import answer_recordings
from sizer.running.rank_messages import Messages
from sizer.running.run_settings import NO_KERNELS, Settings, main_function, own_traceback
from sizer.running.small_values import Values, fix_seeds
from sizer.tracing.compiled.compile_findings import Findings
from sizer.tracing.compiled.dynamo import CACHES_WARNING, HOOKS_WARNING, CompiledSteps, compiled_calls, skip_own_code
from sizer.tracing.compiled.inductor import not_timed, without_function_modes
from sizer.tracing.meta.deepspeed_calls import deepspeed_answered

VARIABLE = "SIZER_DRY_RUN"
MOST_EVENTS = 4_000_000  # events in the memory history
_LINES = 50  # that read unknown values, the most frequent first
_LIBRARIES = tuple(
    dict.fromkeys(folder + os.sep for folder in (*sysconfig.get_paths().values(), str(Path(torch.__file__).parent)))
)


class Run:
    """One run of a script: its hooks, how it ended, and the report."""

    def __init__(self, settings: Settings) -> None:
        """Take the driver of this process. Ends the process if the device has no kernels in this PyTorch."""
        self.settings = settings
        self.driver = ctypes.CDLL(None)
        for name in ("null_space", "null_used", "null_most_used", "null_most_pinned"):
            getattr(self.driver, name).restype = ctypes.c_size_t
        self.driver.null_blind.restype = ctypes.c_ulonglong
        self.steps = Steps(settings.steps, self._finish_stopped)
        self.values = Values(self.driver, skip_draws=settings.skip_draws)
        self.checkpoints = Checkpoints(lambda tensor: tensor.is_cuda, saved=self._end_of_saving)
        self.status, self.message = "completed", ""
        self._record: Callable[..., None] = torch.cuda.memory._record_memory_history
        self._pid, self._began = os.getpid(), time.monotonic()
        self._before_bytes = 0
        self._untimed: AbstractContextManager[None] | None = None  # from the first compiled call on
        self._findings = Findings()
        self._end: object = None  # the script function's return value, or the exception whose traceback references its frames

    def check(self) -> None:
        """End the process with a reason if this machine cannot run the device."""
        try:
            if not self.driver.null_space():
                raise ValueError(
                    "the system gives no address space (vm.overcommit_memory=2, or ulimit -v): raise the limit"
                )
            self.driver.null_compiled(kernels_for(self.settings.capability, torch._C._cuda_getArchFlags()))
        except ValueError as error:
            Path(self.settings.out).write_text(json.dumps({"cannot": str(error)}))
            os._exit(NO_KERNELS)

    def install(self) -> None:
        """Install all hooks, which stay until the process ends."""
        os.environ[VARIABLE] = self.settings.to_json()
        self._record(max_entries=MOST_EVENTS, stacks="python")
        self._recordings = answer_recordings(history=True)
        self._recordings.__enter__()
        self.steps.install()
        self._values = self.values.installed()
        self._values.__enter__()
        compiled, untimed = CompiledSteps(), not_timed()

        def begin(function: Callable[..., Any]) -> Callable[[], None]:
            self.steps.begin_compiled()
            if self._untimed is None:
                self._untimed = untimed
                with without_function_modes():
                    untimed.__enter__()
                    self._findings.start()
                # same as on route meta: else Python's garbage collection time would decide how long the compiler's cycles keep
                # tensors alive
                sys.modules["torch._dynamo"].callback_handler.register_end_callback(lambda arguments: gc.collect())
            return compiled.begin(function)

        self._compiled = compiled_calls(begin, _import_compiler, _prepare_compiler)
        self._compiled.__enter__()
        self._deepspeed = deepspeed_answered()
        self._deepspeed.__enter__()
        self._saves = self.checkpoints.installed()
        self._saves.__enter__()
        self._ranks = other_ranks.one_rank(self.settings.world, self.settings.rank)
        self._ranks.__enter__()
        if self.settings.world > 1:
            other_ranks.install(self.settings.world, self.settings.rank, self.settings.local, self.driver)
            messages = Messages(Path(self.settings.messages), self.settings.rank, self.settings.need)
            self._messages = messages.installed()
            self._messages.__enter__()
            self.checkpoints.ranks = messages
        if self.settings.seconds:
            timer = threading.Timer(self.settings.seconds, self._out_of_time)
            timer.daemon = True
            timer.start()
        self._before_bytes = _resident_bytes()

    def restart(self) -> None:
        """Discard the recording, and record again: a test session measures one test after the other."""
        self._record(enabled=None)
        self._record(max_entries=MOST_EVENTS, stacks="python", clear_history=True)
        self.steps.restart()
        for noted in (self.values.reads, self.values.assumed, self.checkpoints.not_saved):
            noted.clear()
        self._began = time.monotonic()

    def go(self, target: Callable[[], object]) -> None:
        """Call the script and note how it ended. Objects that are alive at its end stay alive, so that the report counts them."""
        try:
            self._end = target()
        except Stop as stop:
            self.status, self._end = "stopped", stop
        except KeyboardInterrupt as interrupt:
            self._end = interrupt
            self._fail("interrupted", "KeyboardInterrupt\n")
        except SystemExit as left:
            self._end = left
            if isinstance(left.code, str):
                print(left.code, file=sys.stderr)
            if left.code not in (None, 0):
                self.status, self.message = "failed", f"SystemExit: {left.code}"
        except torch.OutOfMemoryError as error:
            self._fail("out of memory", own_traceback(error), error)
        except BaseException as error:
            self._fail("failed", own_traceback(error), error)
        finally:
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            ) if threading.current_thread() is threading.main_thread() else None
        if self.status == "completed" and os.getpid() == self._pid:
            threading._shutdown()  # type: ignore[attr-defined] # as Python itself does at its end
            atexit._run_exitfuncs()

    def finish(self) -> NoReturn:
        """Write the report and end the process; a process that the script forked ends without a report."""
        _flush()
        if os.getpid() != self._pid:
            os._exit(0 if self.status == "completed" else 1)
        found = self.found()
        if found["devices"] or not os.path.exists(
            self.settings.out
        ):  # else a process that the script started has written one
            partial = f"{self.settings.out}.{self._pid}"
            Path(partial).write_text(json.dumps(found))
            os.replace(partial, self.settings.out)
        for child in multiprocessing.active_children():
            child.terminate()
        self.checkpoints.close()
        _flush()
        os._exit(0)  # PyTorch's threads would wait for a device that never answers

    def _fail(self, status: str, text: str, error: BaseException | None = None) -> None:
        print(text, end="", file=sys.stderr)
        self.status, self._end = status, error or self._end
        self.message = "" if error is None else f"{type(error).__name__}: {error}"[:2000]

    def _finish_stopped(self) -> NoReturn:
        self.status = "stopped"
        self.finish()

    def _out_of_time(self) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        where = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        self.status, self.message = "out of time", f"{self.settings.seconds} s were over{where}"
        self.finish()

    def _end_of_saving(self) -> None:
        if self.settings.steps and self.steps.done >= self.settings.steps:
            self.steps.stop()

    def found(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        found: dict[str, Any] = {
            "status": self.status,
            "message": self.message,
            "seconds": round(time.monotonic() - self._began, 1),
            "steps": self.steps.done,
            "host_bytes": max(0, usage.ru_maxrss * 1024 - self._before_bytes),
            "pinned_bytes": self.driver.null_most_pinned(),
            "blind_reads": self.driver.null_blind(),
            "uncounted": self._uncounted(),
            "reads": self.values.reads.most_common(_LINES),
            "assumed": self.values.assumed.most_common(_LINES),
            "not_saved": [*dict.fromkeys(self.checkpoints.not_saved)],
            "versions": {"torch": importlib.metadata.version("torch")},
            "expandable": "expandable_segments:True"
            in os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")),
            "compiled": encode(None if self._untimed is None else self._findings.read()),
            "rank": self.settings.rank,
            "world": self.settings.world,
            "devices": [],
        }
        if not torch.cuda.is_initialized():
            return found
        with torch._C.DisableTorchFunction():
            stats = {index: torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())}
            snapshot = torch.cuda.memory._snapshot()
            found["model"] = self._model()
        if self.settings.snapshot:
            Path(self.settings.snapshot).write_bytes(pickle.dumps(snapshot, protocol=4))
        for index, counters in stats.items():
            if counters.get("reserved_bytes.all.peak", 0):
                found["devices"].append(self._device(index, counters))
        if found["devices"]:
            fullest = max(found["devices"], key=lambda row: row["peak_allocated_bytes"])["device"]
            trace = snapshot["device_traces"][fullest]
            found["cut"] = len(trace) >= MOST_EVENTS
            found["fullest"] = fullest
            found["columns"] = columns_of(
                trace,
                modules=self.steps.modules,
                labels=self.steps.labels,
                backwards=self.steps.backwards,
                phase_ends=self.steps.phase_ends,
                library_folders=_LIBRARIES,
            )
        return found

    def _uncounted(self) -> list[str]:
        """Return the libraries that were called and have unknown workspaces."""
        called = self.driver.null_libraries()
        names = [name for bit, name in enumerate(("cuFFT", "cuSOLVER", "cuSPARSE")) if called >> bit & 1]
        return [*names, "cuDNN's CTC loss"] if ctypes.c_int.in_dll(self.driver, "null_ctc").value else names

    def _device(self, index: int, counters: dict[str, int]) -> dict[str, int]:
        return {
            "device": index,
            "peak_allocated_bytes": counters["allocated_bytes.all.peak"],
            "peak_reserved_bytes": counters["reserved_bytes.all.peak"],
            "peak_driver_bytes": self.driver.null_most_used(index),
            "retries": counters["num_alloc_retries"],
            "out_of_memory": counters["num_ooms"],
        }

    def _model(self) -> dict[str, Any]:
        """Return counts of the root modules that ran."""
        modules = nn.ModuleList(self.steps.roots)
        parameters = list(modules.parameters())
        buffers = list(modules.buffers())
        return {
            "name": ", ".join(dict.fromkeys(type(root).__name__ for root in self.steps.roots)) or "no module",
            "parameters": sum(p.numel() for p in parameters),
            "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "buffers": sum(b.numel() for b in buffers),
            "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "buffer_bytes": sum(b.numel() * b.element_size() for b in buffers),
            "dtype": next(
                (str(p.dtype).removeprefix("torch.") for p in parameters if p.is_floating_point()), "float32"
            ),
        }


def _import_compiler() -> None:
    """Import Dynamo without the values' function mode, which would follow its tensors."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        with without_function_modes():
            importlib.import_module("torch._dynamo.eval_frame")


def _prepare_compiler() -> None:
    skip_own_code()
    for message in (HOOKS_WARNING, CACHES_WARNING):
        warnings.filterwarnings("ignore", message=message)


def watch_spawned() -> None:
    """Watch a process that `multiprocessing` spawns: it writes the report if it used a device."""
    settings = Settings.from_json(os.environ[VARIABLE])
    base: Any = multiprocessing.process.BaseProcess
    bootstrap = base._bootstrap

    def watched(process: Any, *args: Any, **kwargs: Any) -> int:
        run = Run(settings)
        run.check()
        run.install()
        work = process.run

        def run_process() -> None:
            run.go(work)
            if torch.cuda.is_initialized():
                run.finish()
            if run.status != "completed":
                sys.exit(1)

        process.run = run_process
        return bootstrap(process, *args, **kwargs)

    base._bootstrap = watched


def main() -> NoReturn:
    """Run the script that the settings name."""
    settings = Settings.from_json(sys.argv[1])
    end_with_parent()
    run = Run(settings)
    run.check()
    run.install()
    fix_seeds()
    run.go(main_function(settings))
    run.finish()


def end_with_parent() -> None:
    """Ask Linux to kill this process if its parent ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader has left
            continue

"""Settings that a dry run's parent process sends to its child, as JSON, and the user's program as a function.

No torch.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

NO_KERNELS = 71  # the exit status of a child that cannot run the device
ROOT = Path(__file__).parents[2]


def start_code(module: str) -> str:
    """Return code for `python -c` that calls `main` of a module of this package. The path of imports stays that of the user."""
    root = str(ROOT)
    first = f"import sys; sys.path.insert(0, {root!r})"
    return f"{first}; from sizer.running.{module} import main; sys.path.remove({root!r}); main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one run. `kind` is "script", "module" or "code"; `target` is its path, name or text.

    - `steps`: number of optimizer steps, 0 for all. `seconds`: time limit, 0 for none.
    - `world`, `rank`: as in torchrun. `local`: ranks of one host. `messages`: folder for objects that ranks send each other.
    - `capability`: compute capability of the device. `gpu`: key of the device.
    - `out`: file for the report. `snapshot`: file for PyTorch's snapshot, empty for none.
    """

    kind: str
    target: str
    arguments: tuple[str, ...]
    out: str
    capability: tuple[int, int]
    steps: int = 3
    seconds: int = 0
    world: int = 1
    rank: int = 0
    local: int = 1
    skip_draws: bool = False
    snapshot: str = ""
    gpu: str = ""
    messages: str = ""

    def need(self, rank: int) -> NoReturn:
        """End this process: another rank has to run first."""
        Path(self.out).write_text(json.dumps({"needs": rank}))
        os._exit(0)

    def to_json(self) -> str:
        """Return the settings as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings that `to_json` wrote."""
        data = json.loads(text)
        return cls(**{**data, "arguments": tuple(data["arguments"]), "capability": tuple(data["capability"])})


# ------------------------------------------------------------------------------------------------------------- program


def main_function(settings: Settings) -> Callable[[], object]:
    """Set sys.argv and sys.path for the program, and return the function that runs it."""
    target = settings.target
    sys.argv = [target, *settings.arguments]
    if settings.kind == "code":
        sys.argv[0] = "-c"
        sys.path.insert(0, "")
        names = {"__name__": "__main__", "__builtins__": __builtins__}
        return lambda: exec(compile(target, "<string>", "exec"), names)
    if settings.kind == "module":
        sys.path.insert(0, os.getcwd())
        return lambda: runpy.run_module(target, run_name="__main__", alter_sys=True)
    sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
    return lambda: runpy.run_path(target, run_name="__main__")


_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_TRACER = str(Path(__file__).parents[1] / "tracing") + os.sep


def own_traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it, without frames of this package, its tracer, or runpy."""
    found = traceback.TracebackException.from_exception(error)
    _drop_ours(found)
    return "".join(found.format())


def _drop_ours(found: traceback.TracebackException) -> None:
    lines = list(found.stack)
    traced = next((place for place, line in enumerate(lines) if line.filename == f"{_TRACER}recorder.py"), len(lines))
    kept = [line for line in lines[:traced] if not line.filename.startswith((_PACKAGE, runpy.__file__, "<frozen runpy>"))]
    found.stack = traceback.StackSummary.from_list(kept)
    for other in (found.__cause__, found.__context__):
        if other is not None:
            _drop_ours(other)

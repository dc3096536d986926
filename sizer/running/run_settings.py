"""Settings that a dry run's parent process sends to its child, as JSON, and the user's program as a function.

No torch.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

NO_KERNELS = 71  # the exit status of a child that cannot run the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run. `kind` is "script", "module" or "code", `target` its path, name or text.

    `steps` is the number of optimizer steps, 0 for all; `seconds` a limit of time, 0 for none. `world` and `rank` are those of
    torchrun, `local` the ranks of one host. `capability` is that of the device, `out` the file for the report, `snapshot` the file
    for PyTorch's snapshot, empty for none. `gpu` is the key of the device.
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

"""The user's program as a function that runs it the way `python` does. No torch."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable

from sizer.running.settings import Settings


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

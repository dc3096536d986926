"""Python imports this module in every process that a dry run's script starts; spawned workers are watched as the script is."""

import importlib
import os
import sys


def _start() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    if "SIZER_DRY_RUN" in os.environ and any("multiprocessing.spawn" in word for word in sys.orig_argv):
        sys.path.insert(0, os.environ["SIZER_DRY_RUN_ROOT"])
        from sizer.running.script_child import watch_spawned

        sys.path.remove(os.environ["SIZER_DRY_RUN_ROOT"])
        watch_spawned()
    sys.path = [folder for folder in sys.path if os.path.abspath(folder) != here]
    own = sys.modules.pop("sitecustomize", None)  # the environment's own module of this name, if there is one
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError:
        if own is not None:
            sys.modules["sitecustomize"] = own


_start()

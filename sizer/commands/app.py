"""The command `app`: the page in a browser."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from sizer.base.errors import RequestError
from sizer.commands.waiting import MakeClient

_PACKAGE = Path(__file__).resolve().parents[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("options", nargs="*", metavar="OPTION", help="options of `streamlit run`, behind --")


def run(options: argparse.Namespace, make_client: MakeClient) -> int:
    """Replace this process by `streamlit run`.

    Raises:
        RequestError: Streamlit is not installed.
    """
    if find_spec("streamlit") is None:
        raise RequestError("app", given="an installation without Streamlit", todo='pip install "sizer[app]"')
    sys.stdout.flush()
    command = [sys.executable, "-m", "streamlit", "run", str(script()), *options.options]
    os.execv(sys.executable, command)


def script() -> Path:
    """Return the file that Streamlit runs: in the package if a wheel was installed, else at the top of the checkout."""
    installed = _PACKAGE / "app" / "app.py"
    return installed if installed.exists() else _PACKAGE.parent / "app.py"


COMMANDS = {"app": (add_arguments, run)}

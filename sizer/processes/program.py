"""A module run as a separate program that answers with one JSON value, so that the caller imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

from sizer.base.errors import JobError, SizerError, quote
from sizer.processes.environment import own_environment
from sizer.processes.process import python_command
from sizer.processes.wire import error_from_wire, error_to_wire


def run_program(module: str, *arguments: str, seconds: float, what: str) -> object:
    """Return the value (plain data) that `python -m MODULE ARGUMENTS` prints with `print_value`.

    `what` completes the sentence "... could not be ...".

    Raises:
        SizerError: The program's own error.
        JobError: The program crashed, gave no valid answer, or took longer than `seconds` and was killed.
    """
    try:
        done = subprocess.run(
            python_command(module, *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=own_environment(),
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise JobError(f"{what} within {seconds:.0f} s") from None
    try:
        message = json.loads(done.stdout.splitlines()[-1])
        if "error" in message:
            raise error_from_wire(message["error"])
        return message["result"]
    except (ValueError, IndexError, KeyError, TypeError):
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.returncode}"]
        todo = "check that torch can be imported"
        raise JobError(f"{what} ({quote(lines[-1], 300)})", todo=todo) from None


def print_value(make: Callable[[], object]) -> None:
    """Print what `make` returns, or the SizerError that it raises, as the last line of standard output."""
    try:
        message = {"result": make()}
    except SizerError as error:
        message = {"error": error_to_wire(error)}
    sys.stdout.write(f"\n{json.dumps(message, allow_nan=False)}\n")

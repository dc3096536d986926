"""Ask accelerate what `accelerate launch` starts, in a separate process because accelerate imports torch.

accelerate reads its options and its config file, and starts torch.distributed.run or Python. Only the start is replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock


class _Started(Exception):
    """The launcher would start processes now."""

    def __init__(
        self, arguments: argparse.Namespace, *, nodes: int, local: int, environment: Mapping[str, str], before: Mapping[str, str]
    ) -> None:
        changed = {name: value for name, value in environment.items() if before.get(name) != value}
        self.found = {
            "program": [arguments.training_script, *arguments.training_script_args],
            "module": bool(arguments.module),
            "world": nodes * local,
            "local": local,
            "environment": changed,
        }


def launched(words: Sequence[str]) -> dict[str, Any]:
    """Return program, module, world, local ranks and changed environment of `accelerate launch`; an `error` if it refuses.

    Without `--num_processes` and a config file the host has one GPU.
    """
    from accelerate.commands import launch
    from accelerate.utils import launch as preparation

    before = dict(os.environ)

    def run(arguments: argparse.Namespace) -> NoReturn:
        nodes = int(str(arguments.nnodes).rpartition(":")[2])
        raise _Started(
            arguments, nodes=nodes, local=int(arguments.nproc_per_node), environment=os.environ, before=before
        )

    def run_alone(arguments: argparse.Namespace) -> NoReturn:
        _, environment = launch.prepare_simple_launcher_cmd_env(arguments)
        raise _Started(arguments, nodes=1, local=1, environment=environment, before=before)

    def refuse(arguments: argparse.Namespace) -> NoReturn:
        raise ValueError("TPUs cannot be described")

    validate = launch._validate_launch_command

    def validate_for_hosts(arguments: argparse.Namespace) -> tuple[argparse.Namespace, Any, bool]:
        arguments, defaults, precision_is_given = validate(arguments)
        arguments.deepspeed_multinode_launcher = "standard"  # torch.distributed.run, not pdsh
        if arguments.num_machines > 1:  # other hosts do not change the figures
            arguments.main_process_ip = arguments.main_process_ip or "127.0.0.1"
            arguments.main_process_port = arguments.main_process_port or 29500
            arguments.machine_rank = arguments.machine_rank or 0
        return arguments, defaults, precision_is_given

    errors = io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(errors),
            contextlib.redirect_stdout(errors),
            mock.patch("torch.distributed.run.run", run),
            mock.patch.object(launch, "simple_launcher", run_alone),
            mock.patch.object(launch, "tpu_launcher", refuse),
            mock.patch.object(launch, "_validate_launch_command", validate_for_hosts),
            mock.patch.object(launch, "is_bf16_available", lambda *_: True),
            mock.patch.object(preparation, "is_port_in_use", lambda *_: False),
            mock.patch("torch.cuda.device_count", lambda: 1),
            mock.patch.object(subprocess, "Popen", refuse),
        ):
            launch.launch_command(launch.launch_command_parser().parse_args(list(words)))
    except _Started as started:
        return started.found
    except SystemExit:
        lines = errors.getvalue().split("error:")
        return {"error": " ".join(lines[-1].split())}
    except Exception as error:  # any error, raised by a library that reads a file of the user
        return {"error": " ".join(str(error).split())}
    return {"error": "it starts no script"}


def main() -> None:
    """Answer for the words of the second argument, JSON, in the file that the first one names."""
    Path(sys.argv[1]).write_text(json.dumps(launched(json.loads(sys.argv[2]))), encoding="utf-8")

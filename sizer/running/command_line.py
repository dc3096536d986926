"""Parse the command after `--`: a script, a module, code, `torchrun`, `accelerate launch` or `deepspeed`. No torch."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from sizer.base.errors import RequestError, quote
from sizer.running.run_settings import start_code

SCRIPT, MODULE, CODE = "script", "module", "code"
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_USUAL_HOST = 8  # GPUs
_EXAMPLE = "write for example `sizer run -- train.py --batch-size 8`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program of the user.

    `kind` is script, module or code. `world` is the number of ranks that its launcher starts, None without a launcher. `local`
    is the number of ranks of one host. `environment` are the variables that a launcher sets. `rank_option` is the option by
    which the launcher passes the local rank to the program, empty for none.
    """

    kind: str
    target: str
    arguments: tuple[str, ...]
    world: int | None = None
    local: int | None = None
    environment: tuple[tuple[str, str], ...] = ()
    rank_option: str = ""


def read_command(words: Sequence[str]) -> Command:
    """Return the program that a command line starts. Raises RequestError for a command that is not understood."""
    words = list(words)
    if words and _PYTHON.fullmatch(Path(words[0]).name):
        words = words[1:]
    while words and words[0] in ("-u", "-B", "-O", "-s", "-E"):
        words = words[1:]
    if not words:
        raise RequestError("run has no script", allowed="a Python script after --", todo=_EXAMPLE)
    if words[0] == "-c":
        if len(words) < 2:
            raise RequestError("run -c has no code", allowed="code after -c", todo=_EXAMPLE)
        return Command(kind=CODE, target=words[1], arguments=tuple(words[2:]))
    if Path(words[0]).name == "torchrun":
        return _torchrun(words[1:])
    if words[:2] == ["-m", "torch.distributed.run"]:
        return _torchrun(words[2:])
    if words[:2] == ["-m", "torch.distributed.launch"]:
        return _torchrun(words[2:], rank_option="--local-rank")
    if Path(words[0]).name == "deepspeed":
        return _deepspeed(words[1:])
    if words[:2] == ["-m", "deepspeed.launcher.runner"]:
        return _deepspeed(words[2:])
    if Path(words[0]).name == "accelerate" and words[1:2] == ["launch"]:
        return _accelerate(words[2:])
    if words[:2] == ["-m", "accelerate.commands.launch"]:
        return _accelerate(words[2:])
    return _program(words)


def _program(words: Sequence[str], *, module: bool = False) -> Command:
    if words[0] == "-m" or module:
        words = words[0 if module and words[0] != "-m" else 1 :]
        if not words:
            raise RequestError("run -m has no module", allowed="the name of a module after -m", todo=_EXAMPLE)
        return Command(kind=MODULE, target=words[0], arguments=tuple(words[1:]))
    if not Path(words[0]).is_file() and not (Path(words[0]) / "__main__.py").is_file():
        raise RequestError("script", given=quote(words[0]), allowed="a file that exists", todo=_EXAMPLE)
    return Command(kind=SCRIPT, target=words[0], arguments=tuple(words[1:]))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{self.prog}: {message}", todo="see its own --help")


# What torchrun tells a rank without others (torch/distributed/elastic/agent/server/local_elastic_agent.py, PyTorch 2.15)
_ONE_RANK = tuple(
    {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "dry-run",
    }.items()
)

# Options of torchrun that take a value and do not matter here (torch/distributed/run.py, PyTorch 2.15).
_TORCHRUN_VALUES = (
    "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts", "monitor-interval", "start-method", "role", "log-dir",
    "r", "t", "redirects", "tee", "local-ranks-filter", "node-rank", "master-addr", "master-port", "local-addr", "logs-specs",
    "event-log-handler", "duplicate-stdout-filters", "duplicate-stderr-filters", "numa-binding", "signals-to-handle",
    "virtual-local-rank-addr", "shutdown-timeout",
)  # fmt: skip
_TORCHRUN_FLAGS = ("standalone", "no-python", "run-path", "virtual-local-rank")


def _torchrun(words: Sequence[str], *, rank_option: str = "") -> Command:
    parser = _Parser(prog="torchrun", add_help=False, allow_abbrev=False)
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", default="1")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("--use-env", "--use_env", action="store_true")
    _add_ignored(parser, _TORCHRUN_VALUES, _TORCHRUN_FLAGS)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    nodes = options.nnodes.rpartition(":")[2]
    local = int(options.nproc_per_node) if options.nproc_per_node.isdigit() else _USUAL_HOST  # "gpu", "auto"
    if not nodes.isdigit():
        raise RequestError(
            "torchrun --nnodes", given=quote(options.nnodes), allowed="a number", todo="write --nnodes=2"
        )
    found = _launched(options.program, options.module, world=int(nodes) * local, local=local)
    return found if options.use_env else replace(found, rank_option=rank_option)


def _accelerate(words: Sequence[str]) -> Command:
    """Return the command that accelerate would start: accelerate reads its config file and passes settings in the environment."""
    with tempfile.TemporaryDirectory(prefix="sizer-run-") as folder:
        answer = Path(folder) / "launched.json"
        asked = [sys.executable, "-c", start_code("accelerate_child"), str(answer), json.dumps(list(words))]
        ended = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if not answer.exists():
            reason = ended.stderr.strip().rpartition("\n")[2] or f"it ended with {ended.returncode}"
            raise RequestError("accelerate launch", todo=reason)
        found = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in found:
        raise RequestError("accelerate launch", todo=found["error"])
    command = _launched(found["program"], found["module"], world=found["world"], local=found["local"])
    # all devices of the described host are there
    kept = {name: value for name, value in found["environment"].items() if name != "CUDA_VISIBLE_DEVICES"}
    return replace(command, environment=tuple(kept.items()))


# Options of deepspeed that take a value, or none, and do not matter here (deepspeed/launcher/runner.py, DeepSpeed 0.19).
_DEEPSPEED_VALUES = (
    "master_port", "master_addr", "node_rank", "launcher", "launcher_args", "enable_each_rank_log", "bind_core_list",
    "ssh_port", "venv_script", "log_level",
)  # fmt: skip
_DEEPSPEED_FLAGS = (
    "no_python", "no_ssh", "no_ssh_check", "force_multi", "save_pid", "bind_cores_to_rank", "quiet", "q",
)  # fmt: skip


def _deepspeed(words: Sequence[str]) -> Command:
    parser = _Parser(prog="deepspeed", add_help=False, allow_abbrev=False)
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1)
    parser.add_argument("--num_nodes", type=int, default=-1)
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("-H", "--hostfile", type=Path)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("--no_local_rank", action="store_true")
    _add_ignored(parser, _DEEPSPEED_VALUES, _DEEPSPEED_FLAGS)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    if options.exclude:
        raise RequestError(
            "deepspeed --exclude", given=quote(options.exclude), allowed="--include, or --num_gpus", todo="name the used GPUs"
        )
    named = [one.partition(":")[2] for one in options.include.split("@")] if options.include else []
    hosts = [slots.count(",") + 1 if slots else _USUAL_HOST for slots in named]
    if not hosts and options.hostfile is not None and options.hostfile.is_file():
        hosts = [int(slots) for slots in re.findall(r"^[^#\n]*\bslots=(\d+)", options.hostfile.read_text(), re.MULTILINE)]
    hosts = hosts or [_USUAL_HOST] * max(1, options.num_nodes)
    if options.num_nodes > 0:
        hosts = hosts[: options.num_nodes]
    if options.num_gpus > 0:
        hosts = [options.num_gpus] * len(hosts)
    found = _launched(options.program, options.module, world=sum(hosts), local=hosts[0])
    return found if options.no_local_rank else replace(found, rank_option="--local_rank")


def _add_ignored(parser: argparse.ArgumentParser, values: Sequence[str], flags: Sequence[str]) -> None:
    for name in (*values, *flags):
        long = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name.replace('-', '_')}"))
        forms = tuple(long) if len(name) > 1 else (f"-{name}",)
        if name in flags:
            parser.add_argument(*forms, action="store_true")
        else:
            parser.add_argument(*forms)


def _launched(program: Sequence[str], module: bool, *, world: int, local: int) -> Command:
    program = list(program[1:] if program[:1] == ["--"] else program)
    if not program:
        raise RequestError("the launcher has no script", allowed="a script after its options", todo=_EXAMPLE)
    found = _program(program, module=module)
    environment = _ONE_RANK if world == 1 else ()  # with more, the process of a rank sets its own
    return replace(found, world=world, local=local, environment=environment)

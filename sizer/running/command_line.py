"""Read what follows `--`: a script, a module, code, `torchrun` or `accelerate launch`. No torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sizer.base.errors import RequestError, quote

SCRIPT, MODULE, CODE = "script", "module", "code"
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_EXAMPLE = "write for example `sizer run -- train.py --batch-size 8`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program of the user: `kind` is script, module or code; `world` the ranks that its launcher starts, None without one.

    `local` is the number of ranks of one host, `environment` what a launcher sets.
    """

    kind: str
    target: str
    arguments: tuple[str, ...]
    world: int | None = None
    local: int | None = None
    environment: tuple[tuple[str, str], ...] = ()


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
    if Path(words[0]).name == "torchrun" or words[:2] in (
        ["-m", "torch.distributed.run"],
        ["-m", "torch.distributed.launch"],
    ):
        return _torchrun(words[1:] if words[0] != "-m" else words[2:])
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


# Options of torchrun that take a value and do not matter here (torch/distributed/run.py, PyTorch 2.15).
_TORCHRUN_VALUES = (
    "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts", "monitor-interval", "start-method", "role", "log-dir",
    "r", "t", "redirects", "tee", "local-ranks-filter", "node-rank", "master-addr", "master-port", "local-addr", "logs-specs",
    "event-log-handler", "duplicate-stdout-filters", "duplicate-stderr-filters", "numa-binding", "signals-to-handle",
    "virtual-local-rank-addr", "shutdown-timeout",
)  # fmt: skip
_TORCHRUN_FLAGS = ("standalone", "no-python", "run-path", "virtual-local-rank")


def _torchrun(words: Sequence[str]) -> Command:
    parser = _Parser(prog="torchrun", add_help=False, allow_abbrev=False)
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", default="1")
    parser.add_argument("-m", "--module", action="store_true")
    _add_ignored(parser, _TORCHRUN_VALUES, _TORCHRUN_FLAGS)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    nodes = options.nnodes.rpartition(":")[2]
    local = options.nproc_per_node if options.nproc_per_node.isdigit() else "8"  # "gpu", "auto": those of a usual host
    if not nodes.isdigit():
        raise RequestError(
            "torchrun --nnodes", given=quote(options.nnodes), allowed="a number", todo="write --nnodes=2"
        )
    return _launched(options.program, options.module, world=int(nodes) * int(local), local=int(local))


def _accelerate(words: Sequence[str]) -> Command:
    parser = _Parser(prog="accelerate launch", add_help=False, allow_abbrev=False)
    parser.add_argument("--num_processes", "--num-processes", type=int, default=1)
    parser.add_argument("--num_machines", "--num-machines", type=int, default=1)
    parser.add_argument("--mixed_precision", "--mixed-precision", default="no")
    parser.add_argument("--gradient_accumulation_steps", "--gradient-accumulation-steps", default="1")
    parser.add_argument("-m", "--module", action="store_true")
    flags = ("multi_gpu", "use_fsdp", "use_deepspeed", "same_network", "no_python", "quiet", "debug")
    values: tuple[str, ...] = ("config_file", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids", "dynamo_backend")
    values += ("num_cpu_threads_per_process",)
    _add_ignored(parser, values, flags)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    for name in ("use_fsdp", "use_deepspeed", "config_file"):
        if getattr(options, name):
            todo = "use torchrun, or set it in the script"
            raise RequestError(f"accelerate launch --{name}", allowed="its options without a config file", todo=todo)
    world, machines = options.num_processes, options.num_machines
    found = _launched(options.program, options.module, world=world, local=max(1, world // machines))
    environment = (
        ("ACCELERATE_MIXED_PRECISION", options.mixed_precision),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", options.gradient_accumulation_steps),
    )
    return Command(
        kind=found.kind,
        target=found.target,
        arguments=found.arguments,
        world=found.world,
        local=found.local,
        environment=environment,
    )


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
    return Command(kind=found.kind, target=found.target, arguments=found.arguments, world=world, local=local)

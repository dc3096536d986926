"""CPU time and memory of whole commands against `python -c "import torch"`: `python -m tests.benchmarks.bench_seconds [--times 5]`.

Each command and the import run in turn; the ratios are medians. A new question has no cache folder. Others have a copy of the
folder in which an earlier question was answered. CPU seconds are those of all processes of a command. Memory is that of its largest
process.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from sizer.base.units import MIB
from sizer.service.tape_folder import FOLDER_VARIABLE

IMPORT = [sys.executable, "-c", "import torch"]
ONE_CELL = ("--dtype", "bfloat16", "--batch", "1")
RESNET = ("resnet50", "--dtype", "float32", "--batch")
# What is asked, and what was asked before, None for nothing
ROWS = (
    ("kept question, same", ("resnet50",), ("resnet50",)),
    ("kept tapes, ResNet-50 on another GPU", (*RESNET, "32", "--gpu", "h100-80gb"), (*RESNET, "32")),
    ("kept tapes, ResNet-50 at another batch", (*RESNET, "33"), (*RESNET, "32")),
    ("kept tapes, ResNet-50 on another GPU, 40 cells", ("resnet50", "--gpu", "rtx-4090"), ("resnet50",)),
    ("kept tapes, Llama-3.1-8B on another GPU", ("llama-3.1-8b", *ONE_CELL, "--gpu", "a100-40gb"), ("llama-3.1-8b", *ONE_CELL)),
    ("new ResNet-50, one cell", (*RESNET, "32"), None),
    ("new ResNet-50, 40 cells", ("resnet50",), None),
    ("new Llama-3.1-8B, one cell", ("llama-3.1-8b", *ONE_CELL), None),
)


def measure(command: Sequence[str], folder: str) -> tuple[float, float, int]:
    """Return the CPU seconds, elapsed seconds and most bytes of a command's processes, in a process that runs nothing else."""
    source, sink = os.pipe()
    if (child := os.fork()) == 0:
        environment = {**os.environ, FOLDER_VARIABLE: folder}
        begin = time.perf_counter()
        status = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
        elapsed = time.perf_counter() - begin
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        os.write(sink, f"{used.ru_utime + used.ru_stime} {elapsed} {used.ru_maxrss * 1024} {status}".encode())
        os._exit(0)
    os.close(sink)
    with open(source) as pipe:
        seconds, elapsed, most_bytes, status = pipe.read().split()
    os.waitpid(child, 0)
    if int(status):
        raise SystemExit(f"{' '.join(command)} ended with {status}")
    return float(seconds), float(elapsed), int(most_bytes)


def main() -> None:
    """Print a row for each command: CPU seconds, their ratio to the import's, that of elapsed seconds, and MiB."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    for title, arguments, before in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            if before is not None:
                measure(_command(before), f"{folder}/before")
            _measure_anew(arguments, folder)  # compiles bytecode and Numba's functions
            pairs = [(_measure_anew(arguments, folder), measure(IMPORT, "")) for _ in range(times)]
        seconds = statistics.median(ours[0] for ours, _ in pairs)
        cpu, elapsed = (statistics.median(ours[at] / theirs[at] for ours, theirs in pairs) for at in (0, 1))
        most = max(ours[2] for ours, _ in pairs)
        print(
            f"{title}: {seconds:.2f} s of CPU time, {cpu:.3f} of `import torch`, {elapsed:.3f} of its elapsed time, "
            f"{most / MIB:,.0f} MiB",
            flush=True,
        )


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "sizer", "estimate", *arguments, "--json"]


def _measure_anew(arguments: Sequence[str], folder: str) -> tuple[float, float, int]:
    """Measure a command with a copy of the cache that was there before, if there was one."""
    if not os.path.isdir(f"{folder}/before"):
        return measure(_command(arguments), "")
    shutil.rmtree(f"{folder}/now", ignore_errors=True)
    shutil.copytree(f"{folder}/before", f"{folder}/now")
    return measure(_command(arguments), f"{folder}/now")


if __name__ == "__main__":
    main()

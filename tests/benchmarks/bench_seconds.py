"""CPU time and memory of whole commands against `python -c "import torch"`: `python -m tests.benchmarks.bench_seconds [--times 5]`.

Each command and the import run in turn; the ratios are medians. A new question has an empty cache folder. CPU seconds are those of
all processes of a command. Memory is that of its largest process.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from sizer.base.units import MIB
from sizer.service.tape_folder import FOLDER_VARIABLE

IMPORT = [sys.executable, "-c", "import torch"]
ONE_CELL = ("--dtype", "bfloat16", "--batch", "1")
# What is asked, and whether the cache knows the answer
ROWS = (
    ("kept question, same", ("resnet50",), True),
    ("new ResNet-50, one cell", ("resnet50", "--dtype", "float32", "--batch", "32"), False),
    ("new ResNet-50, 40 cells", ("resnet50",), False),
    ("new Llama-3.1-8B, one cell", ("llama-3.1-8b", *ONE_CELL), False),
)


def measure(command: Sequence[str], folder: str) -> tuple[float, int]:
    """Return the CPU seconds and the most bytes of a command's processes, in a process that runs nothing else."""
    source, sink = os.pipe()
    if (child := os.fork()) == 0:
        environment = {**os.environ, FOLDER_VARIABLE: folder}
        status = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        os.write(sink, f"{used.ru_utime + used.ru_stime} {used.ru_maxrss * 1024} {status}".encode())
        os._exit(0)
    os.close(sink)
    with open(source) as pipe:
        seconds, most_bytes, status = pipe.read().split()
    os.waitpid(child, 0)
    if int(status):
        raise SystemExit(f"{' '.join(command)} ended with {status}")
    return float(seconds), int(most_bytes)


def main() -> None:
    """Print a row for each command: CPU seconds, their ratio to the import's, and MiB."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    for title, arguments, known in ROWS:
        command = [sys.executable, "-m", "sizer", "estimate", *arguments, "--json"]
        with tempfile.TemporaryDirectory() as folder:
            folder = folder if known else ""
            measure(command, folder)  # compiles bytecode and Numba's functions, and fills the cache
            pairs = [(measure(command, folder), measure(IMPORT, folder)) for _ in range(times)]
        seconds = statistics.median(ours[0] for ours, _ in pairs)
        ratio = statistics.median(ours[0] / theirs[0] for ours, theirs in pairs)
        most = max(ours[1] for ours, _ in pairs)
        print(f"{title}: {seconds:.2f} s of CPU time, {ratio:.3f} of `import torch`, {most / MIB:,.0f} MiB", flush=True)


if __name__ == "__main__":
    main()

"""Steps with compiled code over the null driver: PyTorch's own figures of each step, as JSON.

python -m tests.null_driver.compiled GPU FILE [NAME…]

records what FILE lacks of tests.tracing.compiled_works, each in a process of its own. `python -m tests.null_driver.compiled --one
NAME` prints those of one work. Triton's kernels are not compiled: what Inductor's wrapper allocates is the same with them.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import torch

from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.compiled.inductor import constants_on_host
from tests.null_driver.build import null_environment
from tests.tracing.compiled_works import WORKS

STEPS = 3
ROOT = Path(__file__).parent.parent.parent
RECORDED = Path(__file__).parent / "compiled.json"
GPU = "h100-80gb"


class Kernel:
    """A Triton kernel that was not compiled."""

    def run(self, *args: object, **kwargs: object) -> None:
        """Launch nothing."""


@contextmanager
def nothing_compiled_or_timed() -> Iterator[None]:
    """Within the context no Triton kernel is compiled, and no matrix product is padded: the driver's times mean nothing.

    Constants are computed on the host: the driver computes nothing.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.fx_passes import pad_mm

    with (
        mock.patch.object(AsyncCompile, "triton", lambda self, *args, **kwargs: Kernel()),
        mock.patch.object(AsyncCompile, "warm_pool", lambda: None),
        mock.patch.object(pad_mm, "_should_pad", lambda *args, **kwargs: False),
        constants_on_host(),
    ):
        yield


def figures(name: str) -> list[list[int]]:
    """By step, bytes: the most allocated and reserved, and what is allocated at its end."""
    from tests.null_driver.values import KnownValues

    found = []
    with nothing_compiled_or_timed():
        torch.manual_seed(0)
        # the compiler's frames are in cycles with the caller's; else the time at which Python collects them decides
        torch._dynamo.callback_handler.register_end_callback(lambda told: gc.collect())
        if " eager" in name and name.startswith("llama"):
            KnownValues().__enter__()
        torch.zeros(1, device="cuda")
        step = WORKS[name]()
        for _ in range(STEPS):
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
            found.append([*peaks, torch.cuda.memory_allocated()])
    return found


def environment() -> dict[str, str]:
    """The environment of one work: no cache is written and no process started."""
    return {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def record(gpu: str, file: Path, names: list[str]) -> None:
    """Record what a file lacks."""
    kept = json.loads(file.read_text()) if file.exists() else {"gpu": gpu, "versions": {}, "works": {}}
    kept["versions"] = {
        name: version(name).split("+")[0] for name in ("torch", "torchvision", "transformers", "triton")
    }
    for name in names or WORKS:
        if name in kept["works"]:
            continue
        command = [sys.executable, "-m", "tests.null_driver.compiled", "--one", name]
        given = {**os.environ, **null_environment(HARDWARE[gpu]), **environment()}
        done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
        if done.returncode:
            print(name, "FAILED", done.stderr.strip().splitlines()[-1][:300], flush=True)
            continue
        kept["works"][name] = json.loads(done.stdout.splitlines()[-1])
        print(name, kept["works"][name], flush=True)
        text = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in kept["works"].items())
        head = f'"gpu": {json.dumps(kept["gpu"])},\n "versions": {json.dumps(kept["versions"])}'
        file.write_text(f'{{{head},\n "works": {{\n{text}\n}}}}\n')


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print(json.dumps(figures(sys.argv[2])), flush=True)
        os._exit(0)  # nothing to take down: the device is none
    record(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])

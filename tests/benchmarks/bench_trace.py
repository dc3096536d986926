"""How fast a trace is: `python -m tests.benchmarks.bench_trace`. Ratios within this one run; absolute times are this machine's.

- One ResNet-50 training step (batch 32) against torch.distributed._tools.MemTracker under FakeTensorMode on the same step.
- Two AdamW steps of Llama-3.1-8B and 405B at 2,048 tokens.
- The dtype × batch grid of ResNet-50 and of Llama-3.1-8B, its parts, and in units of one trace of the same model. Target for
  Llama-3.1-8B: under 10 s on two cores.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
import torchvision
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from sizer.architecture import make_blueprint
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from sizer.tracing.device import Device
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace

A100 = (8, 0)


def seconds(run: Callable[[], object], times: int = 3) -> float:
    """The median wall-clock seconds of a call, after one that does not count."""
    run()
    measured = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        measured.append(time.perf_counter() - start)
    return statistics.median(measured)


def one_trace(query: str, batch: int, dtype: str) -> Callable[[], object]:
    """A call that traces two training steps of a query's model, the module built beforehand."""
    request = parse_query(query)
    blueprint = make_blueprint(request)
    module = build(blueprint)
    work = Work(mode="training", dtype=dtype)
    return lambda: trace(blueprint, module, work, batch=batch, device=Device("cuda", A100))


def mem_tracker_step() -> None:
    """Two ResNet-50 training steps at batch 32 under FakeTensorMode and MemTracker."""
    with FakeTensorMode():
        model = torchvision.models.resnet50(weights=None)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        images, targets = torch.zeros(32, 3, 224, 224), torch.zeros(32, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, images, targets)
        with tracker:
            for step in (1, 2):
                F.cross_entropy(model(images), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    tracker.reset_mod_stats()


def sizer_step() -> None:
    """The same two steps through Sizer, building the model included as above."""
    one_trace("arch=torchvision:resnet50", 32, "float32")()


def grid(query: str) -> dict[str, float]:
    """The wall-clock seconds of an estimate's parts, named by the first word of what it says it is at."""
    moments: list[tuple[str, float]] = []
    note = lambda text: moments.append((text.split()[0], time.perf_counter()))  # noqa: E731
    estimate(parse_query(query), progress=note)
    note("end")
    parts: Counter[str] = Counter()
    for (part, start), (_, end) in pairwise(moments):
        parts[part] += end - start
    return parts


def main() -> None:
    ours, theirs = seconds(sizer_step), seconds(mem_tracker_step)
    print(f"ResNet-50, two steps, batch 32: Sizer {ours:.2f} s, MemTracker {theirs:.2f} s, ratio {theirs / ours:.1f}")
    for preset in ("llama-3.1-8b", "llama-3.1-405b"):
        spent = seconds(one_trace(f"arch=hf:{preset}&seq=2048", 1, "bfloat16"), times=2)
        print(f"{preset}, two AdamW steps at 2,048 tokens: {spent:.2f} s, {spent / ours:.1f} of ResNet-50's trace")
    for query in ("arch=torchvision:resnet50", "arch=hf:llama-3.1-8b"):
        single = seconds(one_trace(query, 3, "float32"))
        parts = min((grid(query) for _ in range(3)), key=lambda parts: sum(parts.values()))
        whole, split = sum(parts.values()), ", ".join(f"{part} {spent:.2f}" for part, spent in parts.items())
        print(
            f"{query}: five dtypes x eight batch sizes {whole:.2f} s ({split}) = {whole / single:.1f} single traces"
            f" of {single:.2f} s"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""Which of timm's architectures can be counted and traced, in training and in inference, and why the others cannot.

    python -m tests.benchmarks.bench_timm_names [FROM [TO]] [--sample 100 [--seed 0]] [--names resnet50,vit_base_patch16_224]
                                                [--dtype float32] [--seconds 120] [--json FILE] [--write]

Every name is built on meta and traced for one training step and one forward pass (CUDA's rules, batch 2, at its own image
size), in a forked child with a wall clock. Prints what fails and why, then the shares, which `--write` writes
to `tests/measured/shares.csv`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from functools import partial
from pathlib import Path

import timm
import torch

from sizer.architecture.module_census import take_census
from sizer.architecture.timm_models import timm_blueprint
from sizer.tracing.device import Device
from sizer.tracing.meta.dtypes import OWN_CODE
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace
from tests.benchmarks.forked import in_child
from tests.benchmarks.shares import summarize, write_share

MODES = ("training", "inference")


def attempt(name: str, dtype: str) -> dict[str, str]:
    """By mode: "traced", or "counted: …" or "not built: …" with the reason."""
    try:
        blueprint = timm_blueprint(name, image_size=None, checkpointing=False)
        module = build(blueprint)
        take_census(module, name=name)
    except Exception as error:
        return dict.fromkeys(MODES, f"not built: {error}")

    def step(mode: str) -> str:
        work = Work(mode=mode, dtype=dtype, optimizer="none")
        try:
            trace(blueprint, module, work, batch=2, device=Device("cuda", (8, 0)), short=True)
        except Exception as error:
            return f"counted: {error}"
        return "traced"

    return {mode: step(mode) for mode in MODES}


def main() -> None:
    parser = argparse.ArgumentParser(description="Which of timm's architectures can be counted and traced.")
    parser.add_argument("bounds", nargs="*", type=int, metavar="FROM [TO]")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--names", type=lambda text: text.split(","), help="these alone")
    parser.add_argument("--json", type=Path, help="where the outcomes go, by name and mode")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.write and (asked.bounds or asked.names or asked.sample):
        parser.error("--write is for all names")
    names = asked.names or timm.list_models()[slice(*(*asked.bounds, None)[:2]) if asked.bounds else slice(None)]
    if asked.sample is not None:
        names = sorted(random.Random(asked.seed).sample(names, asked.sample))
    results: dict[str, dict[str, str]] = {}
    start = time.monotonic()
    for name in names:
        outcomes = in_child(partial(attempt, name, asked.dtype), seconds=asked.seconds)
        results[name] = outcomes or dict.fromkeys(MODES, f"counted: ended without an answer within {asked.seconds} s")
        for reason in dict.fromkeys(text for text in results[name].values() if text != "traced"):
            print(f"{name} ({', '.join(m for m in MODES if results[name][m] == reason)}): {reason}", flush=True)
        if asked.json is not None:
            asked.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(f"{len(names)} names, timm {timm.__version__}, {time.monotonic() - start:.0f} s")
    for mode in MODES:
        summary = summarize([outcomes[mode] for outcomes in results.values()], OWN_CODE)
        print(f"{mode}: {', '.join(f'{count} {name}' for name, count in summary.items())}")
        if asked.write:
            write_share("timm", timm.__version__, asked.dtype, mode, "", summary)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""Which of transformers' model types can be counted and traced.

    python -m tests.benchmarks.bench_transformers_types [FROM [TO]] [--inference] [--seconds 180]

Every type whose config builds from its defaults is built on meta and traced for one training step (float32, CUDA's rules, batch
2, or 1 where the model takes no more), or one forward pass, each in a forked child with a wall clock. Prints what fails and why,
then the shares. FROM and TO pick a slice of the sorted list.

Some defaults are no model: parts that do not fit together (Qwen2-VL's vision tower is narrower than its text), tokens or sizes
left out. `completed_configs.json` says for those what a published config says. The last lines give the share both ways: of the
defaults as they are, and with those completed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import time
from pathlib import Path

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from sizer.architecture.census import take_census
from sizer.architecture.huggingface import huggingface_blueprint
from sizer.tracing.device import Device
from sizer.tracing.recipes import Work
from sizer.tracing.trace import build, trace

SECONDS = 180  # for one type; LongCat's 28 layers of 768 experts, each run by itself, take half of them
COMPLETED = json.loads(Path(__file__).with_name("completed_configs.json").read_text(encoding="utf-8"))


def attempt(model_type: str, *, completed: bool = True, mode: str = "training") -> str:
    """How far a type comes: "no defaults", "not built: …", "counted: …" (not traced, with the reason) or "traced"."""
    completion = COMPLETED.get(model_type, {}) if completed else {}
    try:
        CONFIG_MAPPING[model_type](**copy.deepcopy(completion))
    except Exception as error:  # whatever a config class raises, it has no buildable defaults
        return f"no defaults: {type(error).__name__}"
    try:
        blueprint = huggingface_blueprint({"model_type": model_type, **completion}, name=model_type, mode=mode)
        module = build(blueprint)
        take_census(module, name=model_type)
    except Exception as error:
        return f"not built: {error}"
    work = Work(mode=mode, dtype="float32", optimizer="none")
    reason = ""
    for batch in (2, 1):
        try:
            trace(blueprint, module, work, batch=batch, device=Device("cuda", (8, 0)), short=True)
        except Exception as error:
            reason = reason or f"counted: {error}"
        else:
            return "traced"
    return reason


def in_child(model_type: str, *, completed: bool = True, mode: str = "training", seconds: int = SECONDS) -> str:
    """`attempt` in a forked process, killed after so many seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(seconds)
        os.write(writing, attempt(model_type, completed=completed, mode=mode).replace("\n", " ")[:300].encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    return text or f"counted: ended without an answer within {seconds} s"


def main() -> None:
    parser = argparse.ArgumentParser(description="Which of transformers' model types can be counted and traced.")
    parser.add_argument("bounds", nargs="*", type=int, metavar="FROM [TO]")
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--seconds", type=int, default=SECONDS)
    asked = parser.parse_args()
    options = {"mode": "inference" if asked.inference else "training", "seconds": asked.seconds}
    types = sorted(CONFIG_MAPPING_NAMES)[slice(*(*asked.bounds, None)[:2]) if asked.bounds else slice(None)]
    results: dict[str, str] = {}
    start = time.monotonic()
    for model_type in types:
        results[model_type] = in_child(model_type, **options)
        if results[model_type] != "traced":
            print(f"{model_type}: {results[model_type]}", flush=True)
    bare = {name: in_child(name, completed=False, **options) for name in types if name in COMPLETED}
    print(f"{len(types)} types, transformers {transformers.__version__}, {time.monotonic() - start:.0f} s")
    print(f"defaults as they are: {share(results | bare, options['mode'])}")
    print(f"{len(bare)} of them completed: {share(results, options['mode'])}")


def share(results: dict[str, str], mode: str = "training") -> str:
    """How many types are counted, and how many and which part of them trace."""
    buildable = [text for text in results.values() if not text.startswith(("no defaults", "not built"))]
    traced = buildable.count("traced")
    step = "a training step" if mode == "training" else "a forward pass"
    return f"{len(buildable)} are built and counted, {traced} trace {step}, {traced / max(1, len(buildable)):.1%}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    main()

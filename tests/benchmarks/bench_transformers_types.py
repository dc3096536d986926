"""Which of transformers' model types can be counted and traced: `python -m tests.benchmarks.bench_transformers_types [FROM [TO]]`.

Every type whose config builds from its defaults is built on meta and traced for one training step (batch 2, CUDA's rules,
float32), each in a forked child with a wall clock. Prints what fails and why, then the shares. FROM and TO pick a slice of the
sorted list.

Some defaults are no model: parts that do not fit together (Qwen2-VL's vision tower is narrower than its text), tokens or sizes
left out. `completed_configs.json` says for those what a published config says. The last lines give the share both ways: of the
defaults as they are, and with those completed.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
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

SECONDS = 90
COMPLETED = json.loads(Path(__file__).with_name("completed_configs.json").read_text(encoding="utf-8"))


def attempt(model_type: str, *, completed: bool = True) -> str:
    """How far a type comes: "no defaults", "not built: …", "counted: …" (not traced, with the reason) or "traced"."""
    completion = COMPLETED.get(model_type, {}) if completed else {}
    try:
        CONFIG_MAPPING[model_type](**copy.deepcopy(completion))
    except Exception as error:  # whatever a config class raises, it has no buildable defaults
        return f"no defaults: {type(error).__name__}"
    try:
        blueprint = huggingface_blueprint({"model_type": model_type, **completion}, name=model_type)
        module = build(blueprint)
        take_census(module, name=model_type)
    except Exception as error:
        return f"not built: {error}"
    try:
        work = Work(mode="training", dtype="float32", optimizer="none")
        trace(blueprint, module, work, batch=2, device=Device("cuda", (8, 0)), short=True)
    except Exception as error:
        return f"counted: {error}"
    return "traced"


def in_child(model_type: str, *, completed: bool = True) -> str:
    """`attempt` in a forked process, killed after SECONDS."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(SECONDS)
        os.write(writing, attempt(model_type, completed=completed).replace("\n", " ")[:300].encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    return text or f"counted: ended without an answer within {SECONDS} s"


def main() -> None:
    bounds = [int(argument) for argument in sys.argv[1:3]]
    types = sorted(CONFIG_MAPPING_NAMES)[slice(*bounds, None) if len(bounds) < 2 else slice(*bounds)]
    results: dict[str, str] = {}
    start = time.monotonic()
    for model_type in types:
        results[model_type] = in_child(model_type)
        if results[model_type] != "traced":
            print(f"{model_type}: {results[model_type]}", flush=True)
    bare = {name: in_child(name, completed=False) for name in types if name in COMPLETED}
    print(f"{len(types)} types, transformers {transformers.__version__}, {time.monotonic() - start:.0f} s")
    print(f"defaults as they are: {share(results | bare)}")
    print(f"{len(bare)} of them completed: {share(results)}")


def share(results: dict[str, str]) -> str:
    """How many types are counted, and how many and which part of them trace."""
    buildable = [text for text in results.values() if not text.startswith(("no defaults", "not built"))]
    traced = buildable.count("traced")
    return (
        f"{len(buildable)} are built and counted, {traced} trace a training step, {traced / max(1, len(buildable)):.1%}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    main()

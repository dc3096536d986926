"""Which of transformers' model types can be counted and traced, in which dtypes, and why the others cannot.

    python -m tests.benchmarks.bench_transformers_types [FROM [TO]] [--dtypes float32,bfloat16] [--inference] [--seconds 180]
                                                        [--sample 100 [--seed 0]] [--types bert,gpt2] [--json FILE] [--write]

Every type whose config builds from its defaults is built on meta and traced for one training step (CUDA's rules, batch 2, or 1
where the model takes no more), or one forward pass, each in a forked child with a wall clock. Prints what fails and why, then the
shares. FROM and TO pick a slice of the sorted list, --sample so many types of it at random. A dtype after the first is compared
with the first: which types trace there and not here, and whether that is the model's own doing.

Some defaults are no model: parts that do not fit together (Qwen2-VL's vision tower is narrower than its text), tokens or sizes
left out. `completed_configs.json` says for those what a published config says. The last lines give the share both ways: of the
defaults as they are, and with those completed. `--write` writes the shares to `tests/measured/shares.csv`.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from sizer.architecture.huggingface import huggingface_blueprint
from sizer.architecture.module_census import take_census
from sizer.tracing.device import Device
from sizer.tracing.meta.dtypes import OWN_CODE
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace
from tests.benchmarks.forked import in_child
from tests.benchmarks.shares import summarize, write_share

SECONDS = 180  # for one type; LongCat's 28 layers of 768 experts, each run by itself, take half of them
COMPLETED = json.loads(Path(__file__).with_name("completed_configs.json").read_text(encoding="utf-8"))

Outcomes = dict[str, str]  # of a type, by dtype


def attempt(model_type: str, dtypes: tuple[str, ...], *, completed: bool = True, mode: str = "training") -> Outcomes:
    """How far a type comes in each dtype: "no defaults", "not built: …", "counted: …" (not traced, with the reason) or "traced"."""
    completion = COMPLETED.get(model_type, {}) if completed else {}
    try:
        CONFIG_MAPPING[model_type](**copy.deepcopy(completion))
    except Exception as error:  # whatever a config class raises, it has no buildable defaults
        return dict.fromkeys(dtypes, f"no defaults: {type(error).__name__}")
    try:
        blueprint = huggingface_blueprint({"model_type": model_type, **completion}, name=model_type, mode=mode)
        module = build(blueprint)
        take_census(module, name=model_type)
    except Exception as error:
        return dict.fromkeys(dtypes, f"not built: {error}")

    def step(dtype: str) -> str:
        work = Work(mode=mode, dtype=dtype, optimizer="none")
        reason = ""
        for batch in (2, 1):
            try:
                trace(blueprint, module, work, batch=batch, device=Device("cuda", (8, 0)), short=True)
            except Exception as error:
                reason = reason or f"counted: {error}"
            else:
                return "traced"
        return reason

    return {dtype: step(dtype) for dtype in dtypes}


def outcomes_of(model_type: str, dtypes: tuple[str, ...], *, seconds: int = SECONDS, **options: object) -> Outcomes:
    """`attempt` in a forked process, killed after so many seconds for every dtype."""
    outcomes = in_child(partial(attempt, model_type, dtypes, **options), seconds=seconds * len(dtypes))
    return outcomes or dict.fromkeys(dtypes, f"counted: ended without an answer within {seconds} s for each dtype")


def main() -> None:
    parser = argparse.ArgumentParser(description="Which of transformers' model types can be counted and traced.")
    parser.add_argument("bounds", nargs="*", type=int, metavar="FROM [TO]")
    parser.add_argument("--dtypes", default="float32", type=lambda text: tuple(text.split(",")))
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--seconds", type=int, default=SECONDS)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--types", type=lambda text: text.split(","), help="these alone")
    parser.add_argument("--json", type=Path, help="where the outcomes go, by type and dtype")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.write and (asked.bounds or asked.types):
        parser.error("--write is for all types, or for a --sample")
    options = {"mode": "inference" if asked.inference else "training", "seconds": asked.seconds}
    types = (
        asked.types or sorted(CONFIG_MAPPING_NAMES)[slice(*(*asked.bounds, None)[:2]) if asked.bounds else slice(None)]
    )
    if asked.sample is not None:
        types = sorted(random.Random(asked.seed).sample(types, asked.sample))
    results: dict[str, Outcomes] = {}
    start = time.monotonic()
    for model_type in types:
        began = time.monotonic()
        results[model_type] = outcomes_of(model_type, asked.dtypes, **options)
        for dtype, text in results[model_type].items():
            if text != "traced":
                print(f"{model_type} {dtype} ({time.monotonic() - began:.0f} s): {text}", flush=True)
        if asked.json is not None:
            asked.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    bare = {name: outcomes_of(name, asked.dtypes, completed=False, **options) for name in types if name in COMPLETED}
    print(f"{len(types)} types, transformers {transformers.__version__}, {time.monotonic() - start:.0f} s")
    for dtype in asked.dtypes:
        for configs, found in (("defaults", results | bare), ("completed", results)):
            summary = summarize([outcomes[dtype] for outcomes in found.values()], OWN_CODE)
            print(f"{dtype}, {configs}: {', '.join(f'{count} {name}' for name, count in summary.items())}")
            if asked.write:
                write_share("transformers", transformers.__version__, dtype, options["mode"], configs, summary)
    for dtype in asked.dtypes[1:]:
        print(f"{dtype}, beside {asked.dtypes[0]}: {comparison(results, asked.dtypes[0], dtype)}")


def comparison(results: dict[str, Outcomes], first: str, dtype: str) -> str:
    """How many types trace in the first dtype and not in this one."""
    lost = [name for name, outcomes in results.items() if outcomes[first] == "traced" != outcomes[dtype]]
    ours = [name for name in lost if OWN_CODE not in results[name][dtype]]
    return (
        f"{len(lost)} trace there and not here, of which {len(ours)} not by their own code: {', '.join(ours) or 'none'}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    main()

"""Mutated configs through whole jobs: `python -m tests.benchmarks.bench_configs [how many] [seed]`.

Tiny configs of every family, each with one to three of its values left out or replaced by what a stranger might write: other
types, other signs, huge numbers, broken names, another config's value. Each is a job of its own, confined as those of the app are.
How they end is counted: an answer, a refusal that says what is wrong, and what should not be: a crash, an error without a reason,
or a limit of time or memory. The last are printed with the config that did it.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

from sizer.base.config_json import encode_config
from sizer.base.errors import SizerError
from sizer.service.client import JobClient
from sizer.service.fair_queue import Visitor
from sizer.service.settings import Settings
from tests.architecture.rare_configs import RARE
from tests.architecture.tiny_configs import TINY

HOSTILE = (
    -1, 0, 1, 3, 7, 1024, 10**9, 2**63, 1e308, -0.5, True, False, None, "", "x", "NaN", "../../etc/passwd", [], [0], [[1]], {},
    {"__float__": "NaN"}, {"a": 1}, "bfloat16", [None], ["full_attention"],
)  # fmt: skip
OUR_FAULT = re.compile(r"crashed|without an answer|unexpected|Traceback|report this")
LIMITS = re.compile(r"was stopped after|CPU time|ran out of memory|more than [\d,]+ bytes|it held")


def mutated(generator: random.Random) -> dict:
    """A config with one to three of its values replaced or left out."""
    configs = [*TINY.items(), *((name, {"model_type": name, **config}) for name, config in RARE.items())]
    config = deepcopy(generator.choice(configs)[1])
    for _ in range(generator.randint(1, 3)):
        paths = list(paths_of(config))
        *parents, key = generator.choice(paths)
        parent = config
        for step in parents:
            parent = parent[step]
        if generator.random() < 0.15:
            del parent[key]
        else:
            other = generator.choice(list(generator.choice(configs)[1].values()))
            parent[key] = deepcopy(generator.choice((*HOSTILE, other)))
        if not config:
            return {}
    return config


def paths_of(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The ways to every value in a config."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from paths_of(inner, (*path, key))


def outcome(client: JobClient, number: int, config: dict) -> tuple[str, str]:
    """How a job with a config ends: what kind of end, and its words."""
    visitor = Visitor(address=f"10.0.{number % 250}.1", session=str(number))
    try:
        query = f"arch=config:{encode_config(json.dumps(config))}&dtype=float32&batch=1,2"
        report = client.on_behalf_of(visitor).submit(query).result()
    except SizerError as error:
        words = " ".join(str(error).split())
        kind = "our fault" if OUR_FAULT.search(words) else "a limit" if LIMITS.search(words) else "refused"
        return (kind if len(words) > 20 else "our fault"), f"{type(error).__name__}: {words}"
    if report.failures:
        return "counts, with the reason why no step can be traced", next(iter(report.failures.values()))
    return "an answer", ""


def main(count: int, seed: int) -> None:
    """Print how `count` mutated configs end."""
    client = JobClient(Settings(tapes="", max_jobs=2, wall_seconds=60.0))
    client.submit_models().result()
    generator = random.Random(seed)
    configs = [mutated(generator) for _ in range(count)]
    found: Counter[str] = Counter()
    with ThreadPoolExecutor(max_workers=4) as threads:
        for config, (kind, words) in zip(
            configs, threads.map(lambda pair: outcome(client, *pair), enumerate(configs)), strict=True
        ):
            found[kind] += 1
            if kind in ("our fault", "a limit"):
                print(f"{kind}: {words[:300]}\n    {json.dumps(config)[:400]}", flush=True)
    client.close()
    for kind, number in found.most_common():
        print(f"{number:6,} {kind}")


if __name__ == "__main__":
    main(*(int(given) for given in (*sys.argv[1:3], *("1000", "0")[len(sys.argv[1:3]) :])))

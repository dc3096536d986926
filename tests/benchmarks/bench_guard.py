"""How many model types the guard leaves as they were: `python -m tests.benchmarks.bench_guard [--all]`.

For every model type of the installed transformers whose config class builds from defaults: default config → JSON → guard
→ config class, and the same without the guard. Config equality only; no model is built. `--all` lists every difference.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator

from sizer.architecture.guard import clean_config
from sizer.base.errors import ConfigError

IGNORED = ("transformers_version", "dtype")


def compare(cls: type) -> tuple[str, str]:
    """The outcome for one config class ("equal", ...), and what differs."""
    try:
        default = cls()
        written = json.loads(default.to_json_string(use_diff=False))
    except Exception as error:
        return "has no defaults", f"{type(error).__name__}"
    try:
        plain = cls(**cls._decode_special_floats(written)).to_dict()
    except Exception as error:
        return "does not read what it wrote", f"{type(error).__name__}: {error}".splitlines()[0][:80]
    try:
        fields = dict(clean_config(written).config)
    except ConfigError as error:
        return "refused", str(error)
    fields.pop("model_type")
    cleaned = cls(**fields).to_dict()
    keys = list(differences(plain, cleaned, ""))
    return ("differs", "; ".join(keys)) if keys else ("equal", "")


def differences(one: object, other: object, path: str) -> Iterator[str]:
    """The paths at which two nested dicts differ, with both values; dtype and version are the caller's, not the config's."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted((one.keys() | other.keys()) - set(IGNORED), key=str):
            yield from differences(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
    elif repr(one) != repr(other):
        yield f"{path} {one!r:.60} != {other!r:.60}"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from transformers import CONFIG_MAPPING

    start, outcomes = time.perf_counter(), Counter()
    for model_type in CONFIG_MAPPING:
        outcome, detail = compare(CONFIG_MAPPING[model_type])
        outcomes[outcome] += 1
        if outcome in ("refused", "differs") or (outcome != "equal" and "--all" in sys.argv):
            print(f"{model_type:32} {outcome}: {detail}")
    compared = outcomes["equal"] + outcomes["differs"] + outcomes["refused"]
    print(dict(outcomes), f"{time.perf_counter() - start:.1f} s")
    print(f"{outcomes['equal']} of {compared} types that build from defaults keep an equal config")


if __name__ == "__main__":
    main()

"""Whole scripts of trainers over the null driver, beside the query with the same settings.

`.ci/full` installs TRL and records the figures in trainers.json. `.ci/run` repeats transformers' own trainer.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from sizer.base.config_json import encode_config
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from tests.null_driver.test_libraries import RECORD
from tests.running.conftest import DryRunner
from tests.running.scripts.trainers import BATCH, LENGTH, NEW, SCRIPTS, SIZES

GPU = "rtx-4090"
RECORDED = Path(__file__).parent / "trainers.json"
CONFIG = encode_config(json.dumps({"model_type": "llama", **SIZES}))
MODEL = f"arch=config:{CONFIG}&batch={BATCH}&seq={LENGTH}&gpu={GPU}"
_GROUPS = f"objective=grpo&group=2&new={NEW}"
KEYS = {
    "trainer": "dtype=bfloat16",
    "trainer-lora-autocast": "dtype=bfloat16&train=adapter&autocast=1",
    "trainer-adafactor": "dtype=bfloat16&optimizer=adafactor-transformers",
    "liger-trainer": "dtype=bfloat16&loss=liger&liger=1",
    "sft": "dtype=bfloat16&loss=trl",
    "sft-amp": "dtype=amp-bfloat16&loss=trl",
    "sft-autocast": "dtype=bfloat16&loss=trl&autocast=1",
    "sft-checkpointing": "dtype=bfloat16&loss=trl&checkpointing=1",
    "sft-offload": "dtype=bfloat16&loss=trl&activations=offload",
    "sft-liger": "dtype=bfloat16&loss=trl&liger=1",
    "sft-lora": "dtype=bfloat16&loss=trl&train=adapter",
    "sft-lora-autocast": "dtype=bfloat16&loss=trl&train=adapter&autocast=1",
    "sft-qlora": "dtype=bfloat16&loss=trl&train=adapter&weights=nf4&autocast=1",
    "dpo": "dtype=bfloat16&objective=dpo",
    "dpo-amp": "dtype=amp-bfloat16&objective=dpo",
    "dpo-checkpointing": "dtype=bfloat16&objective=dpo&checkpointing=1",
    "dpo-lora": "dtype=bfloat16&objective=dpo&train=adapter",
    "dpo-lora-autocast": "dtype=bfloat16&objective=dpo&train=adapter&autocast=1",
    "dpo-qlora-checkpointing": "dtype=bfloat16&objective=dpo&train=adapter&weights=nf4&autocast=1&checkpointing=1",
    "dpo-liger": "dtype=bfloat16&objective=dpo&liger=1",
    "dpo-precomputed": "dtype=bfloat16&objective=dpo&reference=precomputed",
    "orpo": "dtype=bfloat16&objective=orpo",
    "orpo-autocast": "dtype=bfloat16&objective=orpo&autocast=1",
    "orpo-qlora": "dtype=bfloat16&objective=orpo&train=adapter&weights=nf4&autocast=1",
    "grpo": f"dtype=bfloat16&{_GROUPS}&reference=none",
    "grpo-accumulate": f"dtype=bfloat16&{_GROUPS}&accumulate=3",
    "grpo-amp": f"dtype=amp-bfloat16&{_GROUPS}&reference=none",
    "grpo-reference": f"dtype=bfloat16&{_GROUPS}",
    "grpo-liger-reference": f"dtype=bfloat16&{_GROUPS}&liger=1",
    "grpo-qlora": f"dtype=bfloat16&{_GROUPS}&reference=none&train=adapter&weights=nf4&autocast=1",
    "grpo-lora-checkpointing": f"dtype=bfloat16&{_GROUPS}&train=adapter&checkpointing=1",
}
WITHIN = 0.01
FIGURES = ("step1", "step2", "reserved")


def _of_query(keys: str) -> dict[str, int]:
    fused = "" if "optimizer=" in keys else "&optimizer_impl=fused"
    (row,) = estimate(parse_query(f"{MODEL}{fused}&{keys}")).estimates
    peaks = {use.phase: use.peak_allocated_bytes for use in row.phases}
    first = max(peak for phase, peak in peaks.items() if phase not in ("load", "step2"))
    return {"step1": first, "step2": peaks["step2"], "reserved": row.peak_reserved_bytes}


def _of_script(figures: dict) -> dict[str, int]:
    peaks = {use["phase"]: use["peak_allocated_bytes"] for use in figures["phases"]}
    return {"step1": peaks["step1"], "step2": peaks["step2"], "reserved": figures["peak_reserved_bytes"]}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning")  # TRL calls these
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [name if name.startswith("trainer") else pytest.param(name, marks=pytest.mark.full) for name in SCRIPTS]
)
def test_a_script_takes_what_the_query_says(dry_run: DryRunner, name: str):
    done = dry_run("--gpu", GPU, "--", "trainers.py", name, HF_HUB_OFFLINE="1")
    assert (done.status, done.json["steps"]) == (0, 3), done.stderr[-2000:]
    script, query = _of_script(done.figures), _of_query(KEYS[name])
    for figure in FIGURES:
        assert query[figure] == pytest.approx(script[figure], rel=WITHIN), figure
    if os.environ.get(RECORD):
        rows = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
        of_name = (("liger", "liger-kernel"), *((one, "trl") for one in ("sft", "dpo", "orpo", "grpo")))
        packages = ("torch", "transformers", *(package for one, package in of_name if one in name))
        versions = {one: version(one).split("+")[0] for one in packages}
        rows[name] = {"keys": KEYS[name], "script": script, "query": query, "versions": versions}
        RECORDED.write_text(json.dumps({one: rows[one] for one in SCRIPTS if one in rows}, indent=2) + "\n", encoding="utf-8")


def test_every_script_is_recorded_and_within_a_hundredth():
    rows = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert set(rows) == set(SCRIPTS) == set(KEYS)
    for name, row in rows.items():
        assert row["keys"] == KEYS[name]
        assert row["query"] == pytest.approx(row["script"], rel=WITHIN)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["sft", "sft-offload", "sft-qlora", "dpo-lora", "grpo"])
def test_route_meta_traces_a_script_as_the_driver_runs_it(dry_run: DryRunner, name: str):
    done = dry_run("--gpu", GPU, "--route", "both", "--", "trainers.py", name, HF_HUB_OFFLINE="1")
    assert "driver and meta agree" in done.json["route_reason"], done.json["route_reason"]


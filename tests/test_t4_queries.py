"""LoRA and QLoRA on a Tesla T4 (tests/measured/published/README.md, `t4_adapters`), asked as a query without any code.

The measured loop keeps the model's outputs during the backward pass. `peak_allocated_bytes` with outputs=kept is compared with
max_memory_allocated, the process with the range of the question that leaves the loop open.
"""

import csv
import json
from pathlib import Path

import pytest

from sizer.base.config_json import canonical_config, encode_config
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from sizer.report.estimate import Estimate
from tests.benchmarks.published.adapters import MODELS

ROWS = Path(__file__).parent / "measured/published/runs/t4_adapters.csv"
MIB = 2**20
LIMITS_PERCENT = {"lora_training": 0.1, "qlora_training": 0.8}
ALWAYS = ("model=smollm2-135m batch=2 seq=512", "model=tinyllama-1.1b batch=2 seq=512")  # the others are exhaustive
OUTSIDE = 2  # processes of the 29 that may be outside their range


def configurations() -> dict[tuple[str, str], list[dict[str, str]]]:
    """The distinct runs with eager attention, each with its measurements."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    with ROWS.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if "attention=eager" in row["arguments"] and row["repeats"] != "yes":
                found.setdefault((row["case"], row["arguments"]), []).append(row)
    return found


def query(case: str, arguments: str) -> str:
    asked = dict(item.split("=") for item in arguments.split())
    family, hidden, layers, heads, key_heads, intermediate, vocabulary, head_dim, tied = MODELS[asked["model"]]
    config = {
        "model_type": family.lower(),
        "architectures": [f"{family}ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
    }
    weights = "&weights=nf4" if case == "qlora_training" else ""
    return (
        f"arch=config:{encode_config(canonical_config(json.dumps(config)))}&batch={asked['batch']}&seq={asked['seq']}"
        f"&dtype=float16&attention=eager&train=adapter&r={asked['rank']}&targets=q_proj,k_proj,v_proj,o_proj"
        f"&checkpointing=1&gpu=t4&torch=2.10{weights}"
    )


def cell(text: str) -> Estimate:
    return estimate(parse_query(text)).estimates[0]


RUNS = configurations()
SOME = [pytest.param(*run, marks=[] if run[1].startswith(ALWAYS) else pytest.mark.exhaustive) for run in RUNS]


def test_there_are_29_of_them():
    cases = [case for case, _ in RUNS]
    assert (cases.count("lora_training"), cases.count("qlora_training")) == (10, 19)


@pytest.mark.parametrize(("case", "arguments"), SOME)
def test_what_a_t4_allocated(case, arguments):
    estimated = cell(f"{query(case, arguments)}&outputs=kept").peak_allocated_bytes
    measured = [float(row["allocated"]) * MIB for row in RUNS[case, arguments]]
    errors = [100 * abs(estimated - size) / size for size in measured]  # runs of one configuration differ by up to 16 MiB
    assert min(errors) <= LIMITS_PERCENT[case]


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([*RUNS][::5], marks=pytest.mark.exhaustive, id="some"),
        pytest.param([*RUNS], marks=pytest.mark.full, id="all"),
    ],
)
def test_what_a_t4s_processes_held_is_in_the_range(runs):
    outside = []
    for case, arguments in runs:
        rows = RUNS[case, arguments]
        row = cell(query(case, arguments))
        low, high = row.process_low_bytes, row.process_high_bytes
        if not any(low <= float(run["process"]) * MIB <= high for run in rows):
            outside.append(arguments)
    assert len(outside) <= OUTSIDE * len(runs) / len(RUNS) + 0.5


def test_another_loop_is_listed_with_its_bytes():
    asked = "arch=hf:gpt2&batch=2&seq=256&dtype=bfloat16"
    report, kept, alone = (estimate(parse_query(f"{asked}{outputs}")) for outputs in ("", "&outputs=kept", "&outputs=freed"))
    freed, (only_kept,), (only_freed,) = report.estimates[0], kept.estimates, alone.estimates
    (told,) = (row for row in report.loop if row.decision == "outputs are kept during the backward pass")
    assert told.bytes == only_kept.peak_reserved_bytes - freed.peak_reserved_bytes > 0 and told.in_range
    (back,) = (row for row in kept.loop if row.decision == "outputs are freed before the backward pass")
    assert back.bytes == -told.bytes
    assert only_freed.peak_reserved_bytes == freed.peak_reserved_bytes
    assert only_freed.process_high_bytes < freed.process_high_bytes

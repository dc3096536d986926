"""vLLM 0.33's own model classes and cache planner on meta tensors, as recorded: the plan has the same weights, blocks and tokens.

Recorded with vLLM 0.33.0's Python on a stand-in for an H100: `initialize_model`, `get_kv_cache_configs` and
`get_kv_cache_capacity`, a step of 2,048 tokens. vLLM is not needed to run these tests.
"""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from sizer.base.units import GIB
from sizer.catalogue.gpu_keys import find_gpu
from sizer.query.text import parse_query
from sizer.serving.cache import plan_cache
from sizer.serving.flags import resolve_flags
from sizer.serving.layout import weights_bytes
from tests.serving.log_table import ROWS
from tests.serving.logs import architecture_of

RECORDED = ROWS.with_name("vllm_planner.csv")
# gpt2: a quarter of a GiB, of which the allocator's rest of a segment is 2 %. Granite: 16 MiB are a table of rotations, which vLLM
# leaves out because the config says "nope".
TOLERANCES = {"gpt2": 0.03, "granite-4.0-h-micro": 0.003}


def recorded() -> list[dict[str, str]]:
    with RECORDED.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", recorded(), ids=lambda row: row["preset"])
def test_the_plan_is_vllms_own(row: dict[str, str]):
    architecture, gpu = architecture_of(row["preset"]), find_gpu("h100-80gb")
    query = f"arch=hf:{row['preset']}&mode=serve&gpu=h100-80gb&tp={row['tp']}&max_model_len={row['max_model_len']}"
    flags = resolve_flags(parse_query(query), architecture, gpu, 132)
    flags = replace(flags, max_num_batched_tokens=2048)
    plan = plan_cache(architecture, flags, int(row["cache_gib"]) * GIB)
    assert (plan.blocks, plan.kv_tokens) == (int(row["blocks"]), int(row["kv_tokens"]))
    assert round(plan.requests_at_once, 2) == float(row["requests_at_once"])
    weights = weights_bytes(architecture, flags) / GIB
    assert weights == pytest.approx(float(row["weights_gib"]), rel=TOLERANCES.get(row["preset"], 0.0015))


def test_enough_models_are_recorded():
    assert len(recorded()) >= 16

"""Stages of a pipeline: bytes against PyTorch's own CUDA code and its fake process group, to the byte."""

from __future__ import annotations

import json

import pytest

from tests.null_driver.test_ranks import ANSWERED, GPU, LOOP, arch, peaks
from tests.tracing.models import LLAMA

# Of 3 stages the first and the last have one layer each, of 6 no layer
SMALL = f"{arch(LLAMA, hidden_size=512, intermediate_size=1536, num_hidden_layers=4)}&seq=128"
HALF, FLOAT, MIXED = (f"{SMALL}&dtype={dtype}" for dtype in ("bfloat16", "float32", "amp-bfloat16"))
QUERIES = {
    **{
        f"{schedule}, rank {rank}": f"{HALF}&batch=4&pp=3&schedule={schedule}&rank={rank}"
        for schedule in ("1f1b", "gpipe", "interleaved")
        for rank in range(3)
    },
    "two samples at a time": f"{FLOAT}&batch=8&pp=2&microbatch=2&rank=0",
    "checkpointing": f"{HALF}&batch=2&pp=2&checkpointing=1&rank=0",
    "autocast": f"{MIXED}&batch=2&pp=2&rank=1",
    "fsdp, last, by policy": f"{MIXED}&batch=2&parallel=fsdp&ranks=3&pp=2&rank=5",
    "fsdp, interleaved": f"{HALF}&batch=2&parallel=fsdp&ranks=4&pp=2&schedule=interleaved&rank=0",
    "ddp": f"{FLOAT}&batch=2&parallel=ddp&ranks=2&pp=2&rank=3",
    "tensor parallel": f"{HALF}&batch=2&tp=2&pp=2&rank=0&{LOOP}",
    "tensor parallel within fsdp": f"{HALF}&batch=2&parallel=fsdp&ranks=2&tp=2&pp=2&rank=0",
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # as in tests/null_driver/test_ranks.py
def test_stages_hold_what_pytorchs_own_do(run_on_null) -> None:
    queries = {name: f"{query}&gpu={GPU}" for name, query in QUERIES.items() if ANSWERED or name != "ddp"}
    truth = run_on_null("tests.null_driver.rank_queries", json.dumps(list(queries.values())), gpu=GPU)
    found = {
        name: (peaks(query)[:2], measured[:2]) for (name, query), measured in zip(queries.items(), truth, strict=True)
    }
    autocast = found.pop("autocast")  # which lets go of its copies in the order of their addresses
    assert autocast[0][0] == autocast[1][0]
    assert {name: both for name, both in found.items() if both[0] != both[1]} == {}

"""Sequence and loss parallel: what a rank holds and tells of what lies between the matrices, and of which models."""

from __future__ import annotations

import json

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import sizer
from sizer.base.config_json import encode_config
from sizer.base.errors import RequestError
from sizer.decision.cells import Cells
from sizer.distributed import sharding
from sizer.distributed.tensor_parallel import styles
from sizer.query.text import parse_query
from sizer.report.estimate import Estimate
from tests.tracing.models import BERT, LLAMA

# 1,000 words, 256 wide, an MLP of 512; heads of 32
CONFIG = LLAMA | {"num_key_value_heads": 4, "num_hidden_layers": 2}
BATCH, TOKENS, WIDTH, WORDS, LAYERS, ITEM = 2, 64, 256, 1000, 2, 4
GATHERED = BATCH * TOKENS * WIDTH * ITEM  # bytes of all tokens between two matrices


def query(config: dict = CONFIG, seq: int = TOKENS) -> str:
    text = f"arch=config:{encode_config(json.dumps(config))}&gpu=h100-80gb"
    return f"{text}&seq={seq}&batch={BATCH}&dtype=float32"


SPLIT = f"{query()}&optimizer_impl=loop&parallel=tp&tp=4"


@pytest.fixture(scope="module")
def estimates() -> dict[str, Estimate]:
    """By what is split beside the matrices, which are among 4 ranks."""
    cells = Cells(parse_query(SPLIT))
    return {keys: cells.estimate(parse_query(f"{SPLIT}{keys}")) for keys in ("", "&sp=1", "&sp=1&lp=1")}


def test_activations_lie_over_the_ranks(estimates: dict[str, Estimate]) -> None:
    whole, by_tokens, by_words = (one.activations_bytes for one in estimates.values())
    # of a layer at least what two norms were given, and their scaled results, are a quarter now
    assert whole - by_tokens >= LAYERS * 4 * GATHERED * 3 // 4
    # logits and their logarithms
    assert by_tokens - by_words >= BATCH * TOKENS * WORDS * ITEM * 3 // 4


def told(estimate: Estimate) -> dict[str, tuple[int, int]]:
    return {row.kind: (row.calls, row.bytes) for row in estimate.communication}


def test_tokens_are_gathered_for_each_pair_of_matrices(estimates: dict[str, Estimate]) -> None:
    # attention and MLP each gather what they take and scatter what they give; the embedding scatters, the head gathers; and
    # the other way round in the backward pass
    calls = 2 * 2 * LAYERS + 2
    found = told(estimates["&sp=1&lp=1"])
    assert found["all-gather"] == found["reduce-scatter"] == (calls, calls * GATHERED)
    assert told(estimates["&sp=1"])["all-gather"] == (calls + 1, calls * GATHERED + BATCH * TOKENS * WORDS * ITEM)
    assert "reduce-scatter" not in told(estimates[""])


def test_embedding_and_norms_are_parameters_of_the_same_kind(estimates: dict[str, Estimate]) -> None:
    layer = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512
    assert estimates["&sp=1"].weights_bytes == ITEM * ((LAYERS * layer + 2 * WORDS * WIDTH) // 4 + 5 * WIDTH)


def test_pytorchs_styles_hold_what_transformers_own_do(
    estimates: dict[str, Estimate], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_pytorch(module: nn.Module, mesh: DeviceMesh, **others: object) -> None:
        plan = styles(module, sequence=False, loss=False)
        parallelize_module(module, mesh, {name: style.make() for name, style in plan.items()}, src_data_rank=None)

    monkeypatch.setattr(sharding, "split_matrices", by_pytorch)
    assert Cells(parse_query(SPLIT)).estimate(parse_query(SPLIT)) == estimates[""]


@pytest.mark.exhaustive
def test_a_report_says_what_is_split() -> None:
    report = sizer.estimate(f"{query()}&mode=inference&parallel=tp&tp=2&sp=1")
    assert "groups of 2 share a batch by tensor and sequence parallel" in report.cautions[0]


MIXTRAL = CONFIG | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
PHI3 = CONFIG | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
MISTRAL = CONFIG | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 48}


@pytest.mark.parametrize(
    ("config", "seq", "keys", "message"),
    [
        (CONFIG, 30, "sp=1", r"^sp: given 1 for 30 tokens on 4 ranks, allowed a length .* by 4; ask for seq=32"),
        (CONFIG, 64, "sp=1&attention=eager", r"^sp: given 1 with eager attention, allowed sdpa, .*"),
        (MISTRAL, 64, "sp=1", r"^sp: given 1 for mistral, with attention windows of 48 tokens, .*; ask for seq=44"),
        (PHI3, 64, "sp=1", r"^sp: given 1 for Phi3ForCausalLM, allowed models of Llama's shape"),
        (MIXTRAL, 64, "lp=1", r"^lp: given 1 for MixtralForCausalLM, allowed models of Llama's shape.*; leave lp out"),
        (
            CONFIG | {"architectures": ["LlamaForSequenceClassification"]},
            64,
            "sp=1",
            r"^sp: given 1 for LlamaForSequenceClassification, allowed models of Llama's shape",
        ),
        (BERT, 64, "sp=1", r"^tp: given 4 for BertForMaskedLM"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(config: dict, seq: int, keys: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        sizer.estimate(f"{query(config, seq)}&parallel=fsdp&tp=4&{keys}")

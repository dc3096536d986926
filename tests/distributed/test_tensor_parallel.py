"""Tensor parallel by transformers' own plans: what a rank has of a model, and which degrees there are."""

from __future__ import annotations

import json

import pytest
from transformers import PreTrainedModel

import sizer
from sizer.base.config_json import encode_config
from sizer.base.errors import RequestError
from tests.tracing.models import BERT, GPT2, LLAMA

# 1,000 words, 256 wide, an MLP of 512; heads of 32, of which 8 ask and 4 are asked
CONFIG = LLAMA | {"num_key_value_heads": 4, "num_hidden_layers": 2}


# an embedding that is not tied is split since transformers' plans come expanded
EMBEDDED = 1000 * 256 // (4 if hasattr(PreTrainedModel, "_expand_parallel_plan") else 1)


def query(config: dict, **others: object) -> str:
    return f"arch=config:{encode_config(json.dumps(config | others))}&seq=16&batch=1&dtype=float32&gpu=h100-80gb"


def weights(keys: str, **others: object) -> int:
    """The bytes of the weights that a rank has."""
    (row,) = sizer.estimate(f"{query(CONFIG, **others)}&parallel={keys}").estimates
    return row.weights_bytes


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("keys", "shards"),
    [("tp&tp=4&optimizer_impl=loop", 1), pytest.param("fsdp&ranks=2&tp=4", 2, marks=pytest.mark.exhaustive)],
)
def test_each_rank_has_its_part_of_the_matrices(keys: str, shards: int) -> None:
    attention = 2 * 256 * 256 + 2 * 128 * 256  # queries and output, keys and values
    layer, norms, words = attention + 3 * 256 * 512, 5 * 256, 1000 * 256  # norms are whole on every rank
    whole = (2 * layer + words) // 4 + EMBEDDED + norms
    assert weights(keys) == 4 * whole // shards


def test_each_rank_generates_with_its_heads_part_of_the_cache() -> None:
    report = sizer.estimate(f"{query(CONFIG)}&mode=generate&new=12&parallel=tp&tp=4")
    # keys and values of two layers: one head of 32 for each rank, in 4 bytes; of the 28 tokens the last is in no cache
    assert report.kv_caches[0].token_bytes == 2 * 2 * 32 * 4
    assert report.estimates[0].at_peak["kv cache"] in {2 * 2 * 32 * 4 * tokens for tokens in range(16, 28)}
    assert report.estimates[0].communication == ()  # told of steps


def test_tied_parameters_stay_tied() -> None:
    whole, tied = (weights("tp&tp=4&optimizer_impl=loop", tie_word_embeddings=tie) for tie in (False, True))
    assert whole - tied == 4 * EMBEDDED


def test_what_it_tells_grows_with_the_batch() -> None:
    report = sizer.estimate(f"{query(CONFIG).replace('batch=1', 'batch=2,4')}&parallel=tp&tp=2&optimizer_impl=loop")
    first, second = ({row.kind: row.bytes for row in estimate.communication} for estimate in report.estimates)
    assert first["all-gather"] * 2 == second["all-gather"] == 4 * 4 * 16 * 1000  # the logits of 4 * 16 tokens
    assert first["all-reduce"] * 2 == second["all-reduce"]
    assert "have 2, 4 samples" in report.cautions[0] and "2 ranks of Tensor parallel" in report.cautions[0]


@pytest.mark.parametrize(
    ("config", "degree", "message"),
    [
        (CONFIG, 8, r"^tp: given 8 for LlamaForCausalLM, allowed divisors of 4, .*; ask for tp=4"),
        (CONFIG, 3, r"^tp: given 3 for LlamaForCausalLM, allowed divisors of 4, .*; ask for tp=2"),
        (
            CONFIG | {"num_key_value_heads": 1},
            2,
            r"^tp: given 2 for LlamaForCausalLM, .* divisors of 1, .*leave tp out",
        ),
        (
            BERT,
            2,
            r"^tp: given 2 for BertForMaskedLM, allowed 1: transformers has no tensor parallel plan for its layers",
        ),
        (GPT2, 2, r"^tp: given 2 for GPT2LMHeadModel, allowed 1: transformers has no tensor parallel plan"),
    ],
)
def test_degrees_that_cannot_be_are_refused_with_the_nearest_that_can(config: dict, degree: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        sizer.estimate(f"{query(config)}&parallel=fsdp&tp={degree}")

"""Context parallel: what a rank holds and tells where each sequence lies over several, and of which works."""

from __future__ import annotations

import json

import pytest
from torch.nn import functional

import sizer
from sizer.base.config_json import encode_config
from sizer.base.errors import RequestError, TraceError
from sizer.decision.cells import Cells
from sizer.query.text import parse_query
from sizer.report.estimate import Estimate
from tests.tracing.models import BERT, LLAMA

# 1,000 words, 256 wide; heads of 32, of which 8 ask and 8 are asked
CONFIG = LLAMA | {"num_key_value_heads": 8, "num_hidden_layers": 2}
BATCH, TOKENS, WORDS, LAYERS, ITEM, DEGREE = 2, 256, 1000, 2, 4, 4
ASKED = 2 * BATCH * TOKENS * 8 * 32 * ITEM  # bytes of the keys and values of all tokens in a layer


def query(config: dict = CONFIG, seq: int = TOKENS) -> str:
    text = f"arch=config:{encode_config(json.dumps(config))}&gpu=h100-80gb"
    return f"{text}&seq={seq}&batch={BATCH}&dtype=float32"


@pytest.fixture(scope="module")
def cells() -> Cells:
    return Cells(parse_query(query()))


def estimate(cells: Cells, keys: str = "", seq: int = TOKENS) -> Estimate:
    """Of each sequence over four ranks, which are all there are."""
    return cells.estimate(parse_query(f"{query(seq=seq)}&parallel=ddp&ranks=1&cp={DEGREE}{keys}"))


@pytest.fixture(scope="module")
def shared(cells: Cells) -> Estimate:
    return estimate(cells)


def test_a_rank_has_its_part_of_the_logits(cells: Cells, shared: Estimate) -> None:
    alone = cells.estimate(parse_query(query()))
    assert shared.weights_bytes == alone.weights_bytes
    # logits and their logarithms, at least
    assert alone.activations_bytes - shared.activations_bytes >= 2 * BATCH * TOKENS * WORDS * ITEM * 3 // 4


def test_keys_and_values_are_gathered_and_their_gradients_go_round(shared: Estimate) -> None:
    told = {row.kind: (row.calls, row.bytes) for row in shared.communication}
    assert told["all-gather"] == (2 * LAYERS, 2 * LAYERS * ASKED)  # forward, and again backward
    # each rank adds to what the one before has sent it, in float32, and sends it on, until all is where it belongs
    assert told["all-to-all"] == (DEGREE * LAYERS, DEGREE * LAYERS * ASKED // DEGREE)
    assert told["all-reduce"][1] >= shared.gradients_bytes


def test_the_figures_are_those_of_a_rank_that_needs_most(cells: Cells) -> None:
    asked = ("", *(f"&rank={rank}" for rank in range(DEGREE)))
    most, *peaks = (estimate(cells, rank, seq=2048).peak_allocated_bytes for rank in asked)
    assert most == max(peaks) > min(peaks)


def test_nothing_stays_behind_where_pytorchs_own_fails(cells: Cells) -> None:
    before = functional.scaled_dot_product_attention
    with pytest.raises(TraceError, match=r"RuntimeError in model.layers.0.self_attn"):
        estimate(cells, seq=4 * DEGREE)  # two pieces of two tokens, of which efficient attention makes 32
    assert functional.scaled_dot_product_attention is before


@pytest.mark.exhaustive
def test_a_batch_is_of_all_ranks_that_share_sequences() -> None:
    report = sizer.estimate(f"{query()}&parallel=fsdp&ranks=2&cp=2&checkpointing=1")
    assert "4 ranks of FSDP2, groups of 2 share each sequence by context parallel" in report.cautions[0]
    assert "all ranks together have 4 samples" in report.cautions[0]


MISTRAL = CONFIG | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 100}


@pytest.mark.parametrize(
    ("config", "seq", "message"),
    [
        (CONFIG, 100, r"^cp: given 4 for 100 tokens, allowed a length that divides by 8: .*; ask for seq=96"),
        (CONFIG, 3, r"^cp: given 4 for 3 tokens, .*; ask for seq=8"),
        (MISTRAL, 128, r"^cp: given 4 for mistral, with attention windows of 100 tokens, .*; ask for seq=96"),
        (BERT, 64, r"^cp: given 4 for BertForMaskedLM, allowed language models of transformers that learn the next"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(config: dict, seq: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        sizer.estimate(f"{query(config, seq)}&parallel=fsdp&ranks=2&cp=4")


def test_other_libraries_models_are_not_shared() -> None:
    with pytest.raises(RequestError, match=r"^cp: given '2' with a torchvision architecture, allowed cp with hf:"):
        sizer.estimate("arch=torchvision:resnet18&parallel=fsdp&cp=2")

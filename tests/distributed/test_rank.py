"""Whose figures are shown: those of the rank that is asked for, else of the one that needs most."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import Dinov2Config, Dinov2Model, PreTrainedModel

import sizer
from sizer.base.config_json import decode_config, encode_config
from sizer.decision.cells import Cells
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from tests.tracing.models import LLAMA

# Little divides by 2 or 3: 1,001 words, 200 wide, an MLP of 500
CONFIG = {"hidden_size": 200, "intermediate_size": 500, "num_attention_heads": 4, "num_key_value_heads": 2}
UNEVEN = encode_config(json.dumps(LLAMA | CONFIG | {"num_hidden_layers": 2, "vocab_size": 1001}))
QUERY = f"arch=config:{UNEVEN}&seq=16&batch=2&dtype=float32&gpu=h100-80gb"
UNEVEN_WORDS = pytest.mark.skipif(
    not hasattr(PreTrainedModel, "_expand_parallel_plan"),
    reason="this transformers splits 1,001 words in two for nobody",
)


@pytest.fixture(scope="module")
def cells() -> Cells:
    return Cells(parse_query(QUERY))


def peak(cells: Cells, choices: str) -> int:
    """Allocated bytes, the most of them."""
    return cells.estimate(parse_query(f"{QUERY}&{choices}")).peak_allocated_bytes


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("choices", "world"),
    [
        ("parallel=fsdp&ranks=3", 3),
        ("parallel=zero1&ranks=3&optimizer_impl=loop", 3),
        pytest.param("parallel=tp&tp=2&optimizer_impl=loop", 2, marks=UNEVEN_WORDS),
        pytest.param("parallel=fsdp&ranks=3&tp=2", 6, marks=(UNEVEN_WORDS, pytest.mark.exhaustive)),
        pytest.param("parallel=hsdp&ranks=3&replicate=2", 6, marks=pytest.mark.exhaustive),
    ],
)
def test_without_one_it_is_the_rank_that_needs_most(cells: Cells, choices: str, world: int) -> None:
    peaks = [peak(cells, f"{choices}&rank={rank}") for rank in range(world)]
    assert peak(cells, choices) == max(peaks)
    assert min(peaks) < max(peaks), "or it would not matter"


def test_of_zero1_it_need_not_be_the_first(cells: Cells) -> None:
    # Words go to the first two of 4 ranks, 200,200 elements each; of the layers' 840,000 and the norms the other two have more
    first, third = (peak(cells, f"parallel=zero1&ranks=4&rank={rank}") for rank in (0, 2))
    assert first < third == peak(cells, "parallel=zero1&ranks=4")


@pytest.mark.exhaustive
def test_each_rank_of_ddp_holds_quantized_weights_as_they_were_loaded() -> None:
    pytest.importorskip("bitsandbytes")
    query = f"arch=config:{encode_config(json.dumps(LLAMA))}&seq=16&batch=2&dtype=bfloat16&train=adapter&weights=int8"
    (alone,), (rank,) = (estimate(parse_query(f"{query}{more}")).estimates for more in ("", "&parallel=ddp"))
    assert rank.at_peak["frozen parameter"] == alone.at_peak["frozen parameter"] > 0
    # buckets, as large as all gradients: those of the adapter alone
    assert rank.at_peak["workspace"] - alone.at_peak["workspace"] == rank.at_peak["parameter"]


def test_every_rank_of_ddp_is_alike_and_groups_of_hsdp_are(cells: Cells) -> None:
    assert peak(cells, "parallel=ddp&ranks=16&rank=11") == peak(cells, "parallel=ddp&ranks=16")
    # the last of 3 in the second group is the last of the first
    second, first = (peak(cells, f"parallel=hsdp&ranks=3&replicate=4&rank={rank}") for rank in (5, 2))
    assert first == second < peak(cells, "parallel=hsdp&ranks=3&replicate=4")


@pytest.mark.exhaustive
def test_a_report_says_whose_figures_they_are() -> None:
    asked = estimate(parse_query(f"{QUERY}&parallel=fsdp&ranks=3&rank=2"))
    assert "these are the figures of rank 2; another may need more" in asked.cautions
    assert asked.request["rank"] == 2
    assert "rank" not in estimate(parse_query(QUERY)).request


@pytest.mark.exhaustive
def test_what_fsdp_gathers_in_half_beside_float32_statistics_does_not_train() -> None:
    found = estimate(
        parse_query("arch=torchvision:resnet18&image=32&batch=2&dtype=amp-bfloat16&parallel=fsdp&gpu=h100-80gb")
    )
    assert "Expected running_mean to have type BFloat16 but got Float" in found.failures["amp-bfloat16"]


DINO = encode_config(
    '{"model_type": "dinov2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}'
)


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # PyTorch's own, of the class token
@pytest.mark.parametrize("batches", ["2", pytest.param("1,2,8", marks=pytest.mark.exhaustive)])
def test_ddp_looks_for_parameters_without_a_gradient_where_it_must(batches: str) -> None:
    """A whole training of Dinov2's backbone leaves its mask token without one. The own step names what a user writes there."""

    def setup() -> Callable[[], object]:
        module = Dinov2Model(Dinov2Config(**json.loads(decode_config(DINO)))).train()
        model = nn.parallel.DistributedDataParallel(module.cuda(), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters())
        pixels = torch.randn(2, 3, 28, 28, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            out = model(pixel_values=pixels)
            loss = sum(output.float().mean() for output in (out.last_hidden_state, out.pooler_output))
            del out
            loss.backward()
            optimizer.step()

        return step

    query = f"arch=config:{DINO}&dtype=float32&gpu=h100-80gb&parallel=ddp&ranks=4&outputs=freed&head=Dinov2Model&batch={batches}"
    report = estimate(parse_query(query))
    assert any(line.startswith("DDP: find_unused_parameters=True") for line in report.assumptions)
    peak = next(row.peak_allocated_bytes for row in report.estimates if row.batch == 2)
    assert peak == pytest.approx(sizer.size_step(setup, gpu="h100-80gb", world=4).estimates[0].peak_allocated_bytes, abs=4096)
    used = estimate(parse_query(f"{QUERY}&parallel=ddp&ranks=4"))
    assert not any(line.startswith("DDP") for line in used.assumptions)

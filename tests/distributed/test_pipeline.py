"""Pipeline parallel by torch.distributed.pipelining: what a rank has of a model, when it works, and whose figures are shown."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed import pipelining

import sizer
from sizer.base.config_json import encode_config
from sizer.base.errors import RequestError
from sizer.catalogue.parallel import SCHEDULES
from sizer.decision.cells import Cells
from sizer.distributed.described_gpus import Accelerator
from sizer.distributed.pipeline import layers_by_stage
from sizer.distributed.world import world_of
from sizer.estimating.work import plan_of
from sizer.query.text import parse_query
from sizer.tracing.traced_rank import ranks_of_stages
from tests.tracing.models import BERT, GPT2, LLAMA

# 1,000 words, 256 wide, an MLP of 512, 8 heads of which 4 are asked; a layer has 2 norms, the model one
CONFIG = LLAMA | {"num_key_value_heads": 4, "num_hidden_layers": 4}
LAYER = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512 + 2 * 256
WORDS, NORM = 1000 * 256, 256
MADE_IN_TURN = hasattr(pipelining.stage._RecvInfo, "take_buffer")  # what is received into, since PyTorch 2.15
HIDDEN = 4 * 16 * 256  # bytes of a sample's hidden states, of 16 tokens in float32


def query(config: dict = CONFIG, **others: object) -> str:
    return f"arch=config:{encode_config(json.dumps(config | others))}&seq=16&dtype=float32&gpu=h100-80gb"


@pytest.fixture(scope="module")
def cells() -> Cells:
    return Cells(parse_query(f"{query()}&batch=4&pp=4"))


def estimated(cells: Cells, choices: str):
    return cells.estimate(parse_query(f"{query()}&{choices}"))


def test_layers_are_shared_out_as_torchtitan_does() -> None:
    # the embedding and the head count as one layer each
    assert [len(numbers) for numbers in layers_by_stage(126, 8)] == [15, 16, 16, 16, 16, 16, 16, 15]
    assert layers_by_stage(4, 4) == [range(1), range(1, 3), range(3, 4), range(4, 4)]
    assert layers_by_stage(32, 1) == [range(32)]


def test_each_stage_has_its_layers_the_first_the_embedding_the_last_the_head(cells: Cells) -> None:
    weights = [estimated(cells, f"batch=4&pp=4&rank={rank}").weights_bytes for rank in range(4)]
    assert weights == [4 * (WORDS + LAYER), 4 * 2 * LAYER, 4 * LAYER, 4 * (WORDS + NORM)]
    # the stages of an interleaved one: embedding, layer; layer, layer; layer; head
    both = [estimated(cells, f"batch=2&pp=3&schedule=interleaved&rank={rank}").weights_bytes for rank in range(3)]
    assert both == [4 * (WORDS + LAYER), 4 * 2 * LAYER, 4 * (LAYER + WORDS + NORM)]


def test_stages_send_each_other_a_microbatch_forward_and_its_gradient_back(cells: Cells) -> None:
    for rank, neighbours in enumerate((1, 2, 2, 1)):
        found = estimated(cells, f"batch=4&pp=4&rank={rank}").communication
        assert {(row.kind, row.group): (row.calls, row.bytes) for row in found} == dict.fromkeys(
            (("send", "world"), ("receive", "world")), (4 * neighbours, 4 * neighbours * HIDDEN)
        )
    found = estimated(cells, "batch=4&parallel=ddp&ranks=2&pp=2&microbatch=2&rank=0").communication
    told = {row.kind: (row.group, row.calls, row.bytes) for row in found}
    assert told["send"] == told["receive"] == ("pp", 2, 4 * HIDDEN)


def test_earlier_stages_hold_more_microbatches_unless_all_do(cells: Cells) -> None:
    def kept(schedule: str, batch: int, rank: int) -> int:
        return estimated(cells, f"batch={batch}&pp=3&schedule={schedule}&rank={rank}").activations_bytes

    first, middle, last = (kept("1f1b", 3, rank) / layers for rank, layers in enumerate((1, 2, 1)))
    assert first > middle > last / 3, "3, 2 and 1 of them, the last with logits"
    more = kept("1f1b", 6, 1) - kept("1f1b", 3, 1)
    assert more == (0 if MADE_IN_TURN else 3 * 2 * HIDDEN), "a microbatch more is a buffer each way in PyTorch 2.11"
    assert kept("gpipe", 6, 1) == 2 * kept("gpipe", 3, 1) > 2 * kept("1f1b", 3, 1)


@pytest.mark.parametrize(
    ("choices", "needs_most"),
    [
        ("batch=4&pp=4", 1),
        pytest.param("batch=3&pp=3&schedule=gpipe", 1, marks=pytest.mark.exhaustive),
        pytest.param("batch=6&pp=3&schedule=interleaved", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_without_a_rank_it_is_the_one_that_needs_most(cells: Cells, choices: str, needs_most: int) -> None:
    world = parse_query(f"{query()}&{choices}").world
    peaks = [estimated(cells, f"{choices}&rank={rank}").peak_allocated_bytes for rank in range(world)]
    assert estimated(cells, choices).peak_allocated_bytes == max(peaks)
    assert peaks.index(max(peaks)) == needs_most and min(peaks) < max(peaks)


def test_of_stages_between_those_are_traced_that_have_what_no_earlier_one_has(cells: Cells) -> None:
    plan = plan_of(parse_query(f"{query()}&batch=4&pp=4&parallel=fsdp&ranks=8"))
    _, module = cells.tracer(parse_query(f"{query()}&batch=4&pp=4")).built()
    assert ranks_of_stages(module, plan) == (0, 8, 24), "1, 2, 1 and no layers"
    deeper = parse_query(f"{query(num_hidden_layers=6)}&batch=4&pp=4")
    _, module = Cells(deeper).tracer(deeper).built()
    assert ranks_of_stages(module, plan) == (0, 8, 24), "1, 2, 2 and 1 layers"
    module.model.layers[4].mlp = torch.nn.Linear(256, 4096, device="meta")
    assert ranks_of_stages(module, plan) == (0, 8, 16, 24)


def test_a_report_says_whose_figures_they_are_at_each_batch() -> None:
    report = sizer.estimate(f"{query()}&batch=2,4&pp=2")
    assert [row.batch for row in report.estimates] == [2, 4]
    assert "groups of 2 are the stages of a pipeline over microbatches of 1" in report.cautions[0]
    assert report.notes[-1] == (
        "float32: traced separately at each batch size, because a schedule has other steps with more microbatches; "
        "the figures are those of the rank that needs most: rank 1 at batch 2, 4"
    )
    assert report.max_batch[0].batch == 4, "the largest that was traced"


def test_schedules_take_the_microbatches_that_pytorchs_do() -> None:
    def made(key: str, microbatches: int, ranks: int) -> bool:
        device = torch.device("cpu")
        tensor = torch.empty(1, device="meta")
        with world_of(ranks, 0, Accelerator(capability=(9, 0))):
            numbers = range(0, ranks * SCHEDULES[key].stages, ranks)
            stages = [
                pipelining.PipelineStage(
                    torch.nn.Identity(), number, len(numbers) * ranks, device, input_args=tensor, output_args=tensor
                )
                for number in numbers
            ]
            make = getattr(pipelining, SCHEDULES[key].class_name)
            try:
                make(stages if len(stages) > 1 else stages[0], microbatches, loss_fn=torch.sum)
            except ValueError:
                return False
        return True

    asked = [(key, number, ranks) for key in SCHEDULES for ranks in (2, 3, 4) for number in (1, 2, 3, 4, 5, 7, 8, 9)]
    assert {one: SCHEDULES[one[0]].takes(*one[1:]) for one in asked} == {one: made(*one) for one in asked}


@pytest.mark.parametrize(
    ("config", "keys", "message"),
    [
        (CONFIG, "batch=8&pp=8", r"^pp: given 8 for LlamaForCausalLM, allowed at most 6, .*; ask for pp=6"),
        (CONFIG, "batch=4&pp=4&schedule=interleaved", r"^pp: given 4 for LlamaForCausalLM, allowed at most 3"),
        (
            CONFIG | {"tie_word_embeddings": True},
            "batch=2&pp=2",
            r"^pp: given 2 .* allowed 1: its embedding and its head are one parameter",
        ),
        (
            BERT,
            "batch=2&pp=2",
            r"^pp: given 2 for BertForMaskedLM, allowed 1: transformers has no pipeline parallel plan",
        ),
        (
            GPT2,
            "batch=2&pp=2",
            r"^pp: given 2 for GPT2LMHeadModel, allowed 1: transformers has no pipeline parallel plan",
        ),
        (
            CONFIG,
            "batch=2&pp=2&head=LlamaForSequenceClassification",
            r"^pp: given 2 for LlamaForSequenceClassification, allowed 1: transformers has no pipeline parallel plan",
        ),
    ],
)
def test_models_that_cannot_be_cut_are_refused_by_name(config: dict, keys: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        sizer.estimate(f"{query(config)}&{keys}")


def test_stages_of_your_own_run_as_they_are() -> None:
    def setup():
        stage = torch.nn.Linear(256, 256, device="cuda")
        told = torch.empty(1, 256, device="meta", requires_grad=True)
        made = pipelining.PipelineStage(stage, 0, 2, torch.device("cuda", 0), input_args=told, output_args=told)
        schedule = pipelining.Schedule1F1B(made, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

        def step() -> None:
            schedule.step(torch.zeros(4, 256, device="cuda"))
            optimizer.step()
            optimizer.zero_grad()

        return step

    (row,) = sizer.size_step(setup, gpu="h100-80gb", world=2, rank=0).estimates
    assert row.weights_bytes == row.gradients_bytes == 4 * (256 * 256 + 256)
    assert {(told.kind, told.calls, told.bytes) for told in row.communication} == {
        ("send", 4, 4 * 1024),
        ("receive", 4, 4 * 1024),
    }


def test_the_scale_of_a_loss_is_known_to_one_stage_alone() -> None:
    report = sizer.estimate(f"{query().replace('float32', 'amp-float16')}&batch=2&pp=2")
    assert "the gradient scaler scales the loss of the last stage alone" in report.failures["amp-float16"]

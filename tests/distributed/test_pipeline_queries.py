"""Pipelines as a query asks for them: what is understood, and what is refused by name with the nearest that works."""

from __future__ import annotations

import re

import pytest

from sizer.base.errors import RequestError
from sizer.catalogue.gpus import GPUS
from sizer.estimating.scopes import reduce_request
from sizer.estimating.work import plan_of
from sizer.query.request import DEFAULT_BATCHES, gpu_of
from sizer.query.text import format_query, parse_query

LLAMA = "arch=hf:llama-3.1-8b"


def test_a_pipeline_is_asked_for_by_its_degree() -> None:
    alone = parse_query(f"{LLAMA}&pp=4")
    assert (alone.parallel, alone.world, alone.schedule, alone.microbatch) == ("pp", 4, "1f1b", 1)
    assert alone == parse_query(f"{LLAMA}&parallel=pp&pp=4")
    both = parse_query(f"{LLAMA}&parallel=fsdp&ranks=16&tp=8&pp=2&schedule=interleaved")
    assert (both.world, both.data_ranks, plan_of(both).stages) == (256, 16, 4)
    split = parse_query(f"{LLAMA}&tp=2&pp=4&optimizer_impl=loop")
    assert (split.parallel, split.world, split.data_ranks) == ("pp", 8, 1)


def test_batch_sizes_are_those_that_its_schedule_takes() -> None:
    assert parse_query(f"{LLAMA}&pp=4").batches == (4, 8, 16)
    assert parse_query(f"{LLAMA}&pp=4&microbatch=4").batches == (16, 32, 64)
    assert parse_query(f"{LLAMA}&pp=4&schedule=gpipe").batches == DEFAULT_BATCHES[:5]
    assert format_query(parse_query(f"{LLAMA}&pp=2")) == f"{LLAMA}&batch=2,4,8&parallel=pp&pp=2"


@pytest.mark.parametrize(
    "keys",
    [
        "pp=2",
        "batch=8&pp=4&schedule=interleaved&microbatch=2&rank=3",
        "batch=4&parallel=ddp&ranks=2&pp=4&schedule=gpipe",
        "batch=16&parallel=fsdp&ranks=64&reshard=0&tp=2&pp=8&focus=float32:16",
    ],
)
def test_what_is_written_is_read_back_as_it_was(keys: str) -> None:
    request = parse_query(f"{LLAMA}&{keys}")
    assert parse_query(format_query(request)) == parse_query(format_query(request, complete=True)) == request


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("parallel=pp", "pp: given 1 with parallel=pp, allowed 2 or more; ask for pp=4, or remove parallel"),
        ("parallel=zero1&pp=2", "pp: given '2' without parallel=ddp or fsdp or pp"),
        ("parallel=hsdp&pp=2", "pp: given '2' without parallel=ddp or fsdp or pp"),
        ("parallel=tp&tp=2&pp=2", "pp: given '2' without parallel=ddp or fsdp or pp"),
        ("parallel=pp&pp=2&ranks=4", "ranks: given '4' without parallel=ddp or zero1 or fsdp or hsdp"),
        ("pp=2&tp=2", "optimizer_impl: given nothing with parallel=pp, allowed loop"),
        ("pp=2&schedule=dualpipe", "schedule: given 'dualpipe', allowed 1f1b, gpipe, interleaved"),
        ("schedule=gpipe", "schedule: given 'gpipe' without pp=2 or more"),
        ("microbatch=2", "microbatch: given '2' without pp=2 or more"),
        ("parallel=fsdp&pp=2&mode=inference", "mode: given 'inference' with pp=2, allowed training"),
        ("pp=2&train=adapter", "train: given 'adapter' with pp=2, allowed all"),
        ("pp=2&train=head", "train: given 'head' with pp=2, allowed all"),
        (
            "pp=2&accumulate=4",
            "accumulate: given 4 with pp=2, allowed 1: a pipeline accumulates over its microbatches; ask",
        ),
        ("parallel=fsdp&pp=2&offload=1", "offload: given 1 with pp=2, allowed 0"),
        (
            "pp=4&batch=1,2,4,8",
            "batch: given 1,2 with pp=4, schedule=1f1b, allowed a multiple of microbatch=1, 4 microbatches or more, at most "
            "256; ask for batch=4,8",
        ),
        (
            "pp=4&batch=2&microbatch=2",
            "a multiple of microbatch=2, 4 microbatches or more, at most 256; ask for batch=8",
        ),
        ("pp=2&batch=257", "batch: given 257 with pp=2, schedule=1f1b, allowed"),
        ("pp=2&batch=9&microbatch=2", "ask for batch=8"),
        (
            "pp=4&batch=9&schedule=interleaved",
            "batch: given 9 with pp=4, schedule=interleaved, allowed a multiple of microbatch=1, in equal rounds of 4 "
            "microbatches or more, at most 256; ask for batch=8",
        ),
        ("pp=4&batch=4&rank=4", "rank: given 4 with 4 ranks, allowed 0 to 3; ask for rank=3"),
    ],
)
def test_pipelines_that_cannot_be_are_refused_with_the_nearest_that_can(keys: str, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        parse_query(f"{LLAMA}&{keys}")


def test_other_libraries_models_are_not_cut() -> None:
    with pytest.raises(RequestError, match=r"^pp: given '2' with a torchvision architecture, allowed pp with hf:"):
        parse_query("arch=torchvision:resnet18&pp=2")


def test_stages_have_a_communicator_of_their_own() -> None:
    alone, staged, both, all_three = (
        gpu_of(parse_query(f"{LLAMA}{keys}")).context_bytes
        for keys in ("", "&pp=4", "&parallel=fsdp&pp=4", "&parallel=fsdp&pp=4&tp=2")
    )
    assert alone == GPUS[parse_query(LLAMA).gpu].context_bytes
    assert [held - alone for held in (staged, both, all_three)] == [1_060 * 10**6 * number for number in (1, 2, 3)]


def test_the_ranks_of_ddp_are_alike_within_a_stage() -> None:
    last = reduce_request(parse_query(f"{LLAMA}&parallel=ddp&ranks=64&pp=4&rank=255"))
    assert (last.ranks, last.rank, last.world) == (2, 6, 8)
    assert reduce_request(parse_query(f"{LLAMA}&parallel=ddp&ranks=64&pp=4")).rank is None

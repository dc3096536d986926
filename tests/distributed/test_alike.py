"""What a rank holds where it does not depend on how many ranks there are, which is why it is traced once."""

from __future__ import annotations

import pytest

from sizer.architecture import make_blueprint
from sizer.estimating.scopes import reduce_request
from sizer.estimating.work import work_of
from sizer.query.request import Request
from sizer.query.text import parse_query
from sizer.tape.tape import Tape
from sizer.tracing.device import Device
from sizer.tracing.trace import build, trace
from tests.decision.questions import TWO_LAYERS

LANGUAGE = f"{TWO_LAYERS}&seq=16&batch=2&gpu=h100-80gb"
VISION = "arch=torchvision:resnet18&image=32&batch=2&gpu=h100-80gb"


def taped(request: Request) -> Tape:
    """The tape of a rank of exactly so many."""
    (dtype,), (batch,) = request.dtypes, request.batches
    blueprint = make_blueprint(request)
    return trace(blueprint, build(blueprint), work_of(request, dtype), batch=batch, device=Device("cuda", (9, 0)))


@pytest.mark.parametrize(
    "query",
    [
        f"{LANGUAGE}&dtype=float32&parallel=ddp&ranks=64",
        f"{LANGUAGE}&dtype=amp-bfloat16&parallel=hsdp&ranks=4&replicate=64",
        *(
            pytest.param(query, marks=pytest.mark.exhaustive)
            for query in (
                f"{LANGUAGE}&dtype=float32&parallel=ddp&ranks=7&accumulate=2",
                f"{VISION}&dtype=amp-float16&parallel=ddp&ranks=3&optimizer=sgd-momentum",
                f"{LANGUAGE}&dtype=float32&parallel=hsdp&ranks=3&replicate=3&reshard=0&accumulate=2",
                f"{VISION}&dtype=bfloat16&parallel=hsdp&ranks=2&replicate=5",
                f"{LANGUAGE}&dtype=bfloat16&parallel=ddp&ranks=16&cp=2&rank=21",
                f"{LANGUAGE}&dtype=bfloat16&parallel=hsdp&ranks=2&replicate=4&cp=2&rank=11",
            )
        ),
    ],
)
def test_fewer_ranks_have_the_same_tape(query: str) -> None:
    request = parse_query(query)
    fewer = reduce_request(request)
    assert fewer.world < request.world
    assert taped(request) == taped(fewer)


@pytest.mark.parametrize("query", [f"{LANGUAGE}&parallel=fsdp", f"{VISION}&parallel=zero1"])
def test_where_shards_follow_the_ranks_they_are_traced(query: str) -> None:
    request, fewer = (parse_query(f"{query}&dtype=float32&ranks={ranks}") for ranks in (64, 2))
    assert reduce_request(request) == request
    assert taped(request) != taped(fewer)

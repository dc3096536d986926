"""Expert parallel in code of one's own: tokens go where values say, so that the answer is that of even counts, with a range."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

import sizer
from sizer.report.bounds import ROUTED
from sizer.tracing.meta.collectives import ROUTES
from tests.distributed.steps import loaded, save_checkpoints

GPU, MIB = "h100-80gb", 2**20
TOKENS, WIDTH, EXPERTS, WORLD = 1024, 4096, 8, 4


def routed(*, told: bool = True) -> Callable[[], object]:
    """A step that sends each token to two of eight experts, of which each of four ranks has two, and keeps what it is sent."""
    device = torch.device("cuda", torch.cuda.current_device())
    gate = torch.nn.Linear(WIDTH, EXPERTS, bias=False, device=device)
    tokens = torch.zeros(TOKENS, WIDTH, device=device)

    @torch.no_grad()
    def step() -> torch.Tensor:
        experts = gate(tokens).topk(2).indices.flatten()
        order = experts.argsort()
        counts = torch.zeros(EXPERTS, dtype=torch.long, device=device)
        counts.scatter_add_(0, experts, torch.ones_like(experts))
        others = counts.clone()
        if told:
            dist.all_to_all_single(others, counts)
        sent, received = (one.view(WORLD, -1).sum(1).tolist() for one in (counts, others))
        output = torch.empty(sum(received), WIDTH, device=device)
        dist.all_to_all_single(output, tokens[order // 2], received, sent)
        return output

    return step


@pytest.mark.parametrize("rank", [0, 3])
def test_even_counts_and_all_that_others_have(rank: int) -> None:
    report = sizer.size_step(routed, gpu=GPU, world=WORLD, rank=rank)
    (row,) = report.estimates
    # 2,048 pairs of a token and an expert, as many of which come as go, each of 16 KiB
    pairs, pair = 2 * TOKENS, 4 * WIDTH
    assert {told.kind: told.bytes for told in row.communication} == {"all-to-all": 8 * EXPERTS + pairs * pair}
    (found,) = (margin for margin in row.margins if margin.name == ROUTED)
    # a quarter of this rank's own, and all of three others': 6,656 in the place of 2,048
    assert (found.less_bytes, found.more_bytes) == (0, (pairs // 4 + 3 * pairs - pairs) * pair)
    assert row.process_high_bytes >= row.process_bytes + found.more_bytes
    assert any(text.startswith(ROUTES) for text in report.uncounted)


def test_without_counts_there_is_no_such_range() -> None:
    report = sizer.size_step(lambda: routed(told=False), gpu=GPU, world=WORLD)
    assert all(margin.name != ROUTED for margin in report.estimates[0].margins)
    assert not any(text.startswith(ROUTES) for text in report.uncounted)


OLDER = "ep_size" not in DistributedConfig.__dataclass_fields__


@pytest.mark.skipif(OLDER, reason="this transformers has no expert parallel that sends tokens")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_transformers_own_tells_counts_before_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoints(tmp_path)
    monkeypatch.setenv("CHECKPOINTS", str(tmp_path))
    report = sizer.size_step(lambda: loaded("cuda", fsdp_size=4, ep_size=4), gpu=GPU, world=WORLD)
    (row,) = report.estimates
    # in each of two layers 8 counts, then 2 * 256 tokens to two experts each, 512 wide in bfloat16, there, back, and again backward
    sent = 2 * (8 * 8 + 4 * (2 * 2 * 256) * 512 * 2)
    assert {(told.kind, told.calls, told.bytes) for told in row.communication if told.kind == "all-to-all"} == {
        ("all-to-all", 2 * (1 + 4), sent)
    }
    assert any(margin.name == ROUTED and margin.more_bytes > 0 for margin in row.margins)
    # where every rank of a group has the same batch no tokens are sent: its own experts' parts are summed
    whole = sizer.size_step(
        lambda: loaded("cuda", tp_size=4, ep_size=4, ep_implementation="all_reduce"), gpu=GPU, world=WORLD
    )
    assert all(told.kind != "all-to-all" for told in whole.estimates[0].communication)
    assert whole.uncounted == () and all(margin.name != ROUTED for margin in whole.estimates[0].margins)

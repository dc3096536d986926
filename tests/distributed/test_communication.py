"""What ranks tell each other in a step, as traced, against what each way of training says that it does."""

from __future__ import annotations

import pytest

import sizer
from sizer.decision.cells import Cells
from sizer.query.text import parse_query
from tests.decision.questions import TWO_LAYERS

QUERY = f"{TWO_LAYERS}&seq=16&batch=2&gpu=h100-80gb&dtype=float32"
WEIGHTS = 53_561_088  # of GPT-2 with two layers, the output layer being the embedding
SHARED = 4 * WEIGHTS


@pytest.fixture(scope="module")
def cells() -> Cells:
    return Cells(parse_query(QUERY))


def told(cells: Cells, choices: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes by kind and group."""
    found = cells.estimate(parse_query(f"{QUERY}&{choices}")).communication
    return {(row.kind, row.group): (row.calls, row.bytes) for row in found}


@pytest.mark.parametrize("passes", [1, 8])
def test_ddp_reduces_gradients_once_in_a_step(cells: Cells, passes: int) -> None:
    assert told(cells, f"parallel=ddp&ranks=16&accumulate={passes}") == {("all-reduce", "world"): (3, SHARED)}


def test_zero1_gives_back_what_each_rank_has_stepped(cells: Cells) -> None:
    assert told(cells, "parallel=zero1&ranks=4") == {
        ("all-reduce", "world"): (3, SHARED),
        ("broadcast", "world"): (28, SHARED),  # of each of GPT-2's 28 parameters
    }


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_fsdp_gathers_for_each_pass_forward_and_backward(cells: Cells, passes: int) -> None:
    # two blocks and the rest; 768 rows and more divide by 4, whatever their length
    assert told(cells, f"parallel=fsdp&ranks=4&accumulate={passes}") == {
        ("all-gather", "world"): (passes * 6, passes * 2 * _padded(4)),
        ("reduce-scatter", "world"): (passes * 3, passes * _padded(4)),
    }


def test_hsdp_reduces_its_shards_over_the_groups(cells: Cells) -> None:
    assert told(cells, "parallel=hsdp&ranks=4&replicate=16") == {
        ("all-gather", "shard"): (6, 2 * _padded(4)),
        ("reduce-scatter", "shard"): (3, _padded(4)),
        ("all-reduce", "replicate"): (3, _padded(4) // 4),
    }


def _padded(ranks: int) -> int:
    """The weights with the 50,257 rows of the embedding made up to a multiple of the ranks, of 768 columns."""
    return SHARED + 4 * 768 * (-50_257 % ranks)


def test_one_gpu_tells_nobody(cells: Cells) -> None:
    assert told(cells, "optimizer=sgd") == {}


def test_a_report_has_what_a_single_trace_has(cells: Cells) -> None:
    (row,) = sizer.estimate(f"{QUERY}&parallel=fsdp&ranks=4").estimates
    assert row.communication == cells.estimate(parse_query(f"{QUERY}&parallel=fsdp&ranks=4")).communication != ()

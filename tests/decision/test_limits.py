"""Limits: what is said to fit does, by its own trace, and one more does not; the same whatever else was asked."""

from __future__ import annotations

import pytest

from sizer.base.codec import decode, encode
from sizer.decision.limits import SIZES, limits
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from sizer.query.values import MAX_SEQUENCE_LENGTH
from sizer.report.decision import Limit, LimitReport
from tests.decision.questions import (
    CNN,
    FOR_EACH_SAMPLE,
    LANGUAGE,
    SERVED,
    TOO_LARGE,
    TWO_LAYERS,
    VISION,
    anew,
    fits_by_its_own_trace,
)

GENERATED = f"{TWO_LAYERS}&mode=generate&seq=256&new=12&dtype=float32&batch=16&gpu=custom:2GiB@8.0"
FIELDS = {"new": "new", "batch": "batches", "seq": "sequence_length", "image": "image_size"}


def value_of(limit: Limit, value: int) -> dict:
    wrapped = {"batch": (value,), "seq": value, "new": value, "image": (value, value)}[limit.key]
    return {FIELDS[limit.key]: wrapped}


def last(query: str) -> LimitReport:
    return list(limits(parse_query(query)))[-1]


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        (CNN, ["batch", "image"]),
        (SERVED, ["batch", "seq"]),
        pytest.param(FOR_EACH_SAMPLE, ["batch", "image"], marks=pytest.mark.exhaustive),
        pytest.param(GENERATED, ["batch", "seq", "new"], marks=pytest.mark.exhaustive),
    ],
    ids=["CNN", "language model", "a part for each sample", "generation"],
)
def test_what_is_said_to_fit_does_and_one_more_does_not(query, keys):
    found = last(query)
    assert [limit.key for limit in found.limits] == keys
    for limit in found.limits:
        assert limit.cell == anew(limit.query)
        assert fits_by_its_own_trace(found.query, **value_of(limit, limit.value)) is True
        if limit.reason:  # the model refuses more, or the search ended
            continue
        assert fits_by_its_own_trace(found.query, **value_of(limit, limit.value + 1)) is not True
        assert fits_by_its_own_trace(found.query, **value_of(limit, limit.possible_value)) is not False
        assert fits_by_its_own_trace(found.query, **value_of(limit, limit.possible_value + 1)) is False


@pytest.mark.exhaustive
def test_a_batch_whose_replay_would_take_long_is_not_looked_at():
    batch = last("arch=torchvision:ssdlite320_mobilenet_v3_large&dtype=float32&batch=1&mode=inference&gpu=h200").limits[
        0
    ]
    assert 64 < batch.value == batch.possible_value < batch.most_value
    assert batch.reason.startswith(f"searched up to {batch.value}: ")


@pytest.mark.parametrize(
    ("keys", "step"),
    [("", 1), ("&parallel=fsdp&tp=8", 1), ("&parallel=fsdp&tp=8&sp=1", 8), ("&parallel=ddp&cp=4", 4 * 2 * 32)],
)
def test_sequences_that_lie_over_ranks_are_searched_in_steps(keys: str, step: int):
    request = parse_query(f"{TWO_LAYERS}&dtype=bfloat16&batch=1{keys}")
    (sequence,) = (size for size in SIZES if size.title == "Longest sequence")
    searched = sequence.in_steps(request)
    assert (searched.step, searched.largest) == (step, MAX_SEQUENCE_LENGTH // step)


@pytest.mark.exhaustive
def test_it_is_the_same_whatever_was_asked_for():
    query = LANGUAGE.replace("batch=2", "batch={batch}").replace("seq=256", "seq={seq}")
    batches = {last(query.format(batch=batch, seq=64)).limits[0].value for batch in (1, 4)}
    (report,) = {estimate(parse_query(query.format(batch=asked, seq=64))).max_batch[0].batch for asked in ("1,2", "7")}
    assert batches == {report}
    assert len({last(query.format(batch=2, seq=seq)).limits[1].value for seq in (64, 500)}) == 1


def test_a_model_that_ends_before_the_device_says_where():
    # GPT-2 has 1,024 positions
    found = last(f"{TWO_LAYERS}&seq=64&dtype=float16&batch=1&gpu=h200&mode=inference").limits[1]
    assert (found.value, found.possible_value) == (1024, 1024)
    assert found.reason.startswith("at 1025 the model refuses it")


def test_a_fixed_image_is_the_largest():
    (batch, image) = last(VISION).limits
    assert (image.key, image.value) == ("image", 224)
    assert batch.value > 100


def test_where_nothing_fits_it_says_so():
    found = last(TOO_LARGE).limits
    assert [limit.value for limit in found] == [None, None]
    assert "not even a batch of 1 fits" in found[0].reason
    assert found[1].reason == "not even 1 fits for sure"


def test_it_grows_and_survives_the_way_to_the_page():
    grown = list(limits(parse_query(LANGUAGE)))
    assert [len(report.limits) for report in grown] == [0, 1, 2]
    assert [report.pending for report in grown] == [("batch", "seq"), ("seq",), ()]
    assert decode(LimitReport, encode(grown[-1])) == grown[-1]


@pytest.mark.exhaustive
def test_how_many_tokens_fit_is_read_where_memory_ends() -> None:
    query = f"{TWO_LAYERS}&mode=generate&seq=64&new=16&dtype=float32&batch=100&gpu=custom:2GiB@8.0"
    (tokens,) = (limit for limit in last(query).limits if limit.key == "new")
    assert tokens.title == "Most new tokens"
    assert fits_by_its_own_trace(query, new=tokens.value) is True
    assert fits_by_its_own_trace(query, new=tokens.value + 1) is not True

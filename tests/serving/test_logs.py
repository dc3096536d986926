"""Published startup logs against the plan: as near as docs/serving.md says."""

from __future__ import annotations

from functools import cache

import pytest

from tests.serving.logs import Errors, errors_of, middle, read_rows, recorded_errors


@cache
def errors(engine: str) -> list[Errors]:
    return [errors_of(row) for row in read_rows(engine)]


def test_weights_are_those_of_the_logs():
    found = [one.weights for one in errors("vllm")]
    assert sum(value is not None for value in found) >= 35
    typical, worst = middle(found)
    assert typical <= 0.05
    assert worst <= 0.8


def test_tokens_follow_from_the_memory_of_the_logs():
    found = [one.planned for one in errors("vllm")]
    assert sum(value is not None for value in found) >= 28
    assert middle(found)[0] <= 0.05


def test_tokens_end_to_end():
    known = [one for one in errors("vllm") if one.tokens is not None]
    assert len(known) >= 16
    dense = [one.tokens for one in known if one.row.cells["tp"] == "1" and "-A" not in one.row.name and "oss" not in one.row.name]
    assert middle(dense)[0] <= 1.0
    assert middle([one.tokens for one in known])[0] <= 2.0
    outside = [one for one in known if not one.in_band]
    assert len(outside) * 4 <= len(known)
    assert all(one.row.cells["reason"] for one in outside)


def test_sglangs_pool_follows_from_its_share():
    known = [one for one in errors("sglang") if one.tokens is not None]
    assert len(known) >= 23
    assert middle([one.tokens for one in known])[0] <= 0.5
    assert middle([one.tokens for one in known if not one.row.cells["reason"]])[1] <= 4.0
    assert middle([one.tokens for one in known])[1] <= 7.0


def test_sglangs_pool_follows_from_the_gpu_and_flags_alone():
    known = [one for one in errors("sglang") if one.alone is not None]
    assert len(known) >= 21
    assert middle([one.alone for one in known])[0] <= 2.0
    outside = [one for one in known if not one.in_band]
    assert len(outside) * 4 <= len(known)
    assert all(one.row.cells["reason"] for one in outside)
    # a row whose card has less memory than was free says so
    assert all(one.row.cells["reason"] for one in errors("sglang") if one.tokens is not None and one.alone is None)


def test_sglangs_cache_has_the_tokens_of_its_memory():
    assert middle([one.planned for one in errors("sglang")])[1] <= 0.05  # pools of full attention and of windows (Gemma 4)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_documented_errors_are_todays(engine: str):
    for one in errors(engine):
        for name, text in recorded_errors(one).items():
            written = one.row.cells[name]
            assert bool(text) == bool(written), one.row.name
            assert not text or float(text) == pytest.approx(float(written), abs=0.02), (one.row.name, name)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_row_has_a_source(engine: str):
    assert all(row.cells["source"].startswith(("https://", "file: ")) for row in read_rows(engine))

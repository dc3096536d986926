"""Which GPU: every row is the estimate of the same work on that device."""

from __future__ import annotations

import pytest

from sizer.base.codec import decode, encode
from sizer.base.config_json import encode_config
from sizer.catalogue.gpus import GPUS
from sizer.commands.decisions import format_devices
from sizer.decision.devices import devices
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from sizer.report.decision import DeviceReport, cell_of, describe_fitting
from tests.decision.questions import TRACED_EACH, TWO_LAYERS, anew

QUERY = f"{TWO_LAYERS}&seq=64&dtype=bfloat16&batch=4&expandable=1"

ASKED = ("t4", "rtx-4060-8gb", "rtx-4090", "a100-40gb", "h100-80gb", "mi300x", "m2-ultra-64gb", "cpu")


@pytest.fixture(scope="module")
def grown() -> list[DeviceReport]:
    return list(devices(parse_query(QUERY), gpus=[GPUS[key] for key in ASKED]))


def test_every_device_has_a_row(grown):
    found = grown[-1]
    assert {row.gpu for row in found.rows} == set(ASKED)
    assert not found.pending
    assert all(row.searched for row in found.rows)
    assert [row.total_bytes for row in found.rows] == sorted(row.total_bytes for row in found.rows)


@pytest.mark.parametrize("gpu", ["t4", "rtx-4060-8gb", "a100-40gb", "m2-ultra-64gb", "cpu"])
def test_a_row_is_what_asking_for_that_device_gives(grown, gpu):
    row = next(row for row in grown[-1].rows if row.gpu == gpu)
    report = estimate(parse_query(row.query))
    assert row.cell == cell_of(report.estimates[0])
    assert (row.batch, row.possible_batch) == (report.max_batch[0].batch, report.max_batch[0].possible_batch)
    assert ("expandable=1" in row.query) == (GPUS[gpu].backend == "cuda")


def test_it_grows_from_whether_it_fits_to_how_far(grown):
    count = len(ASKED)
    assert [len(report.rows) for report in grown] == [*range(1, count + 1), *[count] * count]
    assert [sum(row.searched for row in report.rows) for report in grown] == [*[0] * count, *range(1, count + 1)]
    assert all(report.pending for report in grown[:-1])


def test_it_survives_the_way_to_the_page(grown):
    assert decode(DeviceReport, encode(grown[-1])) == grown[-1]


def test_where_no_other_batch_was_tried_it_says_so():
    asked = parse_query(TRACED_EACH)
    *_, found = devices(asked, gpus=[GPUS["rtx-4060-8gb"], GPUS["h200"]])
    assert [(row.batch, row.possible_batch, row.tried) for row in found.rows] == [(None, None, True), (256, 256, True)]
    told = [line.rpartition("  ")[2].strip() for line in list(format_devices(found))[1:3]]
    assert told == ["at most 255", "at least 256"]


class InMemoryStore(dict):
    def put(self, name: str, data: bytes) -> None:
        self[name] = data


def test_jobs_beside_each_other_keep_what_each_has_replayed(monkeypatch):
    parts, together = (("rtx-4090", "h100-80gb"), ("t4", "m2-ultra-64gb")), InMemoryStore()
    for part in parts:  # each begins with nothing, and what both keep is put together by name
        kept = InMemoryStore()
        *_, found = devices(parse_query(QUERY), gpus=[GPUS[key] for key in part], store=kept)
        assert all(row.cell.fits for row in found.rows)
        together.update(kept)
    for module in ("allocator.allocator", "report.fit", "report.replays"):
        monkeypatch.setattr(f"sizer.{module}.replay_events", None)
    *_, again = devices(parse_query(QUERY), gpus=[GPUS[key] for part in parts for key in part], store=together)
    assert all(row.batch for row in again.rows)


def test_the_smallest_change_is_named_where_it_fits_none():
    small = [GPUS[key] for key in ("rtx-3050-laptop-4gb", "rtx-3050-ti-laptop")]
    deep = "arch=config:" + encode_config('{"model_type": "gpt2", "n_layer": 8, "vocab_size": 1000}')
    query = f"{deep}&seq=1024&dtype=bfloat16&batch=16"
    found = list(devices(parse_query(query), gpus=small))[-1]
    assert not any(row.cell and row.cell.fits is True for row in found.rows)
    assert found.change and found.changed
    for row in found.changed:
        assert row.cell.fits is True and row.cell == anew(row.query)
    assert f"{found.change}; the smallest: {found.changed[0].name}" in describe_fitting(found)
    assert decode(DeviceReport, encode(found)) == found

"""The bar of the process against its device."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from sizer.query.request import Request
from sizer.ui.headline import balance, capacity_chart, capacity_parts
from tests.ui.reports import report_for
from tests.ui.specs import layers

GIB = 2**30
REQUEST = Request(source="torchvision", name="resnet50", dtypes=("float32",), batches=(1, 256), gpu="rtx-3060-12gb")


def test_parts_fill_the_device_where_the_work_fits():
    report = report_for(REQUEST)
    estimate = report.find("float32", 1)
    parts = capacity_parts(estimate, report.gpu)
    assert next(iter(parts)) == "outside PyTorch"
    assert list(parts)[-1] == "free"
    assert sum(parts.values()) == report.gpu.total_bytes
    assert sum(parts.values()) - parts["free"] == estimate.process_bytes


def test_parts_are_the_process_where_it_does_not_fit():
    report = report_for(REQUEST)
    estimate = report.find("float32", 256)  # 256 samples at 88 MiB are 22 GiB, the device has 12
    parts = capacity_parts(estimate, report.gpu)
    assert "free" not in parts
    assert sum(parts.values()) == estimate.process_bytes > report.gpu.total_bytes


@pytest.mark.parametrize("batch", [1, 256])
def test_segments_stand_end_to_end_and_say_their_exact_bytes(batch):
    report = report_for(REQUEST)
    estimate = report.find("float32", batch)
    chart = capacity_chart(estimate, report.gpu)
    rows = layers(chart)[0]
    assert [row["bytes"] for row in rows] == list(capacity_parts(estimate, report.gpu).values())
    for before, after in pairwise(rows):
        assert after["start"] == pytest.approx(before["end"])
    end = max(report.gpu.total_bytes, estimate.process_high_bytes) / GIB
    assert chart["layer"][0]["encoding"]["x"]["scale"]["domain"] == [0, pytest.approx(end)]


def test_the_balance_in_words():
    report = report_for(REQUEST)
    estimate = replace(
        report.find("float32", 1), process_bytes=4 * GIB, process_low_bytes=3 * GIB, process_high_bytes=5 * GIB
    )
    gpu = replace(report.gpu, total_bytes=12 * GIB)
    assert balance(estimate, gpu) == (
        "The process takes 4.29 GB (4.00 GiB), 33\N{NO-BREAK SPACE}% of the 12.88 GB (12.00 GiB) of one GeForce RTX 3060 (12 GB). "
        "Its range, the mark above the bar: 3.00 GiB to 5.00 GiB."
    )
    small = replace(gpu, total_bytes=3 * GIB)
    assert ", 133\N{NO-BREAK SPACE}% of the 3.22 GB (3.00 GiB) of one GeForce RTX 3060 (12 GB)." in balance(estimate, small)

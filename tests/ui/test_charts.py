"""The charts' data, and colours that everybody can tell apart."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from sizer.query.request import Request
from sizer.tape.tape import CATEGORIES
from sizer.ui.charts import in_sight, legend, peak_chart, step_chart
from sizer.ui.focus import CACHE, OUTSIDE, PEAK_KINDS
from sizer.ui.styling import COLOURS
from sizer.ui.vega import Spec
from tests.ui.reports import report_for
from tests.ui.specs import rows_with

GIB = 2**30
REQUEST = Request(source="torchvision", name="resnet50", dtypes=("float32",), batches=(1, 256), gpu="rtx-3060-12gb")


def sums_by(field: str, chart: Spec) -> Counter:
    """The sums of the bars or areas at each value of a field."""
    sums: Counter = Counter()
    for row in rows_with(chart, "size", "category"):
        sums[row[field]] += row["size"]
    return sums


@pytest.mark.parametrize("key", PEAK_KINDS)
def test_bars_sum_to_the_peaks(key):
    report = report_for(REQUEST)
    chart = peak_chart(report.estimates, PEAK_KINDS[key], report.gpu)
    sums = sums_by("batch", chart)
    for estimate in report.estimates:
        assert sums[estimate.batch] * GIB == pytest.approx(PEAK_KINDS[key].of(estimate), rel=1e-12)


def test_areas_sum_to_the_curve():
    report = report_for(REQUEST)
    estimate = report.estimates[1]
    sums = sums_by("position", step_chart(estimate, report.gpu))
    for point in estimate.curve:
        assert sums[point.position] * GIB == pytest.approx(sum(point.by_category), rel=1e-12)
    assert max(sums.values()) * GIB == pytest.approx(estimate.peak_allocated_bytes, rel=1e-12)


def test_phases_are_named_where_there_is_room():
    report = report_for(REQUEST)
    names = rows_with(step_chart(report.estimates[1], report.gpu), "title")
    assert [row["title"] for row in names] == ["load", "forward", "backward", "optimizer", "second step"]
    assert [after["start"] for after in names[1:]] == [before["end"] for before in names[:-1]]


def test_capacity_is_drawn_where_it_does_not_dwarf_the_bars():
    gpu = report_for(REQUEST).gpu
    assert in_sight(gpu.total_bytes // 2, gpu)
    assert not in_sight(gpu.total_bytes // 3, gpu)
    fitting, too_much = (report_for(replace(REQUEST, batches=batches)) for batches in ((1, 2), (1, 256)))
    kind = PEAK_KINDS["process"]
    assert not rows_with(peak_chart(fitting.estimates, kind, gpu), "capacity")
    (line,) = rows_with(peak_chart(too_much.estimates, kind, gpu), "capacity")
    assert line == {"capacity": gpu.total_bytes / GIB, "device": gpu.name}


def test_every_part_has_a_colour():
    assert set(COLOURS) == {*CATEGORIES, CACHE, OUTSIDE}
    assert legend(COLOURS).count("background:#") == len(COLOURS)


# Machado, Oliveira and Fernandes (2009), severity 1.0: what each kind of colour blindness makes of linear RGB.
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def lab(colour: str, vision: str) -> tuple[float, float, float]:
    """A hex colour in CIE L*a*b* (D65), as somebody with that vision sees it."""
    linear = [_linear(int(colour[place : place + 2], 16) / 255) for place in (1, 3, 5)]
    seen = [min(max(sum(m * c for m, c in zip(row, linear, strict=True)), 0), 1) for row in VISION[vision]]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    x, y, z = (sum(m * c for m, c in zip(row, seen, strict=True)) for row in to_xyz)
    fx, fy, fz = (_cube(value) for value in (x / 0.9505, y, z / 1.089))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def _cube(value: float) -> float:
    return value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116


@pytest.mark.parametrize("vision", VISION)
def test_colours_are_told_apart(vision):
    # A distance of 2.3 in L*a*b* is just noticeable; 15 is plain even for small squares of a legend.
    seen = {name: lab(colour, vision) for name, colour in COLOURS.items()}
    for one, other in itertools.combinations(COLOURS, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen[one], seen[other], strict=True)) ** 0.5
        assert distance > 15, (one, other, round(distance, 1))

"""The question that an estimate answers to be held against a measurement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.device.comparison.counterpart import request_of
from sizer.query.text import parse_query
from tests.device.tapes import measured_from, tape_of, training


@pytest.mark.parametrize(
    ("torch", "asked"),
    [
        ("2.11.0", "2.11"),
        ("2.13.1+cu130", "2.13"),
        ("2.16.0", "2.16"),
        ("2.10.0", "2.10"),
        ("2.5.1", None),  # whose rules nobody read
        ("2.16.0a0+git1234567", None),
        ("", None),
    ],
)
def test_a_measurement_is_held_against_the_rules_of_its_own_pytorch(torch: str, asked: str | None):
    measurement = measured_from(tape_of(training())).measurement
    found = request_of(replace(measurement, versions={**measurement.versions, "torch": torch}))
    assert found == replace(parse_query(measurement.query), torch=asked)
